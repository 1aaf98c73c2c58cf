"""Settings, test order, seeds and fixtures of all tests."""

import gc
import os
import random
import socket
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import jinja2
import pytest

# transformers reads these at import, so set them before any test module is imported.
os.environ["OMP_NUM_THREADS"] = "1"  # tests run in parallel: several threads each would be ten times slower
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # short texts: its threads cost more than they save
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["ANGLE_LLM_CACHE"] = tempfile.mkdtemp(prefix="angle-llm-cache-")  # no test writes into the user's cache
os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no test reads a disk after a power failure
# peft and huggingface_hub compile the template of a model card for every folder.
jinja2.Environment.compile = cache(jinja2.Environment.compile)  # type: ignore[method-assign]


LONGEST = (
    "test_distributed.py",
    "test_forecast.py",
    "test_contract_resume.py",
    "test_attention.py",
    "test_contract_train.py",
    "test_readme.py",
    "test_composite.py",
    "test_process_loss.py",
    "test_contract_embed.py",
    "test_device_work.py",
    "test_budget.py",
    "test_blocks.py",
    "test_resume.py",
    "test_dense.py",
    "test_lora.py",
    "test_merge.py",
    "test_step.py",
    "test_trainer.py",
    "test_store.py",
)
"""Files that take 15 seconds and more."""


pytest_plugins = ["optional_packages"]


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, unless only their tests are selected (`pytest -m gpu`): all other tests are for a CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: at the end they would keep one worker busy while the others are idle.
    Skip tests of a GPU where none is visible, and tests of other programs unless only they are selected."""
    if items and items[0].config.option.markexpr != "readers":
        for item in items:
            if item.get_closest_marker("readers"):
                item.add_marker(pytest.mark.skip(reason="`make test-readers`"))
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a GPU and `pytest -m gpu`"))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """Exclude the modules and tests from garbage collection: each full one would take most of a second, in forks too."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed every test and its fixtures, so that draws do not depend on earlier tests of the worker."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


_LAYOUT_PROBLEMS: dict[tuple[Any, ...], str | None] = {}
_LAYOUT_TESTS = {
    "test_attention.py",
    "test_bidirectional.py",
    "test_hybrid.py",
    "test_layers.py",
    "test_token_sequence.py",
}
"""Files whose subject is the probe of layouts: they probe every model."""


@pytest.fixture(autouse=True)
def _probe_each_architecture_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe the layouts of an architecture once per session: a probe takes longer than loading a tiny model."""
    support = sys.modules.get("angle_llm.model.layout.support")
    if support is None or request.path.name in _LAYOUT_TESTS:
        return
    probe = support._probe

    def remembered(backbone: Any, **options: Any) -> str | None:
        tensors = backbone.state_dict().items()
        for _, tensor in tensors:
            if tensor.device.type != "cpu" or type(tensor).__name__ not in ("Tensor", "Parameter"):
                return cast("str | None", probe(backbone, **options))
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
        attention = str(backbone.config._attn_implementation)
        key = (str(backbone), shapes, backbone.config.to_json_string(), attention, *options.items())
        if key not in _LAYOUT_PROBLEMS:
            _LAYOUT_PROBLEMS[key] = probe(backbone, **options)
        return _LAYOUT_PROBLEMS[key]

    monkeypatch.setattr(support, "_probe", remembered)


@pytest.fixture
def data_dir() -> Path:
    """The folder with the real datasets, from the environment variable ANGLE_LLM_DATA; skips if unset."""
    folder = os.environ.get("ANGLE_LLM_DATA")
    if not folder:
        pytest.skip("real data: set ANGLE_LLM_DATA to the folder that holds nli/, stsb/, sts/ …")
    return Path(folder)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of the network is an error."""
    for owner, name in ((socket, "getaddrinfo"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, Mock(side_effect=AssertionError("a test used the network")))
