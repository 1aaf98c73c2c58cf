"""Retrieval: exact search by cosine similarity, in blocks.

    distinct texts ──► encode ──► similarity of each query with every candidate ──► rank of each answer ──► metrics

All metrics follow from the **ranks of the answers**: the rank of an answer is 1, plus the candidates that are not
answers and at least as similar to the query, plus the answers before it. So only one block of similarities is kept, the
search is exact for any number of candidates, and ties are pessimistic: of equal similarities (within 1e-9), candidates
that are not answers rank first. Among answers, the earlier candidate ranks first.

Metrics of a query with R answers (the query itself is never a candidate):

* strict: 1 if the first R candidates are exactly its answers. With five captions per image this is AnglE's "strict
  accuracy" (arXiv 2309.12871): the top 5 of all captions, the query included, are the captions of the image. The paper
  does not state whether the query counts among the five;
* in top 5: 1 if the first five candidates contain all answers: the other reading, for R = 4;
* recall at k: share of its answers in the first k; MRR: 1 / rank of its first answer;
* nDCG at 10: gains as judged (as in trec_eval, not 2^gain - 1), discounted by log2(rank + 1), over the best possible.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from angle_llm.evaluate.bootstrap import RESAMPLES, Interval, mean_interval
from angle_llm.evaluate.encoding import (
    Encode,
    EncodedTexts,
    EncoderSettings,
    OpenEncoder,
    Rows,
    check_names,
    encode_distinct,
    evaluated,
    finish,
)
from angle_llm.evaluate.results import Results, TaskResult, report, table
from angle_llm.evaluate.retrieval_tasks import FLICKR30K, RetrievalTask, read_flickr30k, read_groups, read_judged
from angle_llm.vectors import unit_rows

METRIC = "exact retrieval by cosine similarity, × 100; ties go to the candidate that is not an answer"
PUBLISHED_STRICT = {"AnglE": 12.9, "SimCSE": 10.4, "SBERT": 5.2}
"""Strict accuracy × 100 on Flickr30k's test captions, from AnglE's paper (arXiv 2309.12871)."""

RECALLS = (1, 5, 10, 100)
"""The k of recall at k."""

_TIE = 1e-9  # float64 products of float32 vectors differ by 1e-15 between shapes of a block
_SIMILARITIES = 2**22  # numbers in a block: 32 MiB
_QUERIES = 256


@dataclass(frozen=True, kw_only=True)
class RetrievalSettings(EncoderSettings):
    """Exact retrieval by cosine similarity: Flickr30k captions as in AnglE's paper, groups of texts, BEIR folders."""

    data_dir: Path | None = None
    """Folder with flickr30k/test_2016.jsonl.gz, to evaluate on it."""

    groups: tuple[Path, ...] = ()
    """Files with a list of texts in each row: the first text is a query,
    the others its answers, among all texts of the file."""

    column: str | None = None
    """Column of the lists. None: captions, texts or set."""

    judged: tuple[Path, ...] = ()
    """BEIR folders: queries.jsonl, corpus.jsonl, qrels/test.tsv."""

    resamples: int = RESAMPLES
    """Bootstrap resamples of the queries for each interval."""

    seed: int = 0
    """Seed of the resamples."""


@dataclass(frozen=True)
class Metric:
    """Mean over queries × 100 and its bootstrap interval over queries."""

    value: float
    interval: Interval


@dataclass(frozen=True, kw_only=True)
class RetrievalResult(TaskResult):
    """Metrics of a task by name. `ranks` holds the ascending ranks of the answers of each query."""

    queries: int
    candidates: int
    answers: int
    figures: dict[str, Metric]
    ranks: tuple[tuple[int, ...], ...]
    search_seconds: float


RetrievalResults: TypeAlias = Results[RetrievalResult]


def evaluate_retrieval(
    encode: Encode, tasks: Sequence[RetrievalTask], *, resamples: int = RESAMPLES, seed: int = 0
) -> RetrievalResults:
    """Search every query of every task among all its candidates.

    `encode` is called once with the distinct texts; queries and candidates have the same prompt. Intervals are
    percentile bootstraps over queries.

    Raises:
        ValueError: for no tasks, equal task names, or rows that are not finite.
    """
    check_names([task.name for task in tasks])
    encoded = encode_distinct(encode, (text for task in tasks for text in (*task.queries, *task.candidates)))
    return Results({task.name: _evaluate(encoded, task, resamples, seed) for task in tasks}, (), **encoded.facts())


def answer_ranks(
    queries_QD: Rows, candidates_CD: Rows, relevant: Sequence[Mapping[int, float]], itself: Sequence[int | None]
) -> list[dict[int, int]]:
    """Return for each query, answer → rank (from 1) by cosine similarity, in order of rank.
    A zero vector has similarity 0.

    Two passes: the similarities of the answers, then the number of other candidates that reach them.
    """
    answers = [np.array(sorted(places), dtype=np.intp) for places in relevant]
    skipped = [places if own is None else np.append(places, own) for places, own in zip(answers, itself, strict=True)]
    step = max(1, _SIMILARITIES // min(_QUERIES, max(1, len(queries_QD))))
    found = []
    for first in range(0, len(queries_QD), _QUERIES):
        block_QD = unit_rows(queries_QD[first : first + _QUERIES])
        mine = range(first, first + len(block_QD))
        reached = [unit_rows(candidates_CD[answers[query]]) @ row for query, row in zip(mine, block_QD, strict=True)]
        ahead = [np.zeros(len(similar_R), dtype=np.int64) for similar_R in reached]
        for start in range(0, len(candidates_CD), step):
            similar_QC = block_QD @ unit_rows(candidates_CD[start : start + step]).T
            for query, similar_C, similar_R, ahead_R in zip(mine, similar_QC, reached, ahead, strict=True):
                inside = skipped[query] - start
                similar_C[inside[(inside >= 0) & (inside < len(similar_C))]] = -np.inf
                ahead_R += (similar_C >= similar_R[:, None] - _TIE).sum(axis=1)
        for query, similar_R, ahead_R in zip(mine, reached, ahead, strict=True):
            order = np.argsort(-np.round(similar_R / _TIE), kind="stable")
            ranks = ahead_R[order] + np.arange(1, len(order) + 1)
            found.append(dict(zip(answers[query][order].tolist(), ranks.tolist(), strict=True)))
    return found


def query_metrics(
    ranks: Sequence[Mapping[int, int]], relevant: Sequence[Mapping[int, float]]
) -> dict[str, list[float]]:
    """Return the metrics of each query in [0, 1] by name."""
    metrics: dict[str, list[float]] = {"strict": [], "in top 5": []}
    metrics |= {f"R@{k}": [] for k in RECALLS} | {"MRR": [], "nDCG@10": []}
    for rank_of, grades in zip(ranks, relevant, strict=True):
        places = np.array(list(rank_of.values()))
        metrics["strict"].append(float(places.max() == len(places)))
        metrics["in top 5"].append(float(places.max() <= 5))
        for k in RECALLS:
            metrics[f"R@{k}"].append(float((places <= k).mean()))
        metrics["MRR"].append(float(1 / places.min()))
        best = dict(enumerate(sorted(grades.values(), reverse=True), start=1))
        gained = {rank: grades[answer] for answer, rank in rank_of.items()}
        metrics["nDCG@10"].append(_discounted(gained) / _discounted(best))
    return metrics


def _discounted(gains: Mapping[int, float]) -> float:
    return float(sum(gain / np.log2(rank + 1) for rank, gain in gains.items() if rank <= 10))


def _evaluate(encoded: EncodedTexts, task: RetrievalTask, resamples: int, seed: int) -> RetrievalResult:
    started = time.perf_counter()
    ranks = answer_ranks(encoded.rows(task.queries), encoded.rows(task.candidates), task.relevant, task.itself)
    seconds = time.perf_counter() - started
    figures = {}
    for name, values in query_metrics(ranks, task.relevant).items():
        ends = mean_interval(values, resamples=resamples, seed=seed, stream=task.name)
        figures[name] = Metric(100 * float(np.mean(values)), Interval(100 * ends.low, 100 * ends.high))
    return RetrievalResult(
        name=task.name,
        label=task.label,
        source=task.source,
        queries=len(task.queries),
        candidates=len(task.candidates),
        answers=sum(map(len, task.relevant)),
        figures=figures,
        ranks=tuple(tuple(rank_of.values()) for rank_of in ranks),
        search_seconds=seconds,
    )


def retrieval_report(results: RetrievalResults, model: str, remarks: Sequence[str] = ()) -> str:
    """Return Markdown: a table for each task, and notes, `remarks` first."""
    tables = []
    notes = [
        *remarks,
        "Exact search by cosine similarity, × 100; ties go to the candidate that is not an answer. strict: the first R "
        "candidates are exactly the R answers; in top 5: all answers are among the first five.",
        "95 %: bootstrap over the queries.",
    ]
    for task in results.tasks.values():
        rows: list[list[object]] = [
            [f"**{model}**", *(figure.value for figure in task.figures.values())],
            ["95 %", *(figure.interval for figure in task.figures.values())],
        ]
        notes.append(
            f"{task.label}: {task.queries:,} queries, {task.candidates:,} candidates (without the query itself), "
            f"{task.answers:,} answers; searched in {task.search_seconds:.1f} s."
        )
        if task.name == FLICKR30K:
            rest = [None] * (len(task.figures) - 1)
            rows += [[name, strict, *rest] for name, strict in PUBLISHED_STRICT.items()]
            notes.append(
                "Published: strict accuracy of AnglE's paper (arXiv 2309.12871): the first caption of an image is the query, "
                "and the top 5 must be exactly its captions."
            )
        tables.append(table([task.label, *task.figures], rows, words=1))
    return report(model, tables, notes, results)


def retrieval_main(settings: RetrievalSettings, open_encoder: OpenEncoder) -> RetrievalResults:
    """Read the tasks, open the encoder, evaluate, print the report, write the JSON file."""
    tasks = [] if settings.data_dir is None else [read_flickr30k(settings.data_dir)]
    tasks += [read_groups(path, settings.column) for path in settings.groups]
    tasks += [read_judged(folder) for folder in settings.judged]
    if not tasks:
        raise ValueError("no task: set --data-dir (Flickr30k), --groups FILE, or --judged FOLDER.")
    results, used = evaluated(
        settings,
        open_encoder,
        lambda _, encode: evaluate_retrieval(encode, tasks, resamples=settings.resamples, seed=settings.seed),
    )
    finish(settings, METRIC, retrieval_report(results, settings.model, [str(used)]), results.to_dict(), used)
    return results
