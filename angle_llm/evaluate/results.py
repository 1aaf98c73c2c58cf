"""Results of an evaluation: one type, one Markdown table, one JSON form; published scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

from angle_llm.evaluate.bootstrap import Interval

_NAME_WIDTH = 26


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Result of one task. `metric` is the attribute with the main score, × 100."""

    metric: ClassVar[str]

    name: str
    label: str
    source: str

    @property
    def score(self) -> float:
        """The main score."""
        return float(getattr(self, self.metric))

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        return asdict(self)


Result = TypeVar("Result", bound=TaskResult)


@dataclass(frozen=True)
class Results(Generic[Result]):
    """Results by task name, in the given order, and facts of the encoding.

    `published` are the tasks of published averages, in the order of their columns.
    """

    tasks: dict[str, Result]
    published: tuple[str, ...]
    texts: int
    dimensions: int
    zero_vectors: int
    encode_seconds: float

    @property
    def averaged(self) -> tuple[str, ...]:
        """Tasks of the average: the published ones that were evaluated."""
        return tuple(name for name in self.published if name in self.tasks)

    @property
    def average(self) -> float | None:
        """Mean main score over `averaged`. None without any, NaN if one is NaN."""
        if not self.averaged:
            return None
        return sum(self.tasks[name].score for name in self.averaged) / len(self.averaged)

    @property
    def average_interval(self) -> Interval | None:
        """95 % interval of `average`, where an evaluation has one."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        content: dict[str, Any] = {}
        if self.averaged:
            [metric] = {task.metric for task in self.tasks.values()}
            content["average"] = {"tasks": self.averaged, metric: self.average, "interval": self.average_interval}
        facts = ("texts", "dimensions", "zero_vectors", "encode_seconds")
        return {
            **content,
            "tasks": {name: task.to_dict() for name, task in self.tasks.items()},
            **{name: getattr(self, name) for name in facts},
        }


@dataclass(frozen=True)
class PublishedRow:
    """Published scores × 100 of a model by task (empty if only the average is known), and their average as published."""

    model: str
    scores: Mapping[str, float]
    average: float | None = None

    def average_over(self, tasks: Sequence[str], all_tasks: Sequence[str]) -> float | None:
        """Mean over `tasks`: the published average for all tasks, None if a score is missing."""
        if set(tasks) == set(all_tasks):
            return self.average
        if not tasks or any(task not in self.scores for task in tasks):
            return None
        return sum(self.scores[task] for task in tasks) / len(tasks)


def published_table(
    results: Results[Any],
    model: str,
    published: Sequence[PublishedRow],
    texts: Mapping[str, str] | None = None,
) -> str:
    """Main scores of the model and published ones, averaged over the evaluated tasks.

    `texts` adds a column with the text variant: task name → variant of the model's row; published rows have `senteval`.
    """
    text = [] if texts is None else [" + ".join(dict.fromkeys(texts.values()))]
    name = model if len(model) <= _NAME_WIDTH else "…" + model[1 - _NAME_WIDTH :]  # the table has to fit a terminal
    header = ["model", *(["text"] if text else []), *(task.label for task in results.tasks.values())]
    rows = [[f"**{name}**", *text, *(number(task.score) for task in results.tasks.values())]]
    if results.averaged:
        header.append("average")
        rows[0].append(number(results.average))
        for row in published:
            average = row.average_over(results.averaged, results.published)
            if average is not None:
                scores = (number(row.scores.get(name)) for name in results.tasks)
                rows.append([row.model, *(["senteval"] if text else []), *scores, number(average)])
    return markdown_table(header, rows, words=1 + len(text))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A padded Markdown table; the first `words` columns are left-aligned, the others right-aligned."""
    safe = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in safe)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if column < words else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([line(safe[0]), line(rule), *(line(row) for row in safe[1:])])


def report(model: str, tables: Sequence[str], notes: Sequence[str], results: Results[Any] | None = None) -> str:
    """Markdown: tables, and a list of notes with the model first and the facts of the encoding last."""
    notes = [f"Model: {model}.", *notes]
    if results is not None:
        if results.averaged:
            labels = ", ".join(results.tasks[name].label for name in results.averaged)
            notes.append(f"`average` is over {labels}, in all rows.")
        if results.zero_vectors:
            notes.append(f"{results.zero_vectors:,} of {results.texts:,} texts have a zero vector (cosine 0).")
        notes.append(
            f"{results.texts:,} distinct texts, {results.dimensions} dimensions, encoded in "
            f"{results.encode_seconds:.1f} s."
        )
    return "\n\n".join([*tables, "\n".join(f"- {note}" for note in notes)]) + "\n"


def number(value: float | None) -> str:
    """Two decimals; a dash for None."""
    if value is None:
        return "–"
    return "nan" if math.isnan(value) else f"{value:.2f}"


def span(interval: Interval | None) -> str:
    """An interval, such as 78.10–79.90; a dash for None."""
    return "–" if interval is None else f"{interval.low:.2f}–{interval.high:.2f}"
