"""Settings, test order, seeds and fixtures of all tests."""

import atexit
import gc
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jinja2
import pytest

# transformers reads these at import, so set them before any test module is imported.
os.environ["OMP_NUM_THREADS"] = "1"  # tests run in parallel: several threads each would be ten times slower
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # short texts: its threads cost more than they save
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["ANGLE_LLM_CACHE"] = tempfile.mkdtemp(prefix="angle-llm-cache-")  # no test writes into the user's cache
atexit.register(shutil.rmtree, os.environ["ANGLE_LLM_CACHE"], ignore_errors=True)
os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no test reads a disk after a power failure
# peft and huggingface_hub compile the template of a model card for every folder.
jinja2.Environment.compile = cache(jinja2.Environment.compile)  # type: ignore[method-assign]


LONGEST = (
    "test_distributed.py",
    "test_forecast.py",
    "test_python_guides.py",
    "test_attention.py",
    "test_resume.py",
    "test_quantization.py",
    "test_contract_train.py",
    "test_contract_resume.py",
    "test_trainer.py",
    "test_merge.py",
    "test_fine_tuning.py",
    "test_step.py",
    "test_sentence_transformers.py",
    "test_readme.py",
    "test_budget.py",
    "test_wheel.py",
    "test_duplicate_issues.py",
    "test_device_work.py",
    "test_prompt_tokenizer.py",
    "test_composite.py",
    "test_merge_several.py",
    "test_guides.py",
    "test_dense.py",
    "test_programs.py",
    "test_blocks.py",
    "test_gpu_scripts.py",
    "test_gguf_file.py",
    "test_pretraining.py",
    "test_python_processes.py",
    "test_float16.py",
    "test_continued.py",
    "test_precomputed_vectors.py",
    "test_contract_export.py",
    "test_contract_embed.py",
    "test_contract_data.py",
    "test_mine.py",
    "test_questions.py",
    "test_token_sequence.py",
    "test_encoder.py",
)
"""Files that take 8 seconds and more, about the longest first."""


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


_PROBED: dict[tuple[Any, ...], Any] = {}
_PROBING_TESTS = {
    "test_attention.py",
    "test_bidirectional.py",
    "test_hybrid.py",
    "test_layers.py",
    "test_token_sequence.py",
}
"""Files whose subject is the probe of layouts: they probe every model."""


@pytest.fixture(autouse=True)
def _probe_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe each architecture and each tiny tokenizer once per session: probes take longer than loading a tiny model."""
    support = sys.modules.get("angle_llm.model.layout.support")
    tokenizers = sys.modules.get("angle_llm.model.source.tokenizer")
    if support is None or tokenizers is None or request.path.name in _PROBING_TESTS:
        return

    def once(key: tuple[Any, ...], probe: Callable[[], Any]) -> Any:
        if key not in _PROBED:
            _PROBED[key] = probe()
        return _PROBED[key]

    def remembered(name: str) -> Callable[..., Any]:
        probe = getattr(support, name)

        def of(backbone: Any, *given: Any, **options: Any) -> Any:
            tensors = backbone.state_dict().items()
            for _, tensor in tensors:
                if tensor.device.type != "cpu" or type(tensor).__name__ not in ("Tensor", "Parameter"):
                    return probe(backbone, *given, **options)
            shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
            architecture = (
                str(backbone),
                shapes,
                backbone.config.to_json_string(),
                backbone.config._attn_implementation,
            )
            return once((name, *architecture, *given, *options.items()), lambda: probe(backbone, *given, **options))

        return of

    joined = tokenizers._joined

    def joined_once(tokenizer: Any, prompt: Any) -> Any:
        if tokenizer.vocab_size > 2000:  # its JSON takes longer than the probe
            return joined(tokenizer, prompt)
        return once((tokenizer.backend_tokenizer.to_str(), prompt), lambda: joined(tokenizer, prompt))

    monkeypatch.setattr(support, "_probe", remembered("_probe"))
    monkeypatch.setattr(tokenizers, "_joined", joined_once)


_READ: dict[tuple[str, int], tuple[list[Any], Any]] = {}


@pytest.fixture(autouse=True)
def _read_starter_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the bundled training data once per session, except in the tests of reading: it takes longer than tiny steps."""
    examples = sys.modules.get("angle_llm.data.examples")
    if examples is None or request.path.parent.name == "data":
        return
    read = examples._read

    def read_once(settings: Any, source: Any, folder: Path | None) -> tuple[Any, Any]:
        if source.kind != "starter":
            return read(settings, source, folder)
        key = examples._store_name(settings, source), examples.store.MEMORY_LIMIT if folder else 0
        if key not in _READ:
            found, report = read(settings, source, folder)
            if not isinstance(found, list):  # stored on disk
                return found, report
            _READ[key] = found, report
        found, report = _READ[key]
        own = {"source": settings, "dropped": dict(report.dropped), "rejected": list(report.rejected)}
        return list(found), replace(report, **own)

    monkeypatch.setattr(examples, "_read", read_once)


@pytest.fixture
def data_dir() -> Path:
    """The folder with the real datasets, from the environment variable ANGLE_LLM_DATA; skips if unset."""
    folder = os.environ.get("ANGLE_LLM_DATA")
    if not folder:
        pytest.skip("real data: set ANGLE_LLM_DATA to the folder that holds nli/, stsb/, sts/ …")
    return Path(folder)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of the network is an error, which `except Exception` does not catch."""
    for owner, name in ((socket, "getaddrinfo"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, Mock(side_effect=pytest.fail.Exception("a test used the network")))
