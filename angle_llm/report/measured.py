"""What result files hold, kind by kind, as dataclasses that plain values are checked against.

A number that is null does not exist (JSON has no NaN). Figures are × 100 unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Span = tuple[float | None, float | None]
"""The two ends of a 95 % interval."""


@dataclass(frozen=True)
class StsTaskFigures:
    """One STS task."""

    label: str
    variant: str
    pairs: int
    spearman: float | None
    pearson: float | None
    interval: Span | None = None
    subtask_mean: float | None = None
    subtask_weighted: float | None = None
    undefined: str | None = None


@dataclass(frozen=True)
class StsAverage:
    """Mean Spearman over `tasks`."""

    tasks: tuple[str, ...]
    spearman: float | None
    interval: Span | None = None


@dataclass(frozen=True)
class Density:
    """Pairs counted by gold score (outer) and cosine (inner)."""

    gold_edges: tuple[float, ...]
    cosine_edges: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        shape = (len(self.gold_edges) - 1, len(self.cosine_edges) - 1)
        if len(self.counts) != shape[0] or any(len(row) != shape[1] for row in self.counts):
            raise ValueError(f"counts must have {shape[0]} rows of {shape[1]} numbers, one between each two edges.")


@dataclass(frozen=True)
class Sts:
    """Kind `sts`."""

    tasks: dict[str, StsTaskFigures]
    average: StsAverage | None = None
    density: dict[str, Density] = field(default_factory=dict)


@dataclass(frozen=True)
class TransferTaskFigures:
    """One transfer task."""

    accuracy: float | None
    interval: Span | None = None
    label: str | None = None
    undefined: str | None = None
    majority: float | None = None
    sampled: bool = False
    repeated: int | None = None
    dropped: int | None = None
    unconverged: int | None = None


@dataclass(frozen=True)
class Transfer:
    """Kind `transfer`."""

    tasks: dict[str, TransferTaskFigures]
    average: float | dict[str, Any] | None = None
    """Mean accuracy, or an object with `accuracy`."""

    @property
    def mean(self) -> float | None:
        """The average as a number."""
        average = self.average.get("accuracy") if isinstance(self.average, dict) else self.average
        return average if isinstance(average, int | float) else None


@dataclass(frozen=True)
class RetrievalFigure:
    """A mean over queries."""

    value: float | None
    interval: Span | None = None


@dataclass(frozen=True)
class RetrievalTaskFigures:
    """One retrieval task: figures by name, in the order of a table."""

    figures: dict[str, RetrievalFigure]
    label: str | None = None
    queries: int | None = None
    candidates: int | None = None


@dataclass(frozen=True)
class Retrieval:
    """Kind `retrieval`: by task, as `evaluation.retrieval` measures it."""

    tasks: dict[str, RetrievalTaskFigures]


@dataclass(frozen=True)
class Saturation:
    """Kind `saturation`: shares of 1 by zone of the cosine."""

    edges: tuple[float, ...]
    pairs: tuple[float, ...]
    terms: dict[str, tuple[float, ...]]
    saturated: dict[str, float]

    def __post_init__(self) -> None:
        zones = len(self.edges) - 1
        if any(len(shares) != zones for shares in (self.pairs, *self.terms.values())):
            raise ValueError(f"{len(self.edges)} edges need {zones} shares, of the pairs and of each term.")


@dataclass(frozen=True)
class Nested:
    """Kind `nested`: Spearman by layers (outer) and first dimensions (inner)."""

    dimensions: tuple[int, ...]
    layers: tuple[int, ...]
    spearman: tuple[tuple[float | None, ...], ...]

    def __post_init__(self) -> None:
        if len(self.spearman) != len(self.layers) or any(len(row) != len(self.dimensions) for row in self.spearman):
            raise ValueError(
                f"spearman must have a row for each of {len(self.layers)} layers, a number for each of "
                f"{len(self.dimensions)} dimensions."
            )


@dataclass(frozen=True)
class SeedDifference:
    """A row minus the reference row, of the same seed, pair by pair."""

    difference: float | None
    interval: Span | None = None
    p_value: float | None = None
    tasks: dict[str, float | None] = field(default_factory=dict)
    """The difference on each task that both were measured on."""


@dataclass(frozen=True)
class RowDifference:
    """A row minus its reference row, over seeds; `figure` is what differs: the average, or a task."""

    mean_difference: float | None
    reference: str | None = None
    """None: the grid's."""
    interval: Span | None = None
    figure: str = "average"
    per_seed: dict[str, SeedDifference] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparisons:
    """A grid's comparisons.json."""

    reference: str | None
    """None: each row names its own."""
    rows: dict[str, RowDifference]


@dataclass(frozen=True)
class Histogram:
    """Texts counted by length."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.edges) - 1:
            raise ValueError(f"{len(self.edges)} edges need {len(self.edges) - 1} counts, got {len(self.counts)}.")


@dataclass(frozen=True)
class TextLengths:
    """The lengths of one set of texts, in tokens."""

    quantiles: dict[str, float]
    histogram: Histogram
    texts: int | None = None
    mean: float | None = None


@dataclass(frozen=True)
class Lengths:
    """lengths.json."""

    sets: dict[str, TextLengths]
    tokenizer: str | None = None


@dataclass(frozen=True)
class SpeedSummary:
    """A library in a scenario; times in seconds."""

    seconds: float
    per_second: float
    peak_gib: float
    ratio: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None


@dataclass(frozen=True)
class SpeedScenario:
    """The same work for every library."""

    title: str
    unit: str
    units: int
    summary: dict[str, SpeedSummary | None]
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Speed:
    """speed*.json, as eval/speed.py writes it."""

    scenarios: list[SpeedScenario]
    machine: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    finished: str = ""
