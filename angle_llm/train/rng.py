"""State of the random number generators that training draws from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def torch_state(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that dropout draws from: the CPU's, and the device's unless it is the CPU."""
    if device.type == "cpu":
        return [torch.get_rng_state()]
    if device.type == "cuda":  # of this GPU, which need not be the current one
        return [torch.get_rng_state(), torch.cuda.get_rng_state(device)]
    return [torch.get_rng_state(), torch.get_device_module(device).get_rng_state()]


def set_torch_state(state: Sequence[Tensor], device: torch.device) -> None:
    """Restore what `torch_state` returned."""
    torch.set_rng_state(state[0])
    for on_device in state[1:]:
        if device.type == "cuda":
            torch.cuda.set_rng_state(on_device, device)
        else:
            torch.get_device_module(device).set_rng_state(on_device)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators (Python, numpy, torch) as JSON values."""
    name, words, *rest = np.random.get_state()  # noqa: NPY002  # the global one, which libraries draw from
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *rest],
        "torch": [state.tolist() for state in torch_state(device)],
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    set_torch_state([torch.tensor(one, dtype=torch.uint8) for one in state["torch"]], device)


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed the generators of a rank other than 0, so that no two ranks draw the same dropout masks."""
    if rank:
        from accelerate.utils import set_seed

        set_seed(int.from_bytes(hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()[:4], "little"))
