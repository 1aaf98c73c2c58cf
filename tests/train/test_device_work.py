"""What training does on a GPU, found without one: waits for the device, copies, tensors on the wrong device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run


@pytest.fixture(scope="module")
def device_runs() -> list[dict[str, Any]]:
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of torch has no devices written in Python")
    done = run("python", Path(__file__).with_name("device_runs.py"), seconds=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_step_on_another_device_has_the_losses_and_gradients_of_the_cpu(device_runs: list[dict[str, Any]]) -> None:
    """No tensor of the host is among those of the device; kernels of a GPU are replaced by plain ones."""
    steps = [each for each in device_runs if each["run"] == "step"]
    layouts = {(each["layout"], each["kernel"], each["cached"]) for each in steps}
    assert layouts >= {
        (layout, "gathered", cached) for layout in ("trie", "packed", "padded") for cached in (False, True)
    }
    assert layouts >= {(layout, "flex", False) for layout in ("trie", "packed")}
    for each in steps:
        # float32 with sums in another order
        assert each["loss"] < 1e-6, each
        assert each["gradient"] < 1e-5, each


def test_the_host_waits_once_a_step(device_runs: list[dict[str, Any]]) -> None:
    """It waits for the losses, after it has launched the backward pass. Padded texts: transformers reads each mask."""
    for each in device_runs:
        if each["run"] == "step":
            (launched,) = each["launched_before_waits"]
            assert launched > each["kernels"] / 4, "all of the backward pass; the losses have kernels, too"
            passes = each["micro_batches"] * (2 if each["cached"] else 1) * (each["layout"] == "padded")
            assert sum(each["waits"].values()) <= 1 + passes, each
        elif each["run"] == "encode":
            assert sum(each["waits"].values()) == 1, "all rows are copied at once"


def test_copies_to_the_device_do_not_grow_with_layers_or_texts(device_runs: list[dict[str, Any]]) -> None:
    for each in device_runs:
        if each["run"] == "step" and each["kernel"] == "flex":
            # Measured: 88 for 6 micro-batches of a trie, 91 for 5 of packed texts, losses of two batches included; their
            # mean cosines add 4.
            assert sum(each["copies"].values()) <= 15 * each["micro_batches"] + 28, each


def test_a_norm_of_the_device_with_other_results_is_not_used(device_runs: list[dict[str, Any]]) -> None:
    """The layers are tried on the device itself, when an adapter is added."""
    replaced = {each["kernel"]: each["replaced"] for each in device_runs if each["run"] == "norm"}
    assert replaced.pop("right") == "3 LowMemoryMlp, 7 LowMemoryNorm"
    assert len(replaced) == 6
    assert set(replaced.values()) == {"3 LowMemoryMlp"}, replaced


def test_several_processes_exchange_tensors_of_the_device_only(device_runs: list[dict[str, Any]]) -> None:
    """NCCL refuses others; the run fails on the first one."""
    (processes,) = (each for each in device_runs if each["run"] == "processes")
    assert processes["exchanged"]["all_reduce"] >= 2 * 2, "rows and gradients of two steps"
    assert processes["exchanged"]["broadcast"] > 0
