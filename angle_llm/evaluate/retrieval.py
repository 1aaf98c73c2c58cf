"""Retrieval: exact search by cosine similarity.

    distinct texts ──► encode ──► similarity of each query with every candidate ──► rank of each answer ──► metrics

`ranks` has the metrics, `retrieval_tasks` the tasks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import tyro

from angle_llm.data.row_settings import RowSettings
from angle_llm.evaluate.bootstrap import Interval, mean_interval
from angle_llm.evaluate.encoding import (
    RESAMPLES,
    ComparedSettings,
    Encode,
    EncodedTexts,
    OpenEncoder,
    Used,
    check_names,
    encode_sides,
    evaluated,
    finish,
)
from angle_llm.evaluate.ranks import answer_ranks, query_metrics
from angle_llm.evaluate.results import Results, TaskResult
from angle_llm.evaluate.retrieval_report import (
    METRIC,
    Compared,
    compare_figures,
    read_query_metrics,
    retrieval_report,
)
from angle_llm.evaluate.retrieval_tasks import (
    OwnDocument,
    RetrievalTask,
    read_answers,
    read_beir,
    read_flickr30k,
    read_groups,
    task_folder,
)
from angle_llm.evaluate.task_files import unique_names
from angle_llm.settings_io import SettingsError, settings_class


@settings_class
class RetrievalSettings(RowSettings, ComparedSettings):
    """Exact retrieval by cosine similarity: BEIR folders, questions with answers, groups of texts, Flickr30k captions.

    Intervals cover other queries, not another training seed. --against compares two models query by query. Truncation
    changes scores: compare models at the same --max-length.
    """

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")] = ()
    """BEIR folders with corpus.jsonl, queries.jsonl and qrels/test.tsv; FOLDER@NAME is another file, qrels/NAME.tsv."""

    own_document: OwnDocument = "auto"
    """Candidate with the id of the query, in BEIR folders, if it is not judged as an answer. skip: no candidate for this
    query. keep: a candidate. auto: skipped, unless ids are plain numbers and the two texts differ."""

    binary: bool = False
    """Any grade above 0 counts as 1 in nDCG of BEIR folders. By default grades are gains, as in trec_eval."""

    pairs: tuple[str, ...] = ()
    """Files of questions and their answers (positive_pair, or another --format): a question is searched among all
    answers of its file. Equal answers are one candidate."""

    corpus: Path | None = None
    """A text file or table with more candidates for --pairs."""

    groups: tuple[Path, ...] = ()
    """Files with a list of texts in each row: the first text is a query,
    the others its answers, among all texts of the file."""

    column: str | None = None
    """Column of the lists of --groups, or of the text of --corpus. None: captions, texts or set; text or sentence."""

    data_dir: Path | None = None
    """Folder with flickr30k/test_2016.jsonl.gz, to evaluate on it as in AnglE's paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {item.name: getattr(RowSettings(), item.name) for item in fields(RowSettings)} | {"corpus": None}
        for name, default in defaults.items():
            if not self.pairs and getattr(self, name) != default:
                raise SettingsError(f"--{name.replace('_', '-')} belongs to --pairs, which is not set.")

    def read_tasks(self) -> list[RetrievalTask]:
        """Return the tasks, equal names with their folders. Raises `ValueError` for none."""
        tasks = [read_beir(folder, own=self.own_document, binary=self.binary) for folder in self.folders]
        tasks += [read_answers(self.source_of(path), self.corpus, self.column) for path in self.pairs]
        tasks += [read_groups(path, self.column) for path in self.groups]
        tasks += [] if self.data_dir is None else [read_flickr30k(self.data_dir)]
        if not tasks:
            raise ValueError("no task: name a BEIR folder, or set --pairs, --groups, or --data-dir (Flickr30k).")
        folders = [task_folder(str(source)) for source in (*self.folders, *self.pairs, *self.groups)]
        folders += [] if self.data_dir is None else [self.data_dir]
        names = unique_names([task.name for task in tasks], folders)
        check_names(names)
        apart = zip(tasks, names, strict=True)
        return [task if name == task.name else replace(task, name=name, label=name) for task, name in apart]


@dataclass(frozen=True)
class Metric:
    """Mean over queries × 100, its bootstrap interval over queries (None without resamples), and the values × 100."""

    value: float
    interval: Interval | None
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RetrievalResult(TaskResult):
    """Metrics of a task by name, the main one first. `ranks` holds the ascending ranks of the answers of each query.

    `skipped` is the number of queries with a candidate that is skipped for them; `digest` is that of the task.
    """

    queries: int
    candidates: int
    answers: int
    skipped: int
    digest: str
    metrics: dict[str, Metric]
    query_ids: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    search_seconds: float


RetrievalResults: TypeAlias = Results[RetrievalResult]


def evaluate_retrieval(
    encode: Encode,
    tasks: Sequence[RetrievalTask],
    *,
    encode_document: Encode | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> RetrievalResults:
    """Search every query of every task among all its candidates.

    `encode` is called once with the distinct texts, and with `encode_document` for the queries only. Intervals are
    percentile bootstraps over queries; `resamples` 0: no intervals.

    Raises:
        ValueError: for no tasks, equal task names, or rows that are not finite.
    """
    check_names([task.name for task in tasks])
    queries = (text for task in tasks for text in task.queries)
    documents = (text for task in tasks for text in task.candidates)
    encoded = encode_sides(encode, encode_document, queries, documents)
    return Results({task.name: _evaluate(encoded, task, resamples, seed) for task in tasks}, (), **encoded.facts())


def _evaluate(encoded: EncodedTexts, task: RetrievalTask, resamples: int, seed: int) -> RetrievalResult:
    started = time.perf_counter()
    candidates_CD = encoded.rows(task.candidates, "document")
    ranks = answer_ranks(encoded.rows(task.queries), candidates_CD, task.relevant, task.itself)
    seconds = time.perf_counter() - started
    metrics = {}
    for name, shares in query_metrics(ranks, task.relevant, strict=task.strict).items():
        values = 100 * np.array(shares)
        interval = mean_interval(values, resamples=resamples, seed=seed, stream=task.name) if resamples else None
        metrics[name] = Metric(float(values.mean()), interval, tuple(values.tolist()))
    return RetrievalResult(
        name=task.name,
        label=task.label,
        source=task.source,
        queries=len(task.queries),
        candidates=len(task.candidates),
        answers=sum(map(len, task.relevant)),
        skipped=sum(place is not None for place in task.itself),
        digest=task.digest,
        metrics=metrics,
        query_ids=task.query_ids,
        ranks=tuple(tuple(rank_of.values()) for rank_of in ranks),
        search_seconds=seconds,
    )


def retrieval_main(settings: RetrievalSettings, open_encoder: OpenEncoder) -> RetrievalResults:
    """Read the tasks, open the encoder, evaluate, compare with `against`, print the report, write the JSON file.

    Data and outputs are checked before a model is opened. With `against`, one model is in memory at a time.
    """
    tasks = settings.read_tasks()
    other = settings.against
    compared = read_query_metrics(other) if other is not None and other.endswith(".json") else None

    def run(model: str, revision: str | None, resamples: int) -> tuple[RetrievalResults, Used]:
        def found(_: Any, encode: Encode, encode_document: Encode | None) -> RetrievalResults:
            resampling = {"resamples": resamples, "seed": settings.seed}
            return evaluate_retrieval(encode, tasks, encode_document=encode_document, **resampling)

        return evaluated(replace(settings, model=model, revision=revision), open_encoder, found)

    results, used = run(settings.model, settings.revision, settings.resamples)
    comparison = None
    if other is not None:
        if compared is None:
            theirs, other_used = run(other, None, resamples=0)
            compared = Compared.of(other, other_used, theirs)
        comparison = compare_figures(
            Compared.of(settings.model, used, results), compared, resamples=settings.resamples, seed=settings.seed
        )
    report = retrieval_report(results, settings.model, used, comparison)
    finish(settings, METRIC, report, results.to_dict() | {"comparison": comparison}, used)
    return results
