"""What the learning rate does over a run: rises for `warmup` steps, then follows a named shape.

Steps count from 1, and no step is spent at rate 0 (the usual schedulers start there, which is one step in thirty of a
short run).
"""

from __future__ import annotations

import math
from collections.abc import Callable


def linear(left: float) -> float:
    """Falls in a straight line."""
    return left


def cosine(left: float) -> float:
    """Falls along half a cosine."""
    return (1 - math.cos(math.pi * left)) / 2


def constant(left: float) -> float:
    """Stays."""
    return 1.0


SCHEDULES: dict[str, Callable[[float], float]] = {"linear": linear, "cosine": cosine, "constant": constant}
"""From the share of the decay that is left (1 after warm-up, towards 0 at the end) to the share of the peak rate."""


def rate_share(shape: Callable[[float], float], step: int, warmup: int, steps: int) -> float:
    """Share of the peak learning rate that step `step` of `steps` (from 1) is taken with."""
    if step <= warmup:
        return step / warmup
    return shape((steps - step + 1) / (steps - warmup + 1))
