"""Imports of optional packages fail in tests without a marker, and every extra has its packages in the list."""

import importlib
import importlib.util
from importlib.metadata import metadata

import pytest
from optional_packages import OPTIONAL

from angle_llm.model.layers.quantization import quantize
from angle_llm.settings.parsing import MissingLibraryError


def test_a_test_without_a_marker_imports_no_optional_package() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"needs\('fastapi'\)"):
        import fastapi  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"needs\('sklearn'\)"):
        importlib.import_module("sklearn.linear_model")
    assert importlib.util.find_spec("bitsandbytes") is None
    with pytest.raises(MissingLibraryError, match="bitsandbytes"):
        quantize(None, 4)


def test_every_extra_has_a_package() -> None:
    """`dev` has packages of several extras."""
    extras = metadata("angle_llm").get_all("Provides-Extra") or []
    assert set(extras) - {"dev"} == set(OPTIONAL.values())
