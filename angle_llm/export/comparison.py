"""Comparison of the forms of an encoder: facts, differences between vectors, and verdict, as text and as JSON.

A form is a stored version of an encoder: an adapter, a whole model, a plain backbone, or a sentence-transformers
folder.

Legend: N texts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from angle_llm.export.weights import WeightsCount
from angle_llm.io import plain
from angle_llm.model.vectors import cosine_differences
from angle_llm.prompts import Side

TOLERANCE, TOLERANCE_HALF = 1e-5, 1e-3
"""Largest allowed 1 - cos of two embeddings of a text, for weights stored in float32 and in half precision."""
SPEARMAN_TOLERANCE, SPEARMAN_TOLERANCE_HALF = 0.1, 1.0
"""Largest allowed difference in Spearman × 100 between two stored versions of an encoder.

For weights stored in float32 and in half precision."""
TOLERANCE_QUANTISED, TIMES_SMALLER_QUANTISED = 1e-2, 10
"""As `TOLERANCE` and `TIMES_SMALLER`, for exported files with weights in 8 bits: only a guard against a wrong file."""
TIMES_SMALLER = 100
"""Factor in the check that a verified encoder was trained at all.

The untrained base must differ this many times more from the first stored version of the encoder than all later versions
do. Otherwise the agreement of the versions shows nothing."""
TIMES_DIRECTION, LEAST_RELATIVE = 10, 0.1
"""Factor and lower bound of the largest allowed |v - u| / |u|.

The factor multiplies the difference that vectors of the same length have at the allowed 1 - cos. The limit is wide,
because rounding changes lengths too: it only finds vectors of another scale."""
LENGTH_TOLERANCE = 1e-3
"""Largest allowed difference from 1 of the length of a normalised vector."""
NOISE = 1e-10
"""Values of 1 - cos below this are rounding errors of float32."""

Rows = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class FormFacts:
    """Name, kind, stored dtype, prompt, pooling and other facts about a stored version of an encoder."""

    name: str
    kind: str
    """Kind of storage: adapter, whole model, backbone (a model without encoder settings), or a program that computes it."""
    dtype: str
    """Dtype of the stored weights; for an adapter, dtype of its base in training."""
    prompt: str
    """Template of the prompt, or of both prompts, as text."""
    pooling: str
    max_length: int
    dimensions: int
    normalize: bool = False
    """Whether embeddings have length 1."""
    spearman: float | None = None
    """Spearman × 100 on the given scored pairs; None without pairs."""

    @property
    def is_rounded(self) -> bool:
        """Whether the weights have fewer bits than float32. An adapter has float32 weights, whatever its base has."""
        return self.kind != "adapter" and self.dtype != "float32"

    @property
    def is_quantised(self) -> bool:
        """Whether the form is an exported file with weights in 8 bits."""
        return (self.kind, self.dtype) in (("onnx", "float32 in 8 bits"), ("llama.cpp", "q8_0"))

    def tolerance(self, first: FormFacts) -> float:
        """Return the largest allowed 1 - cos between the embeddings by this form and by the first form."""
        if self.is_quantised:
            return TOLERANCE_QUANTISED
        if self.kind == "llama.cpp":  # in float16, weights and activations have 11 bits
            return 1e-4 if self.dtype == "float16" else TOLERANCE
        return TOLERANCE_HALF if self.is_rounded or first.is_rounded else TOLERANCE

    def __str__(self) -> str:
        normalised = ", normalised" if self.normalize else ""
        if self.kind == "server":  # the other facts are expected, not known
            return f"{self.name}: server, {self.dimensions} dimensions{normalised}"
        usage = f"prompt {self.prompt}, {self.pooling}, {self.max_length} tokens{normalised}"
        return f"{self.name}: {self.kind}, {self.dtype}, {usage}"


@dataclass(frozen=True)
class Comparison:
    """Differences between two stored versions (forms) of an encoder: `form` and the first form of the verification."""

    form: FormFacts
    tolerance: float
    largest_difference: float
    """Largest 1 - cos between the embeddings of a text by the two compared versions of the encoder."""
    mean_difference: float
    """Mean over the texts of 1 - cos between the embeddings by the two compared versions of the encoder."""
    largest_relative_difference: float
    """Largest |v - u| / |u| over the texts, for embeddings u by the first stored version and v by this version."""
    worst_text: str
    """Text whose embeddings by the two compared versions of the encoder have the smallest cosine."""
    texts_with_other_tokens: int
    """Number of texts for which the two compared versions of the encoder have different token ids."""
    problems: tuple[str, ...]
    """Differences that are not allowed, as text; empty if the two versions are the same encoder."""
    weights: WeightsCount | None = None
    """Comparison of the stored weights, if one version is an adapter and the second may be its merged model; else None."""


@dataclass(frozen=True)
class Verification:
    """Report of `verify`: differences of stored versions (forms) of an encoder from the first form, and the verdict."""

    texts: int
    first: FormFacts
    base_difference: float | None
    """Mean 1 - cos between embeddings by the first stored version and by its untrained base; None if the base is unknown."""
    base_note: str
    """Reason why the untrained base model of the encoder is unknown; empty if it is known."""
    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]
    """Differences between the stored versions of the encoder that are not allowed, as text."""
    notes: tuple[str, ...] = ()
    """Notes in the report that do not change the verdict, such as the number of skipped texts."""
    compared_in: str = ""
    """Names and versions of the libraries that computed the embeddings."""

    @property
    def holds(self) -> bool:
        """Whether all forms are the same encoder, and the first form differs from its untrained base."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of plain JSON values; NaN becomes null."""
        return {"holds": self.holds, **plain(self)}

    def text(self) -> str:
        """Return the report as lines of text; the verdict and the problems are last."""
        base = self.base_note if self.base_difference is None else f"mean 1-cos {self.base_difference:.1e}"
        lines = [
            f"Compared on {self.texts} texts, with the stored weights, in float32.",
            f"Libraries: {self.compared_in}",
            "",
            f"  {self.first}",
            f"    difference from its base   {base}",
        ]
        for result in self.comparisons:
            lines += [
                f"  {result.form}",
                f"    difference from the first  1-cos {result.largest_difference:.1e} at most "
                f"(limit {result.tolerance:.0e}), {result.mean_difference:.1e} in the mean",
                f"                               relative difference {result.largest_relative_difference:.1e} at most",
            ]
            if result.weights is not None:
                lines.append(f"                               {result.weights}")
            if result.form.spearman is not None:
                lines.append(
                    f"                               Spearman {result.form.spearman:.2f}, expected {self.first.spearman:.2f}"
                )
        lines += [f"note: {note}" for note in self.notes]
        lines += ["", "verdict: the same encoder" if self.holds else "verdict: NOT the same encoder"]
        return "\n".join([*lines, *(f"  - {problem}" for problem in self.problems)])


class Encoded(NamedTuple):
    """Facts of a stored version of an encoder, with the token ids and embeddings (N, D) of N texts.

    They are kept after the memory of the encoder is freed.
    """

    facts: FormFacts
    ids: list[list[int]]
    rows_ND: Rows


def compare_forms(
    first: Encoded,
    other: Encoded,
    texts: Sequence[tuple[str, Side | None]],
    allowed: float | None,
    base_difference: float | None,
) -> Comparison:
    """Compare a stored version of an encoder with the first version: facts, token ids, embeddings and Spearman.

    Args:
        texts: the encoded texts, each with its side.
        allowed: largest allowed 1 - cos; None: chosen by the stored dtypes.
        base_difference: mean 1 - cos between the first version and its untrained base; None: not compared.
    """
    # Facts, and token ids, which a server does not report.
    expected, facts = first.facts, other.facts
    problems = [
        f"{name} {getattr(facts, name)}, expected {getattr(expected, name)}"
        for name in ("prompt", "pooling", "max_length", "dimensions", "normalize")
        if getattr(facts, name) != getattr(expected, name)
    ]
    different_ids = sum(a != b for a, b in zip(first.ids, other.ids, strict=True)) if other.ids else 0
    if different_ids:
        problems.append(f"{different_ids} of {len(texts)} texts have different token ids")

    # Directions and lengths of the vectors.
    allowed = facts.tolerance(expected) if allowed is None else allowed
    if facts.dimensions != expected.dimensions:
        differences_N = relative_N = np.full(len(texts), np.nan)
    else:
        differences_N = cosine_differences(other.rows_ND, first.rows_ND)
        distance_N = np.linalg.norm(other.rows_ND - first.rows_ND, axis=1)
        relative_N = distance_N / np.maximum(np.linalg.norm(first.rows_ND, axis=1), np.finfo(np.float64).tiny)
    worst = int(np.nan_to_num(differences_N, nan=np.inf).argmax())
    worst_text, _ = texts[worst]
    largest, mean = float(differences_N[worst]), float(differences_N.mean())
    relative = float(relative_N.max())
    # Vectors whose direction differs by `allowed` differ by sqrt(2 · allowed) of their length.
    largest_relative = max(TIMES_DIRECTION * np.sqrt(2 * allowed), LEAST_RELATIVE)
    if not largest <= allowed:  # true for NaN too
        problems.append(f"1-cos {largest:.1e} exceeds {allowed:.0e}, for the text {worst_text!r:.60}")
    elif facts.normalize and expected.normalize:
        length_error = float(abs(np.linalg.norm(other.rows_ND, axis=1) - 1).max())
        if length_error > LENGTH_TOLERANCE:
            problems.append(
                f"the vectors have other lengths: expected 1 ± {LENGTH_TOLERANCE:.0e}, got 1 ± {length_error:.1e}"
            )
    elif facts.normalize == expected.normalize and relative > largest_relative:
        problems.append(
            f"the vectors have other lengths: relative difference {relative:.1e}, allowed {largest_relative:.1e}"
        )
    problems += _base_problems(facts, largest, mean, base_difference)

    # Spearman on scored pairs.
    if expected.spearman is not None and facts.spearman is not None:
        tolerance = SPEARMAN_TOLERANCE_HALF if expected.is_rounded or facts.is_rounded else SPEARMAN_TOLERANCE
        if not abs(facts.spearman - expected.spearman) <= tolerance:  # true for NaN too
            problems.append(f"Spearman {facts.spearman:.2f}, expected {expected.spearman:.2f}")
    return Comparison(
        form=facts,
        tolerance=allowed,
        largest_difference=largest,
        mean_difference=mean,
        largest_relative_difference=relative,
        worst_text=worst_text,
        texts_with_other_tokens=different_ids,
        problems=tuple(problems),
    )


def _base_problems(form: FormFacts, largest: float, mean: float, base_difference: float | None) -> list[str]:
    """Return a problem if the untrained base is not much farther from the first version than this form is.

    `largest` and `mean` are of 1 - cos between this form and the first version. In 8 bits the mean is checked: rounding
    changes vectors by about 1e-3, but the worst text by up to 1e-2. Training changes vectors by 0.1 and more.
    """
    times, difference = (TIMES_SMALLER_QUANTISED, mean) if form.is_quantised else (TIMES_SMALLER, largest)
    if base_difference is None or base_difference >= times * difference:
        return []
    return [
        f"1-cos {difference:.1e} is not {times} times smaller than the difference from the base, {base_difference:.1e}"
    ]
