"""Results of all evaluations: their type, Markdown tables, JSON content, and published scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from angle_llm.evaluate.bootstrap import Difference, Interval

_NAME_WIDTH = 26

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Result of an evaluation on one task. The class variable `metric` names the attribute with the main score × 100.

    `label` is the name of the task in reports, and `source` its file, folder or dataset.
    """

    metric: ClassVar[str]

    name: str
    label: str
    source: str

    @property
    def score(self) -> float:
        """Main score of the task, × 100: the value of the attribute that `metric` names."""
        return float(getattr(self, self.metric))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the task result as a dictionary, for the JSON file."""
        return asdict(self)


Result = TypeVar("Result", bound=TaskResult)


@dataclass(frozen=True)
class Results(Generic[Result]):
    """Results of an evaluation by task name, with the number of encoded texts and the encoding time.

    `published` names the tasks that published averages cover, in the order of published tables. `texts`, `dimensions`
    and `zero_vectors` are numbers: of distinct texts, of embedding dimensions, and of texts with a zero vector.
    """

    tasks: dict[str, Result]
    published: tuple[str, ...]
    texts: int
    dimensions: int
    zero_vectors: int
    encode_seconds: float
    average_interval: Interval | None = None
    """95 % interval of `average`; None if the evaluation computes no interval."""

    @property
    def averaged(self) -> tuple[str, ...]:
        """Names of the evaluated tasks that published averages cover; `average` is over these tasks."""
        return tuple(name for name in self.published if name in self.tasks)

    @property
    def average(self) -> float | None:
        """Mean main score over the tasks in `averaged`. None if `averaged` is empty, NaN if a score is NaN."""
        if not self.averaged:
            return None
        return sum(self.tasks[name].score for name in self.averaged) / len(self.averaged)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as a dictionary for the JSON file: average, tasks, number of texts, encoding time."""
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


def read_results(path: str, parse: Callable[[Any], Parsed]) -> Parsed:
    """Read the JSON results file given by `--against`, and return its content converted by `parse`.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the content is not JSON, or `parse` fails.
    """
    try:
        return parse(json.loads(Path(path).expanduser().read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--against: {path}: expected a file that this command wrote with --json ({type(error).__name__}: {error}). "
            "Evaluate that model again."
        ) from error


@dataclass(frozen=True)
class PublishedRow:
    """Published scores × 100 of a model by task, and their average.

    `scores` is empty if only the average is published.
    """

    model: str
    scores: Mapping[str, float]
    average: float

    def average_over(self, tasks: Sequence[str], all_tasks: Sequence[str]) -> float | None:
        """Return the mean published score over `tasks`, or None if a score is unknown.

        If `tasks` are all tasks of the published average (`all_tasks`), return the published average.
        """
        if set(tasks) == set(all_tasks):
            return self.average
        if not tasks or any(task not in self.scores for task in tasks):
            return None
        return sum(self.scores[task] for task in tasks) / len(tasks)


def published_table(results: Results[Any], model: str, published: Sequence[PublishedRow]) -> str:
    """Return a Markdown table with the main scores of the evaluated model (`model`) and published models.

    Averages are over the same tasks. Without an average, the table has no published models.
    """
    header = ["model", *(task.label for task in results.tasks.values())]
    ours: list[object] = [f"**{short_name(model)}**", *(task.score for task in results.tasks.values())]
    if results.average is None:
        return table(header, [ours], words=1)
    rows = [[*ours, results.average]]
    for row in published:
        average = row.average_over(results.averaged, results.published)
        if average is not None:
            rows.append([row.model, *map(row.scores.get, results.tasks), average])
    return table([*header, "average"], rows, words=1)


def short_name(model: str) -> str:
    """Return the last 26 characters of a model name, so that a table fits a terminal."""
    return model if len(model) <= _NAME_WIDTH else "…" + model[1 - _NAME_WIDTH :]


def difference_cells(compared: Difference) -> list[object]:
    """Return the table cells of a comparison: score of the second model, difference, 95 % interval, p-value.

    An undefined interval is a dash.
    """
    low, high, p = compared.interval.low, compared.interval.high, compared.p_value
    uncertainty = [None, None] if math.isnan(p) else [f"{low:+.2f} … {high:+.2f}", f"{p:.3g}"]
    return [compared.other, f"{compared.difference:+.2f}", *uncertainty]


def table(header: Sequence[str], rows: Sequence[Sequence[object]], words: int) -> str:
    """Return a Markdown table with padded columns: the first `words` columns left-aligned, all later ones right-aligned.

    Floats get two decimals, an interval is written as 78.10–79.90, and None as a dash.
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
    """Format a value as the text of a table cell: floats with two decimals, intervals as LOW–HIGH, None as a dash."""
    if isinstance(value, float):
        return f"{value:.2f}"  # NaN is written as "nan"
    if isinstance(value, Interval):
        return "–" if math.isnan(value.low) else f"{value.low:.2f}–{value.high:.2f}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def report(model: str, tables: Sequence[str], notes: Sequence[str], results: Results[Any] | None = None) -> str:
    """Return the Markdown report of an evaluation: the tables, then the notes as a list.

    The first note names the model. With `results`, the last notes describe the average and the encoding.
    """
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
