"""What was computed, and how much of the machine it used.

*Logical* tokens are those of the texts asked for, repeats counted, without padding. *Computed* tokens went through the
model, padding included; shared prefixes and repeats count once. Utilisation counts computed tokens.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from angle_llm.model.microbatches import Plan


@dataclass(frozen=True)
class EncodeStats:
    """What one call of `encode` did."""

    texts: int
    unique_texts: int
    """Texts with different ids."""
    logical_tokens: int
    computed_tokens: int
    seconds: float
    """With tokenisation and planning."""
    flops_per_token: float
    """Floating-point operations of the linear layers for one computed token."""
    way: str
    """trie or padded."""
    reason: str
    """Why this way."""

    @classmethod
    def none(cls, flops_per_token: float) -> EncodeStats:
        """Before the first text."""
        return cls(0, 0, 0, 0, 0.0, flops_per_token, "", "")

    def plus(self, plan: Plan) -> EncodeStats:
        """With the texts of one more plan; way and reason are those of the first."""
        return replace(
            self,
            texts=self.texts + len(plan.row_of),
            unique_texts=self.unique_texts + plan.unique,
            logical_tokens=self.logical_tokens + plan.logical_tokens,
            computed_tokens=self.computed_tokens + plan.computed_tokens,
            way=self.way or plan.way,
            reason=self.reason or plan.reason,
        )

    @property
    def texts_per_second(self) -> float:
        """Texts asked for, repeats counted."""
        return self.texts / self.seconds

    @property
    def flops(self) -> float:
        """Floating-point operations of the linear layers."""
        return self.flops_per_token * self.computed_tokens

    @property
    def computed_share(self) -> float:
        """Computed tokens for each logical one; below 1 where texts share more than padding adds."""
        return self.computed_tokens / max(self.logical_tokens, 1)


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations of the linear layers for one token. Attention between tokens is not counted (2 % at 7B and 50 tokens); the
    last layer is, whole, though half of it runs for pooled tokens alone (2 to 3 % at 30 layers)."""

    forward: int
    """Two for each weight."""
    backward: int
    """Two for each weight gradients pass through, and two for each weight that has a gradient."""

    @classmethod
    def of(cls, backbone: nn.Module) -> FlopsPerToken:
        """Counted from the shapes of the layers."""
        forward = backward = 0
        for module in backbone.modules():
            # GPT-2's Conv1D is a linear layer with its weight transposed.
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                weight: torch.Tensor = module.weight  # type: ignore[assignment]
                # Not the size of the tensor where it is a layer's: in 4 bits two weights are packed into one byte.
                size = module.in_features * module.out_features if isinstance(module, nn.Linear) else weight.numel()
                forward += 2 * size
                backward += 2 * size * (2 if weight.requires_grad else 1)
        return cls(forward, backward)


DATASHEET_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12}
"""Dense 16-bit matrix products a second, from the makers' data sheets (SXM form where there are several), by a word of the
device's name."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second the device can do: its data sheet's figure, or what a large product reaches here (0.1 s)."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for key, flops in DATASHEET_FLOPS.items():
            if re.search(rf"\b{key}\b", name):
                return flops
    size = 1024 if device.type == "cpu" else 8192
    left = torch.ones(size, size, device=device, dtype=dtype)
    best = 0.0
    for _ in range(4):  # the first is slower: threads and memory wake up
        started = time.perf_counter()
        float((left @ left)[0, 0])  # reading a value waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best
