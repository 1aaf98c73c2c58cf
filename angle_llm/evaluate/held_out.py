"""Held-out evaluation during training: read the tasks of `evaluation.tasks`, and compute the metrics of an encoder.

A held-out task is a file of scored pairs, of questions and answers, or of texts with a class (each compared with all
other texts of the file, so that no second file is encoded), a BEIR folder, or a task of MTEB.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain, product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from angle_llm.data.examples import open_examples
from angle_llm.data.formats import DataError, Example
from angle_llm.data.leakage import EvaluationSet, count_shared
from angle_llm.data.mixture import sets_of
from angle_llm.data.sources import MEMORY, MTEB, Source, evaluation_source, resolve_source
from angle_llm.evaluate.bootstrap import Difference, PairScores, mean_difference
from angle_llm.evaluate.bootstrap import compare as compare_pairs
from angle_llm.evaluate.encoding import Encode, Rows, encode_distinct, encode_functions, unique_names
from angle_llm.evaluate.mteb_tasks import evaluate_mteb, mteb_task
from angle_llm.evaluate.retrieval import evaluate_retrieval
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, read_answers, read_beir, read_classes
from angle_llm.evaluate.sts import evaluate_defined
from angle_llm.evaluate.sts_tasks import StsTask, read_pairs
from angle_llm.io import sha256_of
from angle_llm.model.unit_vectors import unit_rows
from angle_llm.prompts import InstructedText, instructed, split_instructions
from angle_llm.settings.parsing import SettingsError, need_library, settings_class, unknown_name
from angle_llm.settings.train import DataSource, EvaluationSettings, TrainSettings

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

EvaluationFunction = Callable[["SentenceEncoder"], "float | Mapping[str, float]"]
"""Function that measures an encoder: a number (higher is better), or numbers by name."""
MetricValues = dict[str, float]
Items = np.ndarray[Any, np.dtype[np.float64]]
"""Cosines of the pairs of a task, or the main metric × 100 of its queries."""
FUNCTION = "function:"
"""Prefix of the name of an evaluation function in `evaluation.tasks`."""
_UNIFORMITY_TEXTS = 2048
"""Maximum number of texts whose distances give the uniformity."""
_LOWER_IS_BETTER = ("alignment", "uniformity")
"""Metrics of scored pairs for which lower is better; they cannot select a model."""


@settings_class
class _TaskSource(DataSource):
    """Data source for a file in `evaluation.tasks`; its error messages name flags that start with `--evaluation.`."""

    FLAGS: ClassVar[str] = "--evaluation."


@dataclass(frozen=True)
class HeldOutTask:
    """A task that is evaluated during training: its name, its main metric, and the function that computes metrics."""

    name: str
    metric: str
    """Name of the main metric; unused for a function of a program."""
    measure: Callable[[SentenceEncoder, Encode, Encode | None], tuple[Mapping[str, float], Items | None]]
    """Function that returns the metrics by name, the main metric first, and the cosines of pairs or the main metric × 100
    of queries.

    It takes the encoder, the function that encodes queries (or all texts), and the function that encodes documents or
    None."""
    compare: Callable[[Items, Items], Difference] | None = None
    """Function that compares two encoders from the second result of `measure`; None for a task of MTEB."""
    keys: Callable[[], EvaluationSet] | None = None
    """Function that returns hashes of the texts of the task, to search for them in training data; None for a task of
    MTEB."""


@dataclass
class HeldOutEvaluation:
    """The tasks that are evaluated during a training run.

    Calling the object with an encoder returns all metrics by TASK/METRIC, and sets `items`. The first metric selects the
    best model.
    """

    tasks: Mapping[str, HeldOutTask]
    """Held-out tasks by their entry in the setting `evaluation.tasks`."""
    metric: str | None
    """TASK/METRIC that selects the best model; None: the first metric of the first task. It is the first metric in
    results."""
    micro_batch_tokens: int | None
    digest: str = ""
    """Hash of the files of the tasks."""
    items: Mapping[str, Items] = field(default_factory=dict)
    """Values of the pairs or queries in the last evaluation, by task, for `verdict`."""

    def __call__(self, encoder: SentenceEncoder) -> MetricValues:
        is_main = os.environ.get("RANK", "0") == "0"  # all processes evaluate; the main process shows progress
        encode, encode_document = encode_functions(encoder, self.micro_batch_tokens, show_progress=is_main)
        sides = cached(encode), None if encode_document is None else cached(encode_document)
        measured = {task.name: task.measure(encoder, *sides) for task in self.tasks.values()}
        self.items = {task: items for task, (_, items) in measured.items() if items is not None}
        metrics = {f"{task}/{name}": value for task, (values, _) in measured.items() for name, value in values.items()}
        selects = next(iter(metrics)) if self.metric is None else self.metric
        if selects not in metrics:
            raise SettingsError(f"--evaluation.metric: {unknown_name('metric', selects, metrics)}")
        return {selects: metrics[selects], **metrics}

    def check_metric(self, flag: str, metric: str | None) -> None:
        """Raise `SettingsError` if a metric, TASK/METRIC, has an unknown task, or lower is better; None is accepted."""
        names = [task.name for task in self.tasks.values()]
        if metric is not None and not metric.startswith(tuple(f"{name}/" for name in names)):
            raise SettingsError(f"{flag}: expected TASK/METRIC with a task of {', '.join(names)}, got {metric}.")
        of_pairs = [task.name for task in self.tasks.values() if task.metric == "spearman"]
        if metric in [f"{task}/{name}" for task, name in product(of_pairs, _LOWER_IS_BETTER)]:
            raise SettingsError(f"{flag} {metric}: lower is better. Choose a metric for which higher is better.")

    def verdict(self, saved: Mapping[str, Items], start: Mapping[str, Items]) -> str | None:
        """Return whether the saved encoder is better than before training, with the 95 % interval of the difference.

        The arguments are the `items` of both encoders. Tasks after the first are in the result, too: it shows whether they
        became worse. A task is left out if its interval is undefined, because there are few pairs, or if its file has
        changed. None: no task is left.
        """
        changes = []
        for task in self.tasks.values():
            if task.compare is None or task.name not in saved or task.name not in start:
                continue
            with suppress(ValueError):  # another number of pairs than in the file
                comparison = task.compare(saved[task.name], start[task.name])
                low, high = comparison.interval.low, comparison.interval.high
                if not np.isnan(low):
                    verdict = "better than" if low > 0 else "worse than" if high < 0 else "no clear difference from"
                    change = f"{comparison.difference:+.2f} ({low:+.2f} to {high:+.2f})"
                    changes.append(f"{verdict} before training: {task.name}/{task.metric} {change}")
        return "; ".join(changes) or None

    def overlap_with(self, data: Sequence[Example]) -> Iterator[str]:
        """Yield a warning for each held-out task whose texts occur in the training data.

        The documentation of `count_shared` gives the run time.
        """
        sets = {source: task.keys() for source, task in self.tasks.items() if task.keys is not None}
        for source, shared in zip(sets, count_shared(data, list(sets.values())), strict=True):
            if listed := ", ".join(f"{count:,} of its {total:,} {unit}" for unit, (count, total) in shared.items()):
                remedy = f"`angle-llm data check TRAINING_FILE --against {shlex.quote(source)} --fix FOLDER`"
                advice = "" if source.startswith(MEMORY) else f"; {remedy} removes rows with shared pairs only"
                yield (
                    f"warning: --evaluation.tasks {source}: the training data contain {listed}. Its scores can be too high. "
                    f"`angle-llm data split` makes parts that share no text{advice}."
                )

    def reversed_scores(self, settings: TrainSettings) -> Iterator[str]:
        """Yield a warning if a small score means similar in the training data only, so that the worst model is saved."""
        ranges = [dataset.score_range for dataset in sets_of(settings.data) if dataset.score_range is not None]
        reversed_ranges = [bounds for bounds in ranges if bounds[0] > bounds[1]]
        has_pairs = any(task.metric == "spearman" for task in self.tasks.values())
        if reversed_ranges and has_pairs and settings.evaluation.score_range is None:
            low, high = reversed_ranges[0]
            yield (
                f"warning: a small score means similar in the training data (score_range {low:g} {high:g}), and a large score "
                "in the held-out pairs. If it is the same scale, set --evaluation.score-range to the same numbers."
            )


def held_out_evaluation(
    settings: EvaluationSettings,
    micro_batch_tokens: int | None = None,
    in_memory: Mapping[str, Source | EvaluationFunction] = {},
    task_names: Mapping[str, str] = {},
) -> HeldOutEvaluation | None:
    """Read the held-out tasks of a training run, and return the object that evaluates an encoder; None without tasks.

    Every file is read once, and its rows stay in memory. Tasks with equal names get their folders as prefixes:
    stsb/test and sick/test. `micro_batch_tokens` is the maximum number of tokens in a micro-batch; None: the default of
    `SentenceEncoder.encode`. `in_memory` has the rows or the function of each task that a Python program passed, and
    `task_names` the names in results of some tasks, by their entry in `settings.tasks`.

    Raises:
        SettingsError: for a task that does not exist or is listed twice, or an unknown column.
        DataError: for a malformed file.
        MissingLibraryError: for a task of MTEB if mteb is not installed.
    """
    if not settings.tasks:
        return None
    functions = {text: task for text, task in in_memory.items() if not isinstance(task, Source)}
    source_of = {text: task for text, task in in_memory.items() if isinstance(task, Source)}
    source_of |= {text: Source(text.removeprefix(FUNCTION), "function", text=text) for text in functions}
    try:
        sources = [source_of.get(text) or evaluation_source(text) for text in settings.tasks]
    except DataError as error:
        raise SettingsError(f"--evaluation.tasks: {error}") from error
    files = [source for source in sources if source.kind in ("file", "starter", "rows")]

    # Settings that no file uses.
    columns = list(dict.fromkeys(column for source in files for column in source.columns))
    for name, column in settings.columns.items():
        if files and column not in columns:
            raise SettingsError(f"--evaluation.columns {name} {column}: {unknown_name('column', column, columns)}")
    if not files and (settings.columns or settings.format != "auto"):
        flag = "columns" if settings.columns else "format"
        raise SettingsError(f"--evaluation.{flag}: expected a file in --evaluation.tasks, got none.")
    formats = {_reading(source, settings)[1] for source in files}
    if settings.corpus is not None and not formats - {"scored_pair", "labelled_text"}:
        raise SettingsError(
            "--evaluation.corpus adds candidates to questions and answers: expected a file of questions and answers in "
            "--evaluation.tasks, got none. If a column was read as a score, set --evaluation.format positive_pair."
        )

    if settings.score_range is not None and "scored_pair" not in formats:
        raise SettingsError(
            "--evaluation.score-range: expected a file of scored pairs in --evaluation.tasks, got none."
        )

    tasks = [
        _function_task(source.name, functions[source.text])
        if source.text in functions
        else _read_task(source, settings, micro_batch_tokens)
        for source in sources
    ]
    names = [task_names.get(source.text, task.name) for source, task in zip(sources, tasks, strict=True)]
    names = unique_names(names, sources)
    named = {source.text: replace(task, name=name) for source, task, name in zip(sources, tasks, names, strict=True)}
    opened = [source for source in sources if source.path is not None]
    if settings.corpus is not None:
        opened.append(resolve_source(settings.corpus))
    hashes = [file["sha256"] for source in opened for file in source.fingerprint()]
    beside = [path for source in opened for file in source.files for path in file.beside if path.exists()]
    digest = sha256("".join([*hashes, *map(sha256_of, beside)]).encode()).hexdigest()[:16]
    evaluation = HeldOutEvaluation(named, settings.metric, micro_batch_tokens, digest)
    evaluation.check_metric("--evaluation.metric", settings.metric)
    return evaluation


def cached(encode: Encode) -> Encode:
    """Return a function like `encode` that caches embeddings by text.

    Held-out tasks can share texts: for example, two files of judgements for one BEIR corpus.
    """
    row_of: dict[InstructedText, Rows] = {}

    def encode_cached(texts: list[str], instruction: Sequence[str | None] = ()) -> Rows:
        keys = list(map(instructed, texts, instruction or [None] * len(texts)))
        if new := [key for key in dict.fromkeys(keys) if key not in row_of]:
            row_of.update(zip(new, encode_distinct(encode, new).rows(new), strict=True))
        return np.stack([row_of[key] for key in keys])

    return encode_cached


def _read_task(source: Source, settings: EvaluationSettings, micro_batch_tokens: int | None) -> HeldOutTask:
    """Read a held-out task. `micro_batch_tokens` is the maximum number of tokens in a micro-batch, for a task of MTEB."""
    if source.kind == "mteb":
        return _mteb_task(source.text.removeprefix(MTEB), micro_batch_tokens)
    if source.kind == "beir":
        return _retrieval_task(read_beir(source), judged=True)
    reading, format = _reading(source, settings)
    if format == "scored_pair":
        return _sts_task(read_pairs(source, reading.columns, settings.score_range))
    if format == "labelled_text":
        return _retrieval_task(read_classes(reading, source), judged=True)
    return _retrieval_task(read_answers(reading, settings.corpus, source=source), judged=False)


def _reading(source: Source, settings: EvaluationSettings) -> tuple[DataSource, str]:
    """Return the settings to read a file in `evaluation.tasks`, with those `evaluation.columns` that it has, and its format.

    Raises:
        SettingsError: for a file with NLI rows.
    """
    columns = {name: column for name, column in settings.columns.items() if column in source.columns}
    reading = _TaskSource(path=source.name, columns=columns, format=settings.format)
    format = open_examples(reading, source).format
    if format.startswith("nli"):
        raise SettingsError(
            f"--evaluation.tasks: {source.text} has NLI rows; expected scored pairs, or questions and answers."
        )
    return reading, format


def _function_task(name: str, function: EvaluationFunction) -> HeldOutTask:
    """Return the held-out task of a function; the metric of a function that returns a number is `score`."""

    def measure(encoder: SentenceEncoder, _: Encode, __: Encode | None) -> tuple[MetricValues, None]:
        value = function(encoder)
        values = value if isinstance(value, Mapping) else {"score": value}
        try:
            numbers = {metric: float(number) for metric, number in values.items()}
        except (TypeError, ValueError):
            numbers = {}
        if not numbers:
            raise TypeError(f"evaluation {name}: expected a number or a dictionary of numbers, got {value!r}")
        return numbers, None

    return HeldOutTask(name, "score", measure)


def _sts_task(task: StsTask) -> HeldOutTask:
    """Convert an STS task to a held-out task; its metrics are Spearman and Pearson correlation, alignment and uniformity."""

    def measure(_: SentenceEncoder, encode: Encode, encode_document: Encode | None) -> tuple[MetricValues, Items]:
        correlations = evaluate_defined(encode, encode_document, task)
        metrics = {"spearman": correlations.spearman, "pearson": correlations.pearson}
        return metrics | _geometry(encode, task, correlations.scores), correlations.scores.cosine

    def compare(ours: Items, theirs: Items) -> Difference:
        gold = np.array([pair.score for pair in task.pairs])
        scores = [{task.name: PairScores(cosines, gold)} for cosines in (ours, theirs)]
        return compare_pairs(*scores).tasks[task.name]

    def keys() -> EvaluationSet:
        pairs = [pair[:2] for pair in task.pairs]
        return EvaluationSet.of(task.name, pairs, chain.from_iterable(pairs))

    return HeldOutTask(task.name, "spearman", measure, compare, keys)


def _geometry(encode: Encode, task: StsTask, scores: PairScores) -> MetricValues:
    """Return alignment and uniformity of the embeddings of a task (Wang & Isola, arXiv 2005.10242).

    With embeddings of length 1, alignment is the mean squared distance of the pairs in the top fifth of the range of scores,
    and uniformity the logarithm of the mean of exp(-2 d²) over the distances d of different first sentences, at most
    `_UNIFORMITY_TEXTS`. Lower is better for both. They are not × 100.
    """
    firsts = dict.fromkeys(instructed(pair.sentence1, pair.instruction) for pair in task.pairs)
    texts_ND = unit_rows(encode_distinct(encode, list(firsts)[:_UNIFORMITY_TEXTS]).embeddings_ND)
    similar_P = scores.gold >= scores.gold.min() + 0.8 * np.ptp(scores.gold)
    cosines = (texts_ND @ texts_ND.T)[np.triu_indices(len(texts_ND), 1)]
    return {
        "alignment": float((2 - 2 * scores.cosine[similar_P]).mean()),
        "uniformity": float(np.log(np.exp(4 * cosines - 4).mean())) if len(cosines) else 0.0,  # d² = 2 - 2 cos
    }


def _retrieval_task(task: RetrievalTask, *, judged: bool) -> HeldOutTask:
    """Convert a retrieval task to a held-out task; `judged` is whether only its queries are searched in training data.

    The training queries of a BEIR folder may share its documents.
    """

    def measure(_: SentenceEncoder, encode: Encode, encode_document: Encode | None) -> tuple[MetricValues, Items]:
        result = evaluate_retrieval(encode, [task], encode_document=encode_document, resamples=0).tasks[task.name]
        main = next(iter(result.metrics.values()))
        return {name: metric.value for name, metric in result.metrics.items()}, np.array(main.values)

    def keys() -> EvaluationSet:
        (queries, _), (candidates, _) = map(split_instructions, (task.queries, task.candidates))
        asked = zip(queries, task.relevant, strict=True)
        pairs = [(query, candidates[candidate]) for query, relevant in asked for candidate in relevant]
        return EvaluationSet.of(task.name, pairs, () if judged else chain.from_iterable(pairs), queries)

    return HeldOutTask(task.name, "accuracy" if task.classes else "nDCG@10", measure, mean_difference, keys)


def _mteb_task(name: str, micro_batch_tokens: int | None) -> HeldOutTask:
    """Return a held-out task for a task of MTEB. Its metric is the mean main score over splits and subsets.

    `name` is MTEB's task name, and `micro_batch_tokens` the maximum number of tokens in a micro-batch.

    Raises:
        MissingLibraryError: if mteb is not installed.
        ValueError: for an unknown task.
    """
    need_library("mteb", f"evaluation.tasks {MTEB}{name}", "mteb")
    task: Any = mteb_task(name, "--evaluation.tasks")

    def measure(encoder: SentenceEncoder, *_: object) -> tuple[MetricValues, None]:
        from angle_llm.evaluate.mteb_encoder import MtebEncoder

        model = MtebEncoder(encoder, name="local/training", micro_batch_tokens=micro_batch_tokens)
        scores = [result["score"] for result in evaluate_mteb(model, [task])]
        return {"main_score": sum(scores) / len(scores)}, None

    return HeldOutTask(name, "main_score", measure)
