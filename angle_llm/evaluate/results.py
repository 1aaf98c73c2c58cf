"""Results of an evaluation: one type, one Markdown table, one JSON form; published scores."""

from __future__ import annotations

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
        """Return all values, for JSON."""
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
        """Return all values, for JSON."""
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
    """Published scores × 100 of a model by task (empty if only the average is known), and their published average."""

    model: str
    scores: Mapping[str, float]
    average: float

    def average_over(self, tasks: Sequence[str], all_tasks: Sequence[str]) -> float | None:
        """Return the mean over `tasks`: the published average for all tasks, None if a score is missing."""
        if set(tasks) == set(all_tasks):
            return self.average
        if not tasks or any(task not in self.scores for task in tasks):
            return None
        return sum(self.scores[task] for task in tasks) / len(tasks)


def published_table(
    results: Results[Any], model: str, published: Sequence[PublishedRow], text: str | None = None
) -> str:
    """Return the main scores of the model and published ones, averaged over the evaluated tasks.

    `text` adds a column with the text variant: that of the model's row; published rows have `senteval`.
    """
    tasks = results.tasks.values()
    name = short_name(model)
    texts, means = ["text"] * (text is not None), ["average"] * (results.average is not None)
    rows: list[list[object]] = [
        [f"**{name}**", *(text for _ in texts), *(task.score for task in tasks), *(results.average for _ in means)]
    ]
    for row in published:
        average = row.average_over(results.averaged, results.published)
        if average is not None:
            rows.append([row.model, *("senteval" for _ in texts), *map(row.scores.get, results.tasks), average])
    return table(["model", *texts, *(task.label for task in tasks), *means], rows, words=1 + len(texts))


def short_name(model: str) -> str:
    """Return the end of the name of a model, so that a table fits a terminal."""
    return model if len(model) <= _NAME_WIDTH else "…" + model[1 - _NAME_WIDTH :]


def table(header: Sequence[str], rows: Sequence[Sequence[object]], words: int) -> str:
    """Return a padded Markdown table; the first `words` columns are left-aligned, the others right-aligned.

    Floats have two decimals, intervals are 78.10–79.90, None is a dash.
    """
    safe = [[_cell(value).replace("|", "\\|") for value in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*safe, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells[:words], widths, strict=False)]
        padded += [cell.rjust(width) for cell, width in zip(cells[words:], widths[words:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if column < words else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join(line(cells) for cells in (safe[0], rule, *safe[1:]))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"  # nan: "nan"
    if isinstance(value, Interval):
        return f"{value.low:.2f}–{value.high:.2f}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def report(model: str, tables: Sequence[str], notes: Sequence[str], results: Results[Any] | None = None) -> str:
    """Return Markdown: tables, and a list of notes with the model first and the facts of the encoding last."""
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
