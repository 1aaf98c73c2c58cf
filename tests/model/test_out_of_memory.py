"""Encoding continues with smaller micro-batches when memory runs out."""

import platform
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tiny import tiny_encoder

from angle_llm.device import is_out_of_memory, unused_gpu
from angle_llm.model.encoder import SentenceEncoder

TEXTS = [f"Text {number} is about a house, {number % 7} dogs and {number} cats." for number in range(40)] * 2


def limit(encoder: SentenceEncoder, tokens: int, error: type[Exception] = torch.OutOfMemoryError) -> list[int]:
    """Fail in the last layer of micro-batches with more tokens; return the tokens of all of them."""
    used: list[int] = []

    def check(*given: Any) -> None:
        if used[-1] > tokens:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB" if error is not MemoryError else "")

    encoder.model.register_forward_pre_hook(
        lambda _, args, given: used.append(given["ids_BT"].numel()), with_kwargs=True
    )
    encoder.model.backbone.layers[-1].register_forward_pre_hook(check)  # type: ignore[index,union-attr]
    return used


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_encoding_continues_with_half_the_tokens(
    error: type[Exception], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = tiny_encoder("llama")
    monkeypatch.setattr("angle_llm.model.encoder.TEXTS_PLANNED", 30)
    expected = encoder.encode(TEXTS, micro_batch_tokens=100)
    used, shown = limit(encoder, 150, error), Mock()
    monkeypatch.setattr("angle_llm.model.encoder.progress_bar", lambda *_, **__: nullcontext(shown))
    rows_ND, stats = encoder.encode(TEXTS, micro_batch_tokens=10_000, return_stats=True)
    np.testing.assert_allclose(rows_ND, expected, rtol=1e-5, atol=1e-6)  # float32, other micro-batches
    failed = [tokens for tokens in used if tokens > 150]
    assert failed == sorted(failed, reverse=True)
    assert 1 <= len(failed) <= 4
    assert failed == used[: len(failed)], "later texts start with the lower limit"
    assert stats.texts == len(TEXTS)
    assert capsys.readouterr().out.count("out of memory: encoding with at most") == len(failed)
    assert sum(call.args[0] for call in shown.update.call_args_list) == len(TEXTS), "each text is counted once"


def test_a_single_text_that_does_not_fit_is_an_error() -> None:
    encoder = tiny_encoder("llama")
    used = limit(encoder, 5)
    with pytest.raises(
        RuntimeError, match=r"single text per micro-batch, of up to \d+ tokens.*--model.max-length"
    ) as found:
        encoder.encode(TEXTS[:9])
    assert is_out_of_memory(found.value)
    assert used[-1] == max(map(len, encoder.tokenize(TEXTS[:9]))), "the last attempt is one text"


def test_other_errors_and_partitioned_weights_are_not_repeated() -> None:
    encoder = tiny_encoder("llama")
    used = limit(encoder, 5, ValueError)
    with pytest.raises(ValueError, match="allocate"):
        encoder.encode(TEXTS[:9])
    assert len(used) == 1
    encoder = tiny_encoder("llama")
    used = limit(encoder, 5)
    encoder.model.register_parameter("partitioned", torch.nn.Parameter(torch.empty(0)))  # as ZeRO-3 shows weights
    with pytest.raises(torch.OutOfMemoryError):
        encoder.encode(TEXTS[:9])
    assert len(used) == 1


@pytest.mark.parametrize(
    ("system", "release", "limits"),
    [("linux", "6.8.0-45-generic", []), ("linux", "5.15.1-microsoft-standard-WSL2", [0.75]), ("win32", "11", [0.75])],
)
def test_a_driver_of_windows_must_not_move_tensors_to_the_memory_of_the_host(
    system: str, release: str, limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 GiB of 8 are free, and torch has reserved 1. The model does not exist."""
    limited: list[float] = []
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2**30)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, _: limited.append(fraction))
    for device in ("cuda:0", "cpu"):
        with pytest.raises(FileNotFoundError):
            SentenceEncoder.from_pretrained("./nowhere", device=device)
    assert limited == limits


@pytest.mark.parametrize(
    ("has_driver", "variables", "is_told"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"CUDA_VISIBLE_DEVICES": ""}, False),
        (True, {"ACCELERATE_USE_CPU": "true"}, False),
        (True, {"ACCELERATE_USE_CPU": "false"}, True),
    ],
)
def test_a_driver_without_a_gpu_for_torch_is_told(
    has_driver: bool, variables: dict[str, str], is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch uses a GPU here")
    if has_driver:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("nvidia-smi is installed" in unused_gpu()) == is_told
