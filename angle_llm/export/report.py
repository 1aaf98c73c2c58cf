"""What a verification found, and whether it is enough; as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from angle_llm.io import plain

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
"""How large 1 - cos may be, for any text, by the type the weights are stored in."""

TIMES_SMALLER = 100
"""How many times farther from its base an encoder must be than from its other form: else agreement shows nothing."""

NOISE = 1e-10
"""1 - cos below this is the rounding of float32 arithmetic."""

SPEARMAN_TOLERANCE = {"float32": 0.1, "bfloat16": 1.0, "float16": 1.0}
"""How far apart Spearman correlations × 100 may be, by the stored type."""


@dataclass(frozen=True)
class FormFacts:
    """One form of an encoder: what it is and how it words and pools."""

    name: str
    kind: str
    """adapter, whole model, backbone, or sentence-transformers."""
    dtype: str
    """Type of the stored weights; for an adapter, of the base it was trained on."""
    prompt: str
    prompt_fingerprint: str
    pooling: str
    max_length: int
    dimensions: int
    spearman: float | None = None
    """× 100, on the pairs that were given."""


@dataclass(frozen=True)
class WeightsCount:
    """How many of a model's stored numbers are not those of its adapter's merge (see `weights`)."""

    numbers: int
    wrong: int
    worst_tensor: str
    """The tensor with the largest part of wrong numbers; empty if none is wrong."""

    def __str__(self) -> str:
        return f"{self.wrong:,} of {self.numbers:,} stored numbers are not the merge in float32, rounded once"


@dataclass(frozen=True)
class Comparison:
    """A form beside the first one."""

    form: FormFacts
    tolerance: float
    minimum_cosine: float
    mean_cosine: float
    largest_difference: float
    """Largest 1 - cos, computed so that it is right where the cosine is 1 to all digits."""
    mean_difference: float
    largest_relative_difference: float
    """Largest |row - first's row| / |first's row|."""
    worst_text: str
    """Where the cosine is smallest."""
    texts_with_other_tokens: int
    """Texts whose token ids differ."""
    problems: tuple[str, ...]
    """Why this is another encoder; empty when it is the same."""
    weights: WeightsCount | None = None
    """Where one of the two is the adapter and the other a model it may have been merged into."""


@dataclass(frozen=True)
class Verification:
    """The verdict on some forms of an encoder. `base_difference` is the mean 1 - cos of the first to its untouched base,
    None if that is not known, and then `base_note` says why."""

    texts: int
    first: FormFacts
    base_difference: float | None
    base_note: str
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())
    """Of the first form, whatever the others are."""

    @property
    def holds(self) -> bool:
        """Whether all forms are one encoder, and another one than its base."""
        return not self.problems and not any(other.problems for other in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not a number is null."""
        values = {"holds": self.holds, "times_smaller_than_base": TIMES_SMALLER} | asdict(self)
        told: dict[str, Any] = plain(values)
        return told

    def text(self) -> str:
        """For people, some lines."""
        lines = [f"{self.texts} texts, weights as stored, arithmetic in float32", "", _line(self.first)]
        if self.base_difference is not None:
            lines.append(f"    from its base         mean 1-cos {self.base_difference:.1e}")
        else:
            lines.append(f"    from its base         unknown: {self.base_note}")
        for other in self.comparisons:
            lines += [
                _line(other.form),
                f"    from the first        1-cos {other.largest_difference:.1e} at most ({other.tolerance:.0e} allowed), "
                f"{other.mean_difference:.1e} in the mean",
                f"                          relative difference {other.largest_relative_difference:.1e} at most",
            ]
            if other.weights is not None:
                lines.append(f"                          {other.weights}")
            if other.form.spearman is not None and self.first.spearman is not None:
                lines.append(
                    f"                          Spearman {other.form.spearman:.2f}, the first has {self.first.spearman:.2f}"
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
