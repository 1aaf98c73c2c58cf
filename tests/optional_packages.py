"""Optional packages: which tests need them, and imports that fail in all other tests.

A test that needs one has the marker `needs("fastapi")`, or its module calls `pytest.importorskip("fastapi")` at the top,
which is the marker of all tests of the module. Without the package, the test is skipped. In all other tests, the code of
this project cannot import optional packages, so that these tests pass where none is installed. Programs that a test
starts in a process of their own are not checked.
"""

import builtins
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OPTIONAL = {
    "bitsandbytes": "quantization",
    "bm25s": "questions",
    "deepspeed": "distributed",
    "fastapi": "serve",
    "github": "issues",
    "lancedb": "search",
    "matplotlib": "report",
    "mteb": "mteb",
    "nbclient": "notebook",
    "ipykernel": "notebook",
    "optuna": "tuning",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "openai": "questions",
    "prometheus_client": "serve",
    "py3langid": "questions",
    "ray": "ray",
    "semantic_text_splitter": "questions",
    "sentence_transformers": "export",
    "sklearn": "transfer",
    "uvicorn": "serve",
    "xllamacpp": "gguf",
}
"""Import name → extra of the packages that `pip install angle_llm` does not install."""
ROOT = Path(__file__).parents[1]
OWN_FOLDERS = tuple(f"{ROOT / name}{os.sep}" for name in ("angle_llm", "eval", "recipes", "tests"))
allowed: set[str] = set()
"""The optional packages that the current test, or the module that is collected, can import."""
find_spec = importlib.util.find_spec


def is_hidden(module: str) -> bool:
    """Return whether the caller of the importing function is code of this project that must not import the module."""
    package = module.partition(".")[0]
    if package not in OPTIONAL or package in allowed:
        return False
    if getattr(sys.modules.get(package), "__spec__", ...) is None:  # a module that a test made
        return False
    return str(sys._getframe(2).f_globals.get("__file__")).startswith(OWN_FOLDERS)


def hide_optional_packages() -> None:
    """Make imports of this project's code fail for optional packages that are not in `allowed`."""
    import_statement, import_module, importorskip = builtins.__import__, importlib.import_module, pytest.importorskip

    def missing(name: str) -> ModuleNotFoundError:
        package = name.partition(".")[0]
        return ModuleNotFoundError(
            f"No module named {package!r}: optional; a test that needs it has the marker needs({package!r})",
            name=package,
        )

    def guarded_statement(name: str, *arguments: Any, **options: Any) -> Any:
        if is_hidden(name):
            raise missing(name)
        return import_statement(name, *arguments, **options)

    def guarded_module(name: str, package: str | None = None) -> Any:
        if is_hidden(name):
            raise missing(name)
        return import_module(name, package)

    def guarded_find_spec(name: str, package: str | None = None) -> Any:
        if not is_hidden(name):
            return find_spec(name, package)
        assert not collecting, f"use the marker needs({name!r}) in place of find_spec"
        return None

    def marking_importorskip(modname: str, *arguments: Any, **options: Any) -> Any:
        package = modname.partition(".")[0]
        assert package not in OPTIONAL or package in allowed or collecting, f"use the marker needs({package!r})"
        allowed.add(package)
        return importorskip(modname, *arguments, **options)

    builtins.__import__ = guarded_statement  # type: ignore[assignment]
    importlib.import_module = guarded_module
    importlib.util.find_spec = guarded_find_spec
    pytest.importorskip = marking_importorskip  # type: ignore[assignment]


collecting = False
hide_optional_packages()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Mark a module with the packages for which it calls `importorskip`."""
    global collecting
    allowed.clear()
    collecting = isinstance(collector, pytest.Module)
    try:
        report = yield
    finally:
        collecting = False
    if isinstance(collector, pytest.Module) and allowed & OPTIONAL.keys():
        collector.add_marker(pytest.mark.needs(*sorted(allowed & OPTIONAL.keys())))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test import the optional packages of its markers."""
    allowed.clear()
    allowed.update(name for marker in item.iter_markers("needs") for name in marker.args)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip a test whose optional packages are not installed."""
    for name in sorted(allowed):
        if find_spec(name) is None:
            pytest.skip(f"pip install 'angle_llm[{OPTIONAL[name]}]'")
