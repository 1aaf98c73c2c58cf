"""The data room: `formats` (what a row means), `sources` (files, the hub), `mixture` (several), `batching` (`TextBatch`).

Reading data needs no torch, so `TextBatch` and `batch_indices` are imported when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

from angle_llm.data.formats import FORMATS, DataError, Example, PositivePair, RowError, ScoredPair, Triple
from angle_llm.data.sources import DataReport, DataSource, LoadedData, Rejected, load_examples

if TYPE_CHECKING:
    from angle_llm.data.batching import TextBatch, batch_indices

__all__ = [
    "FORMATS",
    "DataError",
    "DataReport",
    "DataSource",
    "Example",
    "LoadedData",
    "PositivePair",
    "Rejected",
    "RowError",
    "ScoredPair",
    "TextBatch",
    "Triple",
    "batch_indices",
    "load_examples",
]


def __getattr__(name: str) -> Any:
    if name in ("TextBatch", "batch_indices"):
        from angle_llm.data import batching

        return getattr(batching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
