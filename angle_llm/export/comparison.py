"""Comparison of the forms of an encoder: facts, differences of vectors, verdict; as text and as JSON.

Legend: N texts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from angle_llm.export.weights import WeightsCount
from angle_llm.io import plain
from angle_llm.vectors import unit_rows

TOLERANCE, TOLERANCE_HALF = 1e-5, 1e-3
"""Largest 1 - cos of any text, for weights stored in float32 and in half precision."""
SPEARMAN_TOLERANCE, SPEARMAN_TOLERANCE_HALF = 0.1, 1.0
"""Largest difference of Spearman × 100."""
TIMES_SMALLER = 100
"""The base without training must differ this many times more than the other form; otherwise agreement shows nothing."""
NOISE = 1e-10
"""1 - cos below this is float32 rounding."""

Rows = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class FormFacts:
    """One form of an encoder."""

    name: str
    kind: str
    """adapter, whole model, backbone, or sentence-transformers."""
    dtype: str
    """Dtype of the stored weights; for an adapter, of its base in training."""
    prompt: str
    """Template, edits and tokenization."""
    pooling: str
    max_length: int
    dimensions: int
    normalize: bool = False
    """Whether vectors have length 1."""
    spearman: float | None = None
    """Spearman × 100 on the given pairs."""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.kind}, {self.dtype}, prompt {self.prompt}, {self.pooling}, {self.max_length} tokens"
            + (", normalised" if self.normalize else "")
        )


@dataclass(frozen=True)
class Comparison:
    """A form compared with the first one."""

    form: FormFacts
    tolerance: float
    largest_difference: float
    """Largest 1 - cos, accurate far below the rounding of the cosine."""
    mean_difference: float
    largest_relative_difference: float
    """Largest |row - first's row| / |first's row|."""
    worst_text: str
    """Text with the smallest cosine."""
    texts_with_other_tokens: int
    """Number of texts with different token ids."""
    problems: tuple[str, ...]
    """Differences that are not allowed; empty for the same encoder."""
    weights: WeightsCount | None = None
    """For an adapter and a model it may have been merged into."""


@dataclass(frozen=True)
class Verification:
    """Result of `verify`."""

    texts: int
    first: FormFacts
    base_difference: float | None
    """Mean 1 - cos of the first form to its base without training; None if the base is unknown."""
    base_note: str
    """Why the base is unknown; empty if it is known."""
    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]
    """Of all forms."""
    notes: tuple[str, ...] = ()
    """Facts that do not change the verdict, such as skipped texts."""
    compared_in: str = ""
    """Libraries that computed the vectors, with versions."""

    @property
    def holds(self) -> bool:
        """Whether all forms are the same encoder, and differ from the base."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; NaN is null."""
        values: dict[str, Any] = plain({"holds": self.holds} | asdict(self))
        return values

    def text(self) -> str:
        """Return the report as text."""
        base = self.base_note if self.base_difference is None else f"mean 1-cos {self.base_difference:.1e}"
        lines = [
            f"Compared on {self.texts} texts, with the stored weights, in float32.",
            f"Libraries: {self.compared_in}",
            "",
        ]
        lines.append(f"  {self.first}")
        lines.append(f"    difference from its base   {base}")
        for other in self.comparisons:
            lines += [
                f"  {other.form}",
                f"    difference from the first  1-cos {other.largest_difference:.1e} at most (limit {other.tolerance:.0e}), "
                f"{other.mean_difference:.1e} in the mean",
                f"                               relative difference {other.largest_relative_difference:.1e} at most",
            ]
            if other.weights is not None:
                lines.append(f"                               {other.weights}")
            if other.form.spearman is not None:
                lines.append(
                    f"                               Spearman {other.form.spearman:.2f}, expected {self.first.spearman:.2f}"
                )
        lines += [f"note: {note}" for note in self.notes]
        lines += ["", "verdict: the same encoder" if self.holds else "verdict: NOT the same encoder"]
        return "\n".join([*lines, *(f"  - {problem}" for problem in self.problems)])


class Encoded(NamedTuple):
    """Facts, token ids and rows of a form; the form itself may be closed."""

    facts: FormFacts
    ids: list[list[int]]
    rows_ND: Rows


def cosine_differences(rows_ND: Rows, others_ND: Rows) -> Rows:
    """Return 1 - cos (N,), as half the squared distance of unit vectors, which is more accurate than the cosine."""
    differences_N: Rows = ((unit_rows(rows_ND) - unit_rows(others_ND)) ** 2).sum(axis=1) / 2
    return differences_N


def compare_forms(first: Encoded, other: Encoded, texts: Sequence[str], tolerance: float | None) -> Comparison:
    """Compare a form with the first one: facts, token ids, rows and Spearman."""
    ours, theirs = first.facts, other.facts
    half = any(facts.kind != "adapter" and facts.dtype != "float32" for facts in (ours, theirs))
    allowed = tolerance or (TOLERANCE_HALF if half else TOLERANCE)
    problems = [
        f"{name} {found}, expected {expected}"
        for name in ("prompt", "pooling", "max_length", "dimensions", "normalize")
        if (found := getattr(theirs, name)) != (expected := getattr(ours, name))
    ]
    other_ids = sum(a != b for a, b in zip(first.ids, other.ids, strict=True))
    if other_ids:
        problems.append(f"{other_ids} of {len(texts)} texts have different token ids")
    if theirs.dimensions != ours.dimensions:
        differences_N = relative_N = np.full(len(texts), np.nan)
    else:
        differences_N = cosine_differences(other.rows_ND, first.rows_ND)
        distance_N = np.linalg.norm(other.rows_ND - first.rows_ND, axis=1)
        relative_N = distance_N / np.maximum(np.linalg.norm(first.rows_ND, axis=1), np.finfo(np.float64).tiny)
    worst = int(np.nan_to_num(differences_N, nan=np.inf).argmax())
    largest = float(differences_N[worst])
    if not largest <= allowed:  # true for NaN too
        problems.append(f"1-cos {largest:.1e} exceeds {allowed:.0e}, for the text {texts[worst]!r:.60}")
    if ours.spearman is not None and theirs.spearman is not None:
        apart = abs(theirs.spearman - ours.spearman)
        if not apart <= (SPEARMAN_TOLERANCE_HALF if half else SPEARMAN_TOLERANCE):
            problems.append(f"Spearman {theirs.spearman:.2f}, expected {ours.spearman:.2f}")
    means = (float(differences_N.mean()), float(relative_N.max()))
    return Comparison(theirs, allowed, largest, *means, texts[worst], other_ids, tuple(problems))
