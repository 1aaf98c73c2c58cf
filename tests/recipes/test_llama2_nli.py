"""When the recipe of the published run holds its base in NF4, and what it reports if not."""

import importlib.util
import sys

import llama2_nli
import pytest
import torch

from angle_llm.config import TrainSettings


def started(
    monkeypatch: pytest.MonkeyPatch, *flags: str, gpu: bool = True, package: bool = True, rank: int = 0
) -> TrainSettings:
    """Return the settings with which training starts."""
    found: list[TrainSettings] = []
    monkeypatch.setattr(llama2_nli, "train", found.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if package else None)
    monkeypatch.setattr(sys, "argv", ["llama2_nli.py", *flags])
    monkeypatch.setenv("RANK", str(rank))
    llama2_nli.main()
    return found[0]


def test_nf4_needs_a_gpu_and_bitsandbytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(monkeypatch).model.bits == 4
    assert capsys.readouterr().out == ""
    assert started(monkeypatch, gpu=False).model.bits is None
    assert "not in NF4 as in the published run: this machine has no GPU" in capsys.readouterr().out
    assert started(monkeypatch, package=False).model.bits is None
    assert "bitsandbytes is not installed" in capsys.readouterr().out
    assert started(monkeypatch, gpu=False, rank=1).model.bits is None
    assert capsys.readouterr().out == "", "one process reports"


def test_other_settings_do_not_hide_why_there_is_no_nf4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(monkeypatch, "--model.max-length", "60", gpu=False).model.bits is None
    assert "not in NF4" in capsys.readouterr().out
    assert started(monkeypatch, "--model.max-length", "60").model.bits == 4
    assert started(monkeypatch, "--model.path", "other/base").model.bits is None
    assert started(monkeypatch, "--model.path", "other/base", "--model.bits", "4", gpu=False).model.bits == 4
    assert started(monkeypatch, "--model.bits", "None", gpu=False).model.bits is None
    assert capsys.readouterr().out == ""


def test_the_choice_of_the_user_has_priority(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(monkeypatch, "--model.bits", "None").model.bits is None
    assert started(monkeypatch, "--config", "recipes/starter.yaml").model.bits is None
    assert started(monkeypatch, "--config", "recipes/starter.yaml", gpu=False).model.bits is None
    assert started(monkeypatch, "--model.bits", "4", gpu=False).model.bits == 4
    assert capsys.readouterr().out == ""
