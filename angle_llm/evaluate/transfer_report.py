"""Transfer results for people (Markdown) and for programs (JSON), beside the published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from angle_llm.evaluate.tables import markdown_table, number, span
from angle_llm.evaluate.transfer import TransferResult, TransferResults
from angle_llm.evaluate.transfer_tasks import TRANSFER_TASKS
from angle_llm.io import plain


@dataclass(frozen=True)
class PublishedTransfer:
    """A model's accuracies × 100 by task name, and its average over all seven."""

    model: str
    accuracy: dict[str, float]
    average: float

    def average_over(self, tasks: Sequence[str]) -> float:
        """Mean over `tasks`; all seven: the average as published."""
        if set(tasks) == set(TRANSFER_TASKS):
            return self.average
        return sum(self.accuracy[task] for task in tasks) / len(tasks)


def _row(model: str, *accuracies: float, average: float) -> PublishedTransfer:
    return PublishedTransfer(model, dict(zip(TRANSFER_TASKS, accuracies, strict=True)), average)


PUBLISHED_TRANSFER = (
    _row("sup-SimCSE-RoBERTa-large, w/ MLM", 88.45, 92.53, 95.19, 90.58, 93.30, 93.80, 77.74, average=90.23),
    _row("sup-SimCSE-RoBERTa-base", 84.92, 92.00, 94.11, 89.82, 91.27, 88.80, 75.65, average=88.08),
    _row("SBERT-base", 83.64, 89.43, 94.39, 89.86, 88.96, 89.60, 76.00, average=87.41),
    _row("sup-SimCSE-BERT-base, w/ MLM", 82.68, 88.88, 94.52, 89.82, 88.41, 87.60, 76.12, average=86.86),
    _row("sup-SimCSE-BERT-base", 82.69, 89.25, 94.81, 89.59, 87.31, 88.40, 73.51, average=86.51),
    _row("unsup-SimCSE-BERT-base", 81.18, 86.46, 94.45, 88.88, 85.50, 89.80, 74.43, average=85.81),
    _row("InferSent-GloVe", 81.57, 86.54, 92.50, 90.38, 84.18, 88.20, 75.77, average=85.59),
    _row("Universal Sentence Encoder", 80.09, 85.19, 93.98, 86.70, 86.38, 93.20, 70.14, average=85.10),
)
"""From Gao et al. (2021), SimCSE (arXiv 2104.08821), table E.1, some taken there from Reimers & Gurevych (2019)."""


def transfer_report(results: TransferResults, model: str, remarks: Sequence[str] = ()) -> str:
    """The comparison table, the figures of every task, and notes on how to read them, `remarks` first."""
    notes = "\n".join(f"- {note}" for note in (*remarks, *_notes(results)))
    return "\n\n".join((_comparison(results, model), _details(results), notes)) + "\n"


def transfer_dict(
    results: TransferResults,
    model: str,
    *,
    settings: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything measured as plain JSON values; `settings` are those asked for, `encoder` what they came to be."""
    content = {
        "model": model,
        "metric": "accuracy × 100 of logistic regression on frozen vectors, SentEval's protocols",
        "average": {"tasks": list(results.averaged), "accuracy": results.average},
        "tasks": {name: asdict(task) for name, task in results.tasks.items()},
        "texts": results.texts,
        "dimensions": results.dimensions,
        "zero_vectors": results.zero_vectors,
        "encode_seconds": results.encode_seconds,
        "encoder": dict(encoder or {}),
        "settings": dict(settings or {}),
    }
    return {key: plain(value) for key, value in content.items()}


def _comparison(results: TransferResults, model: str) -> str:
    averaged = results.averaged
    header = ["model", *(task.label for task in results.tasks.values())]
    rows = [[f"**{model}**", *(number(task.accuracy) for task in results.tasks.values())]]
    if averaged:
        header.append("average")
        rows[0].append(number(results.average))
        for row in PUBLISHED_TRANSFER:
            figures = (row.accuracy.get(name) for name in results.tasks)
            rows.append([row.model, *map(number, figures), number(row.average_over(averaged))])
    return markdown_table(header, rows, words=1)


def _details(results: TransferResults) -> str:
    header = ["task", "train", "accuracy", "95 %", "F1", "dev", "majority", "tested", "repeated"]
    return markdown_table(header, [_detail(task) for task in results.tasks.values()], words=2)


def _detail(task: TransferResult) -> list[str]:
    rows = task.rows
    train = f"{rows['train']:,}" if "train" in rows else f"folds of {rows['all']:,}"
    return [
        task.label,
        train + (" (sample)" if task.sampled else ""),
        number(task.accuracy),
        span(task.interval.low, task.interval.high),
        number(task.f1),
        number(task.dev_accuracy),
        number(task.majority),
        f"{rows.get('test', rows.get('all', 0)):,}",
        f"{task.repeated:,}",
    ]


def _notes(results: TransferResults) -> list[str]:
    tasks = results.tasks.values()
    notes = [
        "Accuracy × 100 of logistic regression on frozen vectors, neither centred nor scaled; C by SentEval's search. `dev` "
        "is the best accuracy of the search, `majority` that of always saying the commonest class.",
        "95 %: Wilson's interval over the test examples; another draw of training examples is not in it.",
    ]
    if results.averaged:
        labels = ", ".join(results.tasks[name].label for name in results.averaged)
        notes.append(f"`average` is over {labels}, for this model and for the published rows alike.")
        notes.append(
            "Published rows: SimCSE (arXiv 2104.08821), table E.1; there a PyTorch layer trained by Adam classifies, here "
            "scikit-learn's logistic regression."
        )
    for task in tasks:
        used = sum(task.rows.values())
        if task.sampled:
            notes.append(f"{task.label}: a random sample of the training examples; not comparable with all of them.")
        if task.repeated:
            done = (
                f"{task.dropped:,} examples were left out for it" if task.dropped else "all were kept, as SentEval does"
            )
            notes.append(f"{task.label}: {task.repeated:,} test examples have the text of a training example; {done}.")
        if task.official is not None and not task.sampled and used + task.dropped != task.official:
            notes.append(f"{task.label}: {used + task.dropped:,} examples here, {task.official:,} in SentEval.")
        if task.unconverged:
            notes.append(f"{task.label}: {task.unconverged} of {task.fits} fits stopped before they converged.")
    if results.zero_vectors:
        notes.append(f"{results.zero_vectors} of {results.texts} texts have the zero vector.")
    fitting = sum(task.seconds for task in tasks)
    notes.append(
        f"{results.texts:,} distinct texts, {results.dimensions} dimensions, encoded in {results.encode_seconds:.1f} s; "
        f"classifiers in {fitting:.1f} s."
    )
    return notes
