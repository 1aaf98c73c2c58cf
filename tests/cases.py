"""Choose which combinations of parameters the quick tests run."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def one_in(count: int, names: str, *values: Iterable[Any]) -> Any:
    """Return `parametrize` for all combinations of `values`; the quick tests run one in `count`, with each value."""
    lists = [list(of) for of in values]
    cases = list(product(*lists))
    for place, of in enumerate(lists):
        assert {case[place] for case in cases[::count]} == {*of}, f"a count of {count} leaves out values of {names}"
    slow = [pytest.mark.slow]
    return pytest.mark.parametrize(
        names, [pytest.param(*case, marks=slow if number % count else []) for number, case in enumerate(cases)]
    )
