"""Held-out tasks of a training run: from settings to a function that returns the metrics of an encoder by name."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from angle_llm.config import DataSource, EvaluationSettings
from angle_llm.data.examples import open_examples
from angle_llm.data.formats import Example
from angle_llm.data.leakage import EvaluationSet, count_shared
from angle_llm.data.readers import STARTER, find_path, open_rows
from angle_llm.evaluate.correlation import UndefinedCorrelationError
from angle_llm.evaluate.encoding import Encode, Rows, encode_with
from angle_llm.evaluate.mteb_tasks import evaluate_mteb, mteb_task
from angle_llm.evaluate.ranks import query_metrics
from angle_llm.evaluate.retrieval import evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, is_beir, read_answers, read_beir, task_folder
from angle_llm.evaluate.sts import evaluate
from angle_llm.evaluate.sts_tasks import StsTask, read_pairs
from angle_llm.evaluate.task_files import unique_names
from angle_llm.settings_io import SettingsError, need_library, settings_class, unknown_name

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

MTEB = "mteb:"
MetricValues = dict[str, float]


@settings_class
class _TaskSource(DataSource):
    """A file of evaluation.tasks."""

    FLAGS: ClassVar[str] = "--evaluation."


@dataclass(frozen=True)
class HeldOutTask:
    """A task with the names of its metrics, the main one first, and the function that computes them."""

    name: str
    metrics: tuple[str, ...]
    measure: Callable[[SentenceEncoder, Encode, Encode | None], Mapping[str, float]]
    """From an encoder, its `encode`, and with two prompts that of documents."""
    keys: Callable[[], EvaluationSet] | None = None
    """Makes the keys of the texts, to compare them with training data; None for a task of MTEB."""


@dataclass(frozen=True)
class HeldOutEvaluation:
    """Tasks; a function from an encoder to the metrics of all of them, × 100, as TASK/METRIC."""

    tasks: Mapping[str, HeldOutTask]
    """By the source that names them."""
    first: str
    """The metric that `best_by` selects, first in the result."""
    micro_batch_tokens: int | None

    def __call__(self, encoder: SentenceEncoder) -> MetricValues:
        encode, encode_document = encode_with(encoder, self.micro_batch_tokens, show_progress=_is_main())
        sides = remembered(encode), None if encode_document is None else remembered(encode_document)
        found = {
            f"{task.name}/{name}": value
            for task in self.tasks.values()
            for name, value in task.measure(encoder, *sides).items()
        }
        return {self.first: found[self.first], **found}

    def overlap_with(self, data: Sequence[Example]) -> Iterator[str]:
        """Yield a warning for each task with texts that are in the training data; see `count_shared` for the time."""
        sets = {source: task.keys() for source, task in self.tasks.items() if task.keys is not None}
        for source, shared in zip(sets, count_shared(data, list(sets.values())), strict=True):
            if listed := ", ".join(f"{count:,} of its {total:,} {kind}" for kind, (count, total) in shared.items()):
                yield (
                    f"warning: --evaluation.tasks {source}: the training data contain {listed}. Its scores can be too high. "
                    "`angle-llm data split` makes parts that share no text; `angle-llm data check TRAINING_FILE --against "
                    f"{shlex.quote(source)} --fix FOLDER` removes rows with shared pairs only."
                )


def held_out_evaluation(
    settings: EvaluationSettings, micro_batch_tokens: int | None = None
) -> HeldOutEvaluation | None:
    """Return the tasks of a run; None without tasks. Files are read at once.

    Equal names get the folders of the tasks as prefixes: stsb/test and sick/test.

    Raises:
        SettingsError: for a task that does not exist or occurs twice, or an unknown metric or column.
        DataError: for a malformed file.
        MissingLibraryError: for a task of MTEB without mteb.
    """
    if not settings.tasks:
        return None
    settings = replace(settings, tasks=[_file_of(source) for source in settings.tasks])
    _check_columns(settings)
    tasks = _with_unique_names(
        settings.tasks, [_task(source, settings, micro_batch_tokens) for source in settings.tasks]
    )
    if settings.corpus is not None and not any(
        _is_answers(source, settings) for source in settings.tasks if _is_file(source)
    ):
        raise SettingsError(
            "evaluation.corpus adds candidates to a file of questions and answers, which evaluation.tasks does not contain."
        )
    named = dict(zip(settings.tasks, tasks, strict=True))
    return HeldOutEvaluation(named, _selected(settings.best_by, tasks), micro_batch_tokens)


def remembered(encode: Encode) -> Encode:
    """Return `encode` that caches embeddings by text: tasks can share texts, such as two BEIR folders with one corpus."""
    row_of: dict[str, Rows] = {}

    def known(texts: list[str]) -> Rows:
        if new := [text for text in dict.fromkeys(texts) if text not in row_of]:
            row_of.update(zip(new, encode(new), strict=True))
        return np.stack([row_of[text] for text in texts])

    return known


def eval_command(settings: EvaluationSettings, model: Path) -> str:
    """Return the command that evaluates a model on held-out data like the first task, which selected the model."""
    source = settings.tasks[0] if settings.tasks else "pairs.tsv"
    held_out = "HELD_OUT" + "".join(Path(source).suffixes)
    if source.startswith(MTEB):
        kind, flags = "mteb", ["--tasks", "TASK"]
    elif is_beir(source):
        kind, flags = "retrieval", ["FOLDER"]
    elif settings.tasks and _is_answers(source, settings):
        columns = [word for pair in _source(source, settings).columns.items() for word in pair]
        more = [] if settings.corpus is None else ["--corpus", settings.corpus]
        more += [] if settings.corpus_column is None else ["--column", settings.corpus_column]
        kind, flags = "retrieval", ["--pairs", held_out, *(["--columns", *columns] if columns else []), *more]
    else:
        kind, flags = "sts", ["--tasks", held_out]
    return shlex.join(["angle-llm", "eval", kind, "--model", str(model), *flags])


def _with_unique_names(sources: Sequence[str], tasks: Sequence[HeldOutTask]) -> list[HeldOutTask]:
    names = unique_names([task.name for task in tasks], [_folder(source) for source in sources])
    for name in names:
        if len(equal := [source for source, other in zip(sources, names, strict=True) if other == name]) > 1:
            raise SettingsError(
                f"evaluation.tasks: expected tasks with unique names, got {name} for {' and '.join(equal)}. Rename a file or "
                "folder."
            )
    return [replace(task, name=name) for task, name in zip(tasks, names, strict=True)]


def _folder(source: str) -> Path:
    return Path(MTEB.removesuffix(":")) if source.startswith(MTEB) else task_folder(source)


def _selected(best_by: str | None, tasks: list[HeldOutTask]) -> str:
    """Return the metric that selects the best model, as TASK/METRIC."""
    known = [f"{task.name}/{name}" for task in tasks for name in task.metrics]
    wanted = tasks[0].metrics[0] if best_by is None else best_by
    found = next((name for name in (wanted, f"{tasks[0].name}/{wanted}") if name in known), None)
    if found is None:
        raise SettingsError(f"evaluation.best_by: {unknown_name('metric', wanted, known)}")
    return found


def _task(source: str, settings: EvaluationSettings, micro_batch_tokens: int | None) -> HeldOutTask:
    if source.startswith(MTEB):
        return _mteb_task(source.removeprefix(MTEB), micro_batch_tokens)
    if is_beir(source):
        return _retrieval_task(read_beir(source), judged=True)
    if not _is_file(source):
        missing = "does not exist" if not find_path(source).exists() else "is none of them"
        raise SettingsError(
            f"evaluation.tasks: expected a file of pairs, a BEIR folder (with corpus.jsonl, queries.jsonl, qrels/) or "
            f"mteb:NAME, got {source}, which {missing}."
        )
    if _is_answers(source, settings):
        task = read_answers(_source(source, settings), settings.corpus, settings.corpus_column)
        return _retrieval_task(task, judged=False)
    return _sts_task(read_pairs(source, _source(source, settings).columns))


def _file_of(source: str) -> str:
    """Return the path of the data file that FOLDER@NAME names, or another source unchanged."""
    folder, at, _ = source.rpartition("@")
    if not at or find_path(source).exists() or not find_path(folder).is_dir() or is_beir(source):
        return source
    return str(open_rows(source, tables=True).path)


def _source(path: str, settings: EvaluationSettings) -> DataSource:
    """Return a file with those of the columns that it has."""
    found = open_rows(path, tables=True).columns
    return _TaskSource(
        path=path, columns={name: column for name, column in settings.columns.items() if column in found}
    )


def _is_file(source: str) -> bool:
    return source.startswith(STARTER) or (find_path(source).is_file() and not is_beir(source))


def _check_columns(settings: EvaluationSettings) -> None:
    """Refuse a column that no file has."""
    files = [source for source in settings.tasks if _is_file(source)]
    found = list(dict.fromkeys(column for path in files for column in open_rows(path, tables=True).columns))
    for name, column in settings.columns.items() if files else ():
        if column not in found:
            raise SettingsError(f"--evaluation.columns {name} {column}: {unknown_name('column', column, found)}")


def _is_answers(source: str, settings: EvaluationSettings) -> bool:
    """Return whether the rows of a file are questions and answers, not scored pairs."""
    found = open_examples(_source(source, settings)).format
    if found.startswith("nli"):
        raise SettingsError(
            f"evaluation.tasks: {source} has NLI rows; expected scored pairs, or questions and answers."
        )
    return found != "scored_pair"


def _sts_task(task: StsTask) -> HeldOutTask:
    def measure(_: SentenceEncoder, encode: Encode, encode_document: Encode | None) -> MetricValues:
        found = evaluate(encode, [task], encode_document=encode_document).tasks[task.name]
        if found.undefined:
            raise UndefinedCorrelationError(f"{task.source}: undefined Spearman correlation: {found.undefined}.")
        return {"spearman": found.spearman, "pearson": found.pearson}

    def keys() -> EvaluationSet:
        pairs = [pair[:2] for pair in task.pairs]
        return EvaluationSet.of(task.name, pairs, chain.from_iterable(pairs))

    return HeldOutTask(task.name, ("spearman", "pearson"), measure, keys)


def _retrieval_task(task: RetrievalTask, *, judged: bool) -> HeldOutTask:
    """`judged`: the task is a BEIR folder, in which training queries may have the same documents."""

    def measure(_: SentenceEncoder, encode: Encode, encode_document: Encode | None) -> MetricValues:
        found = evaluate_retrieval(encode, [task], encode_document=encode_document, resamples=0).tasks[task.name]
        return {name: metric.value for name, metric in found.metrics.items()}

    def keys() -> EvaluationSet:
        asked = zip(task.queries, task.relevant, strict=True)
        pairs = [(query, task.candidates[place]) for query, relevant in asked for place in relevant]
        return EvaluationSet.of(task.name, pairs, () if judged else chain.from_iterable(pairs), task.queries)

    return HeldOutTask(task.name, tuple(query_metrics([], [])), measure, keys)


def _mteb_task(name: str, micro_batch_tokens: int | None) -> HeldOutTask:
    need_library("mteb", f"evaluation.tasks {MTEB}{name}", "mteb")
    task: Any = mteb_task(name, "--evaluation.tasks")

    def measure(encoder: SentenceEncoder, *_: object) -> MetricValues:
        from angle_llm.evaluate.mteb_encoder import MtebEncoder

        model = MtebEncoder(encoder, name="local/training", micro_batch_tokens=micro_batch_tokens)
        scores = [each.score for each in evaluate_mteb(model, [task])]
        return {"main_score": sum(scores) / len(scores)}

    return HeldOutTask(name, ("main_score",), measure)


def _is_main() -> bool:
    """Return whether this process shows progress; all processes evaluate."""
    return os.environ.get("RANK", "0") == "0"
