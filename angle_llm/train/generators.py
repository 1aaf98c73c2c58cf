"""The generator of a device, from which dropout draws."""

from __future__ import annotations

import torch
from torch import Tensor


def device_state(device: torch.device) -> Tensor | None:
    """Its state; None for the CPU, whose generator is torch's own."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":  # of this GPU, which need not be the current one
        return torch.cuda.get_rng_state(device)
    state: Tensor = torch.get_device_module(device).get_rng_state()
    return state


def set_device_state(device: torch.device, state: Tensor | None) -> None:
    """Puts back what `device_state` gave."""
    if state is None:
        return
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.get_device_module(device).set_rng_state(state)
