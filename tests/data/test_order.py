"""Order of examples: a function of seed and epoch; every example is drawn by its weight."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.data.order import Draws, random_order


def one(n: int, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    return list(Draws((n,), (n,)).epoch(epoch, batch_size, seed=seed))


SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


def test_orders_are_those_of_every_version() -> None:
    """A run that is resumed with another version or on another machine depends on them."""
    assert one(8, 3, seed=42, epoch=1) == [[2, 6, 4], [0, 1, 7], [5, 3]]
    mixed = Draws.of([4, 3], [1, 2], by_set=False)
    assert list(mixed.epoch(1, 4, seed=7)) == [[1, 5, 3, 2], [4, 6, 6, 4], [5, 0]]
    by_set = Draws.of([4, 3], [1, 2], by_set=True)
    assert list(by_set.epoch(1, 4, seed=7)) == [[1, 3, 2, 0], [4, 5], [5, 4, 6, 6]]


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**200))
def test_order_is_that_of_the_random_module(n: int, key: int) -> None:
    generator = random.Random(key)
    keys = [generator.random() for _ in range(n)]
    assert random_order(n, key).tolist() == sorted(range(n), key=keys.__getitem__)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 70), st.integers(0, 2**70), st.integers(0, 5))
def test_epoch_has_every_index_once(n: int, batch_size: int, seed: int, epoch: int) -> None:
    batches = one(n, batch_size, seed=seed, epoch=epoch)
    assert Counter(index for batch in batches for index in batch) == Counter(range(n))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(batches)
    assert [i for batch in batches for i in batch] == [
        i for batch in one(n, n + 1, seed=seed, epoch=epoch) for i in batch
    ]


@settings(deadline=None)
@given(SIZES, st.data(), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_over_epochs_every_example_is_drawn_equally_often(
    sizes: list[int], data: st.DataObject, batch_size: int, by_set: bool, seed: int
) -> None:
    counts = [data.draw(st.integers(1, 70), label="count") for _ in sizes]
    draws = Draws(tuple(sizes), tuple(counts), by_set)
    seen: Counter[int] = Counter()
    ends = np.cumsum(sizes)
    for epoch in range(4):
        batches = list(draws.epoch(epoch, batch_size, seed=seed))
        assert len(batches) == draws.batches(batch_size)
        assert all(0 < len(batch) <= batch_size for batch in batches)
        assert list(draws.epoch(epoch, batch_size, seed=seed, first=1)) == batches[1:]
        if by_set:
            assert all(
                len({int(np.searchsorted(ends, index, side="right")) for index in batch}) == 1 for batch in batches
            )
        seen.update(index for batch in batches for index in batch)
        for end, size, count in zip(ends, sizes, counts, strict=True):
            times = [seen[index] for index in range(end - size, end)]
            assert sum(times) == (epoch + 1) * count
            assert max(times) - min(times) <= 1


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [
        ([100, 300], [1, 1], (100, 300)),
        ([100, 300], [2, 1], (200, 300)),
        ([100, 300], [0.5, 1], (50, 300)),
        ([1, 1, 1], [1, 1, 1.5], (1, 1, 2)),
        ([3], [0.1], (1,)),
        ([30], [0.1], (3,)),
    ],
)
def test_counts_follow_weights(sizes: list[int], weights: list[float], counts: tuple[int, ...]) -> None:
    assert Draws.of(sizes, weights, by_set=False).counts == counts


@settings(deadline=None)
@given(SIZES, st.data())
def test_counts_add_up_to_the_weighted_sizes(sizes: list[int], data: st.DataObject) -> None:
    weights = [data.draw(st.floats(1, 3), label="weight") for _ in sizes]
    counts = Draws.of(sizes, weights, by_set=False).counts
    total = sum(weight * size for weight, size in zip(weights, sizes, strict=True))
    assert abs(sum(counts) - total) <= 0.5 + 1e-6 + sum(count == 1 for count in counts)  # 1 is the smallest count


def test_order_of_a_dataset_does_not_depend_on_the_others() -> None:
    alone = [index for batch in one(50, 8, seed=3, epoch=1) for index in batch]
    mixed = [index for batch in Draws((50, 20), (50, 20)).epoch(1, 8, seed=3) for index in batch if index < 50]
    assert alone == mixed
