"""Comparison of the forms of an encoder: facts, differences of vectors, verdict; as text and as JSON. N texts, D
dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from angle_llm.io import plain

Rows = np.ndarray[Any, np.dtype[np.float64]]

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
"""Largest 1 - cos of any text, by the dtype of the stored weights."""

TIMES_SMALLER = 100
"""The base without training must differ this many times more than the other form; otherwise agreement shows nothing."""

NOISE = 1e-10
"""1 - cos below this is float32 rounding."""

SPEARMAN_TOLERANCE = {"float32": 0.1, "bfloat16": 1.0, "float16": 1.0}
"""Largest difference of Spearman × 100, by the dtype of the stored weights."""


@dataclass(frozen=True)
class FormFacts:
    """One form of an encoder: its kind, dtype, prompt, pooling and lengths."""

    name: str
    kind: str
    """adapter, whole model, backbone, or sentence-transformers."""
    dtype: str
    """Dtype of the stored weights; for an adapter, of its base in training."""
    prompt: str
    prompt_fingerprint: str
    pooling: str
    max_length: int
    dimensions: int
    spearman: float | None = None
    """Spearman × 100 on the given pairs."""


@dataclass(frozen=True)
class WeightsCount:
    """Stored weights of a model that are not those of its adapter's merge (see `merge.count_wrong`)."""

    numbers: int
    wrong: int
    worst_tensor: str
    """Tensor with the largest share of wrong numbers; empty if none is wrong."""

    def __str__(self) -> str:
        return f"{self.wrong:,} of {self.numbers:,} stored weights differ from a float32 merge, rounded once"


@dataclass(frozen=True)
class Comparison:
    """A form compared with the first one."""

    form: FormFacts
    tolerance: float
    minimum_cosine: float
    mean_cosine: float
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
    """Result of `verify`. `base_difference` is the mean 1 - cos of the first form to its base without training; if
    unknown it is None, and `base_note` has the reason."""

    texts: int
    first: FormFacts
    base_difference: float | None
    base_note: str
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())
    """Problems of the first form."""

    @property
    def holds(self) -> bool:
        """Whether all forms are the same encoder, and differ from the base."""
        return not self.problems and not any(other.problems for other in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN is null."""
        values = {"holds": self.holds, "times_smaller_than_base": TIMES_SMALLER} | asdict(self)
        result: dict[str, Any] = plain(values)
        return result

    def text(self) -> str:
        """The report as text."""
        lines = [f"{self.texts} texts, stored weights, float32 arithmetic", "", _line(self.first)]
        if self.base_difference is not None:
            lines.append(f"    to its base           mean 1-cos {self.base_difference:.1e}")
        else:
            lines.append(f"    to its base           unknown: {self.base_note}")
        for other in self.comparisons:
            lines += [
                _line(other.form),
                f"    to the first          1-cos {other.largest_difference:.1e} at most ({other.tolerance:.0e} allowed), "
                f"{other.mean_difference:.1e} in the mean",
                f"                          relative difference {other.largest_relative_difference:.1e} at most",
            ]
            if other.weights is not None:
                lines.append(f"                          {other.weights}")
            if other.form.spearman is not None and self.first.spearman is not None:
                lines.append(
                    f"                          Spearman {other.form.spearman:.2f}, expected {self.first.spearman:.2f}"
                )
        lines += [f"note: {note}" for note in self.notes]
        problems = [*self.problems]
        for other in self.comparisons:
            problems += [f"{other.form.name}: {problem}" for problem in other.problems]
        lines += ["", "verdict: the same encoder" if self.holds else "verdict: NOT the same encoder"]
        return "\n".join([*lines, *(f"  - {problem}" for problem in problems)])


def _line(form: FormFacts) -> str:
    prompt = f"prompt {form.prompt}, {form.pooling}, {form.max_length} tokens"
    return f"  {form.name}: {form.kind}, {form.dtype}, {prompt}"


@dataclass(frozen=True)
class Encoded:
    """Facts, token ids and rows of a form; the form itself may be closed."""

    facts: FormFacts
    ids: list[list[int]]
    rows_ND: Rows


def _unit(rows_ND: Rows) -> Rows:
    length_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
    unit_ND: Rows = rows_ND / np.maximum(length_N1, np.finfo(np.float64).tiny)
    return unit_ND


def cosine_differences(rows_ND: Rows, others_ND: Rows) -> Rows:
    """1 - cos (N,), as half the squared distance of unit vectors: accurate far below the rounding of the cosine."""
    differences_N: Rows = ((_unit(rows_ND) - _unit(others_ND)) ** 2).sum(axis=1) / 2
    return differences_N


def compare_forms(first: Encoded, other: Encoded, texts: Sequence[str], tolerance: float | None) -> Comparison:
    ours, theirs = first.facts, other.facts
    stored = [facts.dtype for facts in (ours, theirs) if facts.kind != "adapter"] or ["float32"]
    allowed = max(TOLERANCE[dtype] for dtype in stored) if tolerance is None else tolerance
    problems = []
    if theirs.prompt_fingerprint != ours.prompt_fingerprint:
        problems.append(f"prompt {theirs.prompt}, expected {ours.prompt}")
    if theirs.pooling != ours.pooling:
        problems.append(f"pooling {theirs.pooling}, expected {ours.pooling}")
    if theirs.max_length != ours.max_length:
        problems.append(f"max_length {theirs.max_length}, expected {ours.max_length}")
    other_ids = sum(a != b for a, b in zip(first.ids, other.ids, strict=True))
    if other_ids:
        problems.append(f"{other_ids} of {len(texts)} texts have different token ids")
    if theirs.dimensions != ours.dimensions:
        problems.append(f"{theirs.dimensions} dimensions, expected {ours.dimensions}")
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
        if not apart <= max(SPEARMAN_TOLERANCE[dtype] for dtype in stored):
            problems.append(f"Spearman {theirs.spearman:.2f}, expected {ours.spearman:.2f}")
    return Comparison(
        form=theirs,
        tolerance=allowed,
        minimum_cosine=1 - largest,
        mean_cosine=1 - float(differences_N.mean()),
        largest_difference=largest,
        mean_difference=float(differences_N.mean()),
        largest_relative_difference=float(relative_N.max()),
        worst_text=texts[worst],
        texts_with_other_tokens=other_ids,
        problems=tuple(problems),
    )
