"""Choose which combinations of parameters the quick tests run."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def one_in(count: int, names: str, *values: Iterable[Any]) -> Any:
    """Return `parametrize` for all combinations of `values`; the quick tests run one in `count`.

    Each value stays in the quick tests if `count` has no common factor with the lengths of `values`, the first excepted.
    """
    cases = enumerate(product(*values))
    slow = [pytest.mark.slow]
    return pytest.mark.parametrize(
        names, [pytest.param(*case, marks=slow if number % count else []) for number, case in cases]
    )
