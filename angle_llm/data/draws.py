"""Which examples each batch of each epoch holds: a function of (seed, epoch), over one set or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from angle_llm.data.order import Order, random_order, random_orders


@dataclass(frozen=True)
class Draws:
    """How many examples an epoch draws from each of K sets.

    A set's examples come in random orders, one after the other, each a new one: an epoch goes on where the last one stopped.
    So no example comes twice before all others have come, whatever the counts. Examples are numbered through: those of
    the second set follow those of the first.
    """

    sizes: tuple[int, ...]
    """Examples of each set."""
    counts: tuple[int, ...]
    """Examples of each set that an epoch draws."""
    by_set: bool = False
    """Whether a batch holds examples of one set, or of all, at random."""

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[float], temperature: float, *, by_set: bool) -> Draws:
        """Counts in proportion to weight · size^(1 / temperature), as many together as at temperature 1, none of them 0."""
        whole = sum(weight * size for weight, size in zip(weights, sizes, strict=True))
        largest = max(sizes)  # so that no power overflows
        shares = np.array(
            [weight * (size / largest) ** (1 / temperature) for weight, size in zip(weights, sizes, strict=True)]
        )
        exact = shares / shares.sum() * whole
        counts = np.floor(exact + 1e-9).astype(int)  # 0.1 · 30 is no less than 3
        left = round(whole) - int(counts.sum())
        counts[np.argsort(counts - exact, kind="stable")[: max(left, 0)]] += 1
        return cls(tuple(sizes), tuple(max(1, int(count)) for count in counts), by_set)

    @classmethod
    def of_one(cls, size: int) -> Draws:
        """Every example of one set once."""
        return cls((size,), (size,))

    def batches(self, batch_size: int) -> int:
        """How many batches an epoch has."""
        parts = self.counts if self.by_set else [sum(self.counts)]
        return sum(-(-count // batch_size) for count in parts)

    def epoch(self, epoch: int, batch_size: int, *, seed: int, first: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch from the `first` on; the last one, or with `by_set` each set's last, may be smaller."""
        starts = np.cumsum([0, *self.sizes])
        streams = [starts[number] + self._stream(number, epoch, seed) for number in range(len(self.sizes))]
        mixing = len(self.sizes)  # an order of its own
        if self.by_set:
            cut = [stream[at : at + batch_size] for stream in streams for at in range(0, len(stream), batch_size)]
            batches = [cut[place] for place in random_order(len(cut), _key(mixing, seed, epoch))]
        else:
            order = streams[0] if len(streams) == 1 else _mixed(streams, _key(mixing, seed, epoch))
            batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        for batch in batches[first:]:
            yield batch.tolist()

    def _stream(self, number: int, epoch: int, seed: int) -> Order:
        """What an epoch draws of a set, in its order: a piece of random orders one behind the other."""
        size, count = self.sizes[number], self.counts[number]
        if not count:
            return np.zeros(0, dtype=np.int64)
        # Orders of a set that comes often in an epoch are made many at a time: a generator costs more than a short order.
        together = -(-count // size)
        start = epoch * count
        blocks = range(start // (size * together), (start + count - 1) // (size * together) + 1)
        orders = [random_orders(size, together, _key(number, seed, block)) for block in blocks]
        skipped = start - blocks[0] * size * together
        return (orders[0] if len(orders) == 1 else np.concatenate(orders))[skipped : skipped + count]


def _mixed(streams: Sequence[Order], key: int) -> Order:
    """The streams shuffled together, each in its own order."""
    of = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
    of = of[random_order(len(of), key)]
    mixed = np.empty(len(of), dtype=np.int64)
    for number, stream in enumerate(streams):
        mixed[of == number] = stream
    return mixed


def _key(number: int, seed: int, turn: int) -> int:
    return number * 2**128 + seed * 2**64 + turn
