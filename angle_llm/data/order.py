"""Which examples each batch of each epoch holds: a function of seed and epoch, over one dataset or several.

The orders are the same on every machine and in every version, so a resumed run and all ranks get the same batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


def random_order(n: int, key: int) -> Order:
    """Return the indices 0 … n - 1 in random order; ten million take seconds.

    They are sorted by the first n values of `random.Random(key).random()`: of Python's generators only `random()` gives
    the same values in every version.
    """
    return random_orders(n, 1, key)


def random_orders(n: int, count: int, key: int) -> Order:
    """Return several orders of 0 … n - 1, concatenated: (count · n,).
    Each continues the generator of the previous one."""
    _, words, _ = random.Random(key).getstate()
    # numpy guarantees that RandomState draws the same values from the same state; it is a hundred times faster.
    generator = np.random.RandomState()
    generator.set_state(("MT19937", np.array(words[:-1], np.uint32), words[-1], 0, 0.0))
    return np.argsort(generator.random_sample((count, n)), axis=1, kind="stable").reshape(-1)


@dataclass(frozen=True)
class Draws:
    """How many examples an epoch draws from each of K datasets, and in which order.

    The examples of a dataset are drawn in random orders, concatenated, each order a new one; an epoch continues where
    the last one ended. So no example is repeated before all others were drawn. Indices run through all datasets: those
    of the second dataset follow those of the first.
    """

    sizes: tuple[int, ...]
    """Examples of each dataset."""
    counts: tuple[int, ...]
    """Examples of each dataset that an epoch draws."""
    by_set: bool = False
    """Whether a batch holds examples of one dataset, or of all."""

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[float], temperature: float, *, by_set: bool) -> Draws:
        """Return draws whose counts are proportional to weight · size^(1 / temperature), at least 1;
        their sum is that of temperature 1."""
        total = sum(weight * size for weight, size in zip(weights, sizes, strict=True))
        largest = max(sizes)  # so that no power overflows
        shares = np.array(
            [weight * (size / largest) ** (1 / temperature) for weight, size in zip(weights, sizes, strict=True)]
        )
        exact = shares / shares.sum() * total
        counts = np.floor(exact + 1e-9).astype(int)  # so that 0.1 · 30 is 3
        rest = round(total) - int(counts.sum())
        counts[np.argsort(counts - exact, kind="stable")[: max(rest, 0)]] += 1
        return cls(tuple(sizes), tuple(max(1, int(count)) for count in counts), by_set)

    @classmethod
    def of_one(cls, size: int) -> Draws:
        """Return draws of every example of one dataset, once each."""
        return cls((size,), (size,))

    def batches(self, batch_size: int) -> int:
        """Return the number of batches of an epoch."""
        parts = self.counts if self.by_set else (sum(self.counts),)
        return sum(-(-count // batch_size) for count in parts)

    def epoch(self, epoch: int, batch_size: int, *, seed: int, first: int = 0) -> Iterator[list[int]]:
        """Yield the batches of an epoch from number `first`;
        the last one (with `by_set`: of each dataset) may be smaller."""
        starts = np.cumsum([0, *self.sizes])
        streams = [starts[number] + self._stream(number, epoch, seed) for number in range(len(self.sizes))]
        key = _key(len(self.sizes), seed, epoch)
        if self.by_set:
            cut = [stream[at : at + batch_size] for stream in streams for at in range(0, len(stream), batch_size)]
            batches = [cut[place] for place in random_order(len(cut), key)]
        else:
            order = streams[0] if len(streams) == 1 else _mixed(streams, key)
            batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        for batch in batches[first:]:
            yield batch.tolist()

    def _stream(self, number: int, epoch: int, seed: int) -> Order:
        """Return the indices that an epoch draws of a dataset: a slice of its concatenated random orders."""
        size, count = self.sizes[number], self.counts[number]
        if not count:
            return np.zeros(0, dtype=np.int64)
        # Several orders at a time for a dataset that is drawn several times: seeding a generator costs more than a
        # short order.
        together = -(-count // size)
        start = epoch * count
        blocks = range(start // (size * together), (start + count - 1) // (size * together) + 1)
        orders = [random_orders(size, together, _key(number, seed, block)) for block in blocks]
        skipped = start - blocks[0] * size * together
        return (orders[0] if len(orders) == 1 else np.concatenate(orders))[skipped : skipped + count]


def _mixed(streams: Sequence[Order], key: int) -> Order:
    """Return the streams shuffled together, each in its own order."""
    source = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
    source = source[random_order(len(source), key)]
    mixed = np.empty(len(source), dtype=np.int64)
    for number, stream in enumerate(streams):
        mixed[source == number] = stream
    return mixed


def _key(number: int, seed: int, turn: int) -> int:
    return number * 2**128 + seed * 2**64 + turn
