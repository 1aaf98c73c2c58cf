"""Recipes of the published runs: their settings, when the base is in NF4, and what is reported if not."""

import importlib.util
import sys
from typing import Any

import bert_nli
import llama2_nli
import pytest
import torch

from angle_llm.settings.train import TrainSettings

NO_GPU = {"gpu": False}


def test_optimizer_and_batches_are_those_of_the_published_commands() -> None:
    """angle-emb, examples/NLI/README.md: pairs per GPU × GPUs × (accumulation // GPUs), as `AnglE.fit` divides it."""
    commands = {bert_nli: (5e-5, 50, 10, 128, 128 * 8 * (16 // 8)), llama2_nli: (1e-4, 100, 1, 50, 120 * 4 * (4 // 4))}
    for recipe, published in commands.items():
        run = recipe.PUBLISHED
        optimizer = (run.optimizer.learning_rate, run.optimizer.warmup, run.epochs)
        assert (*optimizer, run.model.max_length, run.batch_size * run.accumulation) == published


@pytest.mark.parametrize(
    ("flags", "machine", "bits", "reported"),
    [
        ([], {}, 4, False),
        ([], NO_GPU, None, True),
        ([], {"package": False}, None, True),
        ([], {"gpu": False, "rank": 1}, None, False),
        (["--model.max-length", "60"], NO_GPU, None, True),
        (["--model.max-length", "60"], {}, 4, False),
        (["--model.path", "other/base"], {}, None, False),
        (["--model.path", "other/base", "--model.bits", "4"], NO_GPU, 4, False),
        (["--model.bits", "None"], NO_GPU, None, False),
        (["--model.bits", "4"], NO_GPU, 4, False),
        (["--config", "recipes/starter.yaml"], {}, None, False),
        (["--config", "recipes/starter.yaml"], NO_GPU, None, False),
    ],
)
def test_nf4_needs_a_gpu_and_bitsandbytes_unless_the_user_chooses(
    flags: list[str],
    machine: dict[str, Any],
    bits: int | None,
    reported: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[TrainSettings] = []
    monkeypatch.setattr(llama2_nli, "train", found.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.get("gpu", True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if machine.get("package", True) else None)
    monkeypatch.setattr(sys, "argv", ["llama2_nli.py", *flags])
    monkeypatch.setenv("RANK", str(machine.get("rank", 0)))
    llama2_nli.main()
    assert found[0].model.bits == bits
    assert ("NF4" in capsys.readouterr().out) == reported
