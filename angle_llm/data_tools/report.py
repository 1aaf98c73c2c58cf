"""What was understood of a file, for a reader and for a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from angle_llm.data.keys import sound
from angle_llm.data_tools.findings import Finding


@dataclass
class FileReport:
    """Everything `angle-llm data check` says of one file."""

    path: str
    format: str | None = None
    """None: not understood."""
    guessed: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    """Field → column."""
    unused_columns: list[str] = field(default_factory=list)
    score_range: tuple[float, float] | None = None
    """The scale scores were read on."""
    rows_in: int = 0
    rows_used: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    scores: dict[str, int] = field(default_factory=dict)
    """Score, or range of scores → pairs, after rescaling to 0 … 1."""
    distinct_texts: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Quantiles of the distinct texts' lengths; empty without a model."""
    max_length: int | None = None
    truncated: int = 0
    examples: list[str] = field(default_factory=list)
    """Five texts, token by token, with the pooled token marked."""
    train: str = ""
    """The flags that make a training run read the file as it was read here."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def trouble(self) -> bool:
        """Whether something was found that must be seen to before training."""
        return any(finding.trouble for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "trouble": self.trouble}

    def text(self) -> str:
        """Some lines for a terminal."""
        return sound("\n".join([self.path, *(f"  {name:12}{value}" for name, value in self._lines())]))

    def _lines(self) -> Iterator[tuple[str, str]]:
        if self.format is not None:
            yield (
                "format",
                f"{self.format}{', told by the columns' if self.guessed else ''}: "
                + ", ".join(name if name == column else f"{name} = {column}" for name, column in self.columns.items()),
            )
            yield "not used", ", ".join(name or "''" for name in self.unused_columns) or "every column is used"
            yield (
                "rows",
                (
                    f"{self.rows_in:,} = {self.rows_used:,} used + {sum(self.dropped.values()):,} dropped"
                    f"{_listed(self.dropped, ' ({})')} + {self.rejected:,} rejected"
                ),
            )
        if self.scores:
            yield "scores", _listed(self.scores, "{}") + "   (pairs; 1 is the same meaning)"
        if self.rows_used:
            yield "texts", f"{self.distinct_texts:,} distinct"
        if self.tokens:
            yield (
                "tokens",
                (
                    ", ".join(f"{name} {count:,}" for name, count in self.tokens.items())
                    + f"; {self.truncated:,} texts are longer than max_length {self.max_length}"
                ),
            )
        if self.train:
            yield (
                "to train",
                f"angle-llm train --config YOUR.yaml {self.train}  (or --model.path …; without either it is LLaMA-2-7B; "
                "recipes/starter.yaml wants --data.limit None too)",
            )
        for finding in sorted(self.findings, key=lambda finding: not finding.trouble):
            places = f" (rows {', '.join(finding.places)}{', …' if finding.count > len(finding.places) else ''})"
            yield (
                "TROUBLE" if finding.trouble else "note",
                f"{finding.kind}: {finding.text}{places if finding.places else ''}",
            )
        for number, example in enumerate(self.examples, 1):
            yield f"text {number}", example


def _listed(counts: Mapping[str, int], around: str) -> str:
    shown = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
    return around.format(shown) if shown else ""
