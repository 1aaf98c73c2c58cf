"""Fingerprints of base weights, which show whether a model is the base that an adapter was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

ORIGINAL = "fingerprint_before_quantization"
"""Name of the attribute of a quantized or truncated backbone that holds the fingerprint of its original weights."""


def weights_fingerprint(backbone: nn.Module) -> str:
    """Return a short hash of the base weights: names, shapes, and a sample of the values of each tensor.

    Values are rounded to bfloat16, so the fingerprint is the same in float32 and bfloat16. A backbone that
    `load_backbone` quantized has the fingerprint of its original weights.
    """
    original: str | None = getattr(backbone, ORIGINAL, None)
    state = backbone.state_dict()
    return original or fingerprint_of(state, state.__getitem__)


def fingerprint_of(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """Return a short hash of named tensors: names, shapes, and a sample of the values of each tensor.

    `read` returns the tensor with a name; it is called for one tensor at a time, to save memory.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = read(name).detach()
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
