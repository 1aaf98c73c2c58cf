"""What an epoch draws: the whole of each set, by its weight, in an order that seed and epoch decide."""

import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from angle_llm.data.draws import Draws
from angle_llm.data.order import random_order

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**200))
def test_an_order_is_that_of_pythons_numbers(n: int, key: int) -> None:
    generator = random.Random(key)
    keys = [generator.random() for _ in range(n)]
    assert random_order(n, key).tolist() == sorted(range(n), key=keys.__getitem__)


@settings(deadline=None)  # of time, on a busy machine
@given(SIZES, st.data(), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_over_epochs_every_example_comes_as_often_as_any_other(
    sizes: list[int], data: st.DataObject, batch_size: int, by_set: bool, seed: int
) -> None:
    counts = [data.draw(st.integers(1, 70), label="count") for _ in sizes]
    draws = Draws(tuple(sizes), tuple(counts), by_set)
    seen: Counter[int] = Counter()
    for epoch in range(4):
        batches = list(draws.epoch(epoch, batch_size, seed=seed))
        assert len(batches) == draws.batches(batch_size)
        assert all(0 < len(batch) <= batch_size for batch in batches)
        seen.update(index for batch in batches for index in batch)
        start = 0
        for size, count in zip(sizes, counts, strict=True):
            times = [seen[index] for index in range(start, start + size)]
            assert sum(times) == (epoch + 1) * count
            assert max(times) - min(times) <= 1
            start += size


@settings(deadline=None)
@given(SIZES, st.integers(1, 9), st.integers(0, 100))
def test_a_batch_by_set_is_of_one_set(sizes: list[int], batch_size: int, seed: int) -> None:
    draws = Draws(tuple(sizes), tuple(sizes), by_set=True)
    ends = np.cumsum(sizes)
    for batch in draws.epoch(0, batch_size, seed=seed):
        assert len({int(np.searchsorted(ends, index, side="right")) for index in batch}) == 1


def test_mixed_batches_hold_their_share_of_every_set() -> None:
    draws = Draws((9_000, 1_000), (9_000, 1_000))
    of_second = [sum(index >= 9_000 for index in batch) for batch in draws.epoch(0, 100, seed=0)]
    assert np.mean(of_second) == pytest.approx(10)
    # Drawn without replacement: about √(100 · 0.1 · 0.9) = 3 either way.
    assert 2 < np.std(of_second) < 4


@pytest.mark.parametrize(
    ("sizes", "weights", "temperature", "counts"),
    [
        ([100, 300], [1, 1], 1, (100, 300)),
        ([100, 300], [2, 1], 1, (200, 300)),
        ([100, 300], [0.5, 1], 1, (50, 300)),
        ([100, 900], [1, 1], 2, (250, 750)),  # as 10 : 30
        ([100, 900], [1, 1], 1e9, (500, 500)),
        ([1, 1, 1], [1, 1, 1.5], 1, (1, 1, 2)),
        ([3], [0.1], 1, (1,)),
        ([30], [0.1], 1, (3,)),
    ],
)
def test_counts_by_hand(sizes: list[int], weights: list[float], temperature: float, counts: tuple[int, ...]) -> None:
    assert Draws.of(sizes, weights, temperature, by_set=False).counts == counts


@settings(deadline=None)
@given(SIZES, st.floats(0.5, 50), st.data())
def test_counts_add_up_to_the_weighted_sizes(sizes: list[int], temperature: float, data: st.DataObject) -> None:
    weights = [data.draw(st.floats(1, 3), label="weight") for _ in sizes]
    counts = Draws.of(sizes, weights, temperature, by_set=False).counts
    whole = sum(weight * size for weight, size in zip(weights, sizes, strict=True))
    assert abs(sum(counts) - whole) <= 0.5 + 1e-6 + sum(count == 1 for count in counts)  # 1 is the least


def test_a_set_is_drawn_alike_whatever_stands_beside_it() -> None:
    """So that adding a set to a run changes what is between its examples, not their order."""
    alone = [index for batch in Draws.of_one(50).epoch(1, 8, seed=3) for index in batch]
    beside = [index for batch in Draws((50, 20), (50, 20)).epoch(1, 8, seed=3) for index in batch if index < 50]
    assert alone == beside


def test_ten_million_are_ordered_in_little_memory() -> None:
    """Measured in a process of its own: the order takes 80 MB, its making twice as much more."""
    code = (
        "import resource; from angle_llm.data.draws import Draws\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "batch = next(Draws.of_one(10_000_000).epoch(0, 64, seed=1))\n"
        "print(len(batch), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    length, mebibytes = map(int, done.stdout.split())
    assert length == 64
    assert mebibytes < 450
