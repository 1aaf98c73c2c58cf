"""The examples of each batch: a function of seed and epoch, for one dataset or several.

The order is the same on every machine and in every version of Python and NumPy. So all ranks, and a resumed run, get
the same batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]
TEXTS_OF_A_CLASS = 4
"""Number of texts of a class that are next to each other in the order of labelled texts."""


def random_order(n: int, key: int, count: int = 1) -> Order:
    """Return `count` concatenated random orders of the indices 0 … n - 1, shape (count · n,), which depend on `key` only.

    An order sorts the indices by n values of `random.Random(key).random()`: `random()` is the only generator of Python
    that gives the same values in every version. Ten million indices take seconds.
    """
    _, words, _ = random.Random(key).getstate()
    # NumPy guarantees that RandomState gives the same values from the same state, and it is a hundred times faster.
    generator = np.random.RandomState()
    generator.set_state(("MT19937", np.array(words[:-1], np.uint32), words[-1], 0, 0.0))
    return np.argsort(generator.random_sample((count, n)), axis=1, kind="stable").reshape(-1)


@dataclass(frozen=True)
class Draws:
    """Plan of which examples every batch of every epoch contains, for one dataset or several datasets.

    The examples of a dataset are shuffled, used in this order, shuffled again, and so on; an epoch continues where the
    previous epoch ended. So no example is repeated before all other examples of its dataset were used. Example indices
    count the examples of the first dataset, then the examples of the second dataset, and so on.
    """

    sizes: tuple[int, ...]
    """Number of examples of each dataset."""
    counts: tuple[int, ...]
    """Number of examples that an epoch takes from each dataset."""
    by_set: bool = False
    """Whether all examples of a batch come from the same dataset."""
    classes: tuple[Order | None, ...] = field(default=(), compare=False, repr=False)
    """Class number of each example of each dataset; None for a dataset without classes; empty: no dataset has classes."""

    @classmethod
    def of(
        cls, sizes: Sequence[int], weights: Sequence[float], *, by_set: bool, classes: Sequence[Order | None] = ()
    ) -> Draws:
        """Create `Draws` in which an epoch takes weight · size examples from each dataset.

        The products are rounded to integers without changing their sum; an integer below 1 then becomes 1.
        """
        exact = np.array([weight * size for weight, size in zip(weights, sizes, strict=True)])
        counts = np.floor(exact + 1e-9).astype(int)  # so that 0.1 · 30 is 3
        rest = round(float(exact.sum())) - int(counts.sum())
        counts[np.argsort(counts - exact, kind="stable")[: max(rest, 0)]] += 1
        return cls(tuple(sizes), tuple(max(1, int(count)) for count in counts), by_set, tuple(classes))

    def batches(self, batch_size: int) -> int:
        """Return the number of batches of an epoch."""
        parts = self.counts if self.by_set else (sum(self.counts),)
        return sum(-(-count // batch_size) for count in parts)

    def epoch(self, epoch: int, batch_size: int, *, seed: int, first: int = 0) -> Iterator[list[int]]:
        """Yield the example indices of each batch of an epoch, starting with batch number `first` (from 0).

        The last batch may be smaller; with `by_set`, the last batch of each dataset may be smaller.
        """
        streams = [self._stream(number, epoch, seed) for number in range(len(self.sizes))]
        for number, class_N in enumerate(self.classes):
            if class_N is not None:
                together = max(1, min(TEXTS_OF_A_CLASS, batch_size // 2))
                streams[number] = in_classes(streams[number], class_N[streams[number]], together)
        starts = np.cumsum([0, *self.sizes])  # index of the first example of each dataset; the last is the end
        streams = [start + stream for start, stream in zip(starts, streams, strict=False)]
        key = _key(len(self.sizes), seed, epoch)
        if self.by_set:
            ordered = [stream[at : at + batch_size] for stream in streams for at in range(0, len(stream), batch_size)]
            batches = [ordered[index] for index in random_order(len(ordered), key)]
        else:
            order = streams[0] if len(streams) == 1 else _mixed(streams, key)
            batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        for batch in batches[first:]:
            yield batch.tolist()

    def _stream(self, number: int, epoch: int, seed: int) -> Order:
        """Return the indices (from 0) of the examples that an epoch takes from dataset `number`, in order.

        The indices are a slice of the concatenated random orders of the dataset.
        """
        size, count = self.sizes[number], self.counts[number]
        # A dataset that is drawn several times gets several orders from the same generator: for a small dataset, seeding
        # a generator takes longer than drawing an order.
        together = -(-count // size)
        start = epoch * count
        blocks = range(start // (size * together), (start + count - 1) // (size * together) + 1)
        orders = [random_order(size, _key(number, seed, block), together) for block in blocks]
        skipped = start - blocks[0] * size * together
        return (orders[0] if len(orders) == 1 else np.concatenate(orders))[skipped : skipped + count]


def in_classes(stream: Order, class_M: Order, together: int) -> Order:
    """Reorder M examples so that up to `together` examples of a class are consecutive; no example is lost or repeated.

    A group is at the place of its first example, so rare classes are spread over the stream. `class_M` has the classes.
    """
    by_class = np.argsort(class_M, kind="stable")
    sorted_M = class_M[by_class]
    rank_M = np.arange(len(stream)) - np.searchsorted(sorted_M, sorted_M)  # number of the example in its class
    first_M = by_class[np.arange(len(stream)) - rank_M % together]
    ordered: Order = stream[by_class[np.lexsort((rank_M, first_M))]]
    return ordered


def _mixed(streams: Sequence[Order], key: int) -> Order:
    """Merge index arrays in a random order that depends on `key`; the order within each array is kept."""
    source = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
    source = source[random_order(len(source), key)]
    mixed = np.empty(len(source), dtype=np.int64)
    for number, stream in enumerate(streams):
        mixed[source == number] = stream
    return mixed


def _key(number: int, seed: int, turn: int) -> int:
    """Return a distinct integer seed for each dataset number, seed of the training run, and counter `turn`."""
    return number * 2**128 + seed * 2**64 + turn
