"""From the plain values of a JSON file to the dataclasses of `measured`, or to a message that says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from angle_llm.report.measured import Retrieval

Kind = TypeVar("Kind")


class FiguresError(ValueError):
    """Values that are not the figures they should be: where, and what came."""


def checked(kind: type[Kind], values: object, where: str) -> Kind:
    """Plain values as `kind`; what it does not know is left out, NaN is null.

    Raises:
        FiguresError: naming `where`, the key, what it needs and what came.
    """
    from pydantic import ValidationError

    try:
        adapter: Any = _adapter(kind)  # type: ignore[arg-type]
        figures: Kind = adapter.validate_python(finite(SHAPES.get(kind, _same)(values)))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(step) for step in first["loc"])
        more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise FiguresError(
            f"{where}: {key or 'the whole'}: {first['msg']}, got {_short(first['input'])}{more}."
        ) from error
    return figures


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def finite(value: Any) -> Any:
    """The same plain values, null for each number that is not finite."""
    if isinstance(value, Mapping):
        if value.keys() == {"low", "high"}:  # an interval
            return [finite(value["low"]), finite(value["high"])]
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _same(values: object) -> object:
    return values


def _retrieval(values: object) -> object:
    """One task's figures without a name, {"strict_accuracy", "recall": {k: …}, "mrr", "ndcg", "intervals"}, as a task."""
    if not isinstance(values, Mapping) or "tasks" in values:
        return values
    if "figures" in values:
        return {"tasks": {"retrieval": values}}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and name not in {"asked", "intervals"}:
            flat |= {f"{name}@{k}": item for k, item in value.items()}
        elif isinstance(value, int | float) or value is None:
            flat[name] = value
    intervals = values.get("intervals") or {}
    return {
        "tasks": {"retrieval": {"figures": {k: {"value": v, "interval": intervals.get(k)} for k, v in flat.items()}}}
    }


SHAPES: dict[Any, Callable[[object], object]] = {Retrieval: _retrieval}
"""Kinds that come in more than one shape, and what makes one of them."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
