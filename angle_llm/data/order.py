"""Random orders that are a function of their key alone, on every machine and with every version."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


def random_order(n: int, key: int) -> Order:
    """The numbers 0 … n - 1, sorted by the first n numbers of `random.Random(key).random()`; ten million take seconds.

    Of Python's generators only `random()` is promised to give the same numbers in every version, hence no `shuffle`. numpy's
    `RandomState`, which is frozen, draws the same ones from the same state, a hundred times faster.
    """
    return random_orders(n, 1, key)


def random_orders(n: int, count: int, key: int) -> Order:
    """So many orders of 0 … n - 1, one behind the other: (count · n,); each goes on with the generator of the one before."""
    _, words, _ = random.Random(key).getstate()
    generator = np.random.RandomState()  # the one that never changes
    generator.set_state(("MT19937", np.array(words[:-1], np.uint32), words[-1], 0, 0.0))
    return np.argsort(generator.random_sample((count, n)), axis=1, kind="stable").reshape(-1)
