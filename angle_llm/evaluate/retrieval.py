"""From an `encode` callable to retrieval figures: exact search by cosine similarity, in blocks.

    distinct texts ──► encode ──► similarity of each query with every candidate ──► rank of each answer ──► figures

Everything follows from the **ranks of the answers**: the rank of an answer is 1, plus the candidates that are no answer
and at least as similar to the query, plus the answers that come before it. So nothing is sorted or kept but one block of
similarities, the search is exact however many candidates there are, and ties are pessimistic: a candidate that is no answer
wins every tie (similarities within 1e-9 are equal); among answers the earlier candidate comes first.

Figures of a query with R answers, the query itself never being a candidate:

* strict accuracy: 1 if its first R candidates are exactly its answers. With five captions an image this is AnglE's "strict
  accuracy" (arXiv 2309.12871): the top 5 of all captions, of which the query, being nearest to itself, is the first, are the
  five captions of the image. The paper does not spell out whether the query counts among its five;
* in top 5: 1 if the first five candidates hold all its answers: the other, laxer reading, for R = 4;
* recall at k: the share of its answers in the first k; MRR: 1 / the rank of its first answer;
* nDCG at 10: answers discounted by log2(rank + 1), gains as judged (trec_eval's, not 2^gain - 1), over the best there is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.encoding import Encode, EncodedTexts, encode_distinct
from angle_llm.evaluate.resampling import RESAMPLES, Interval, mean_interval
from angle_llm.evaluate.retrieval_tasks import RetrievalTask

RECALLS = (1, 5, 10, 100)
"""The k of recall at k."""

_TIE = 1e-9  # float64 products of float32 vectors differ by 1e-15 between shapes of a block
_SIMILARITIES = 2**22  # numbers in a block: 32 MiB, and as much again while they are compared
_QUERIES = 256


@dataclass(frozen=True)
class Figure:
    """A mean over the queries × 100 and its bootstrap interval over queries."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class RetrievalResult:
    """The figures of a task by name, in the order of a table. `ranks` holds the ranks of each query's answers, ascending."""

    name: str
    label: str
    source: str
    queries: int
    candidates: int
    answers: int
    figures: dict[str, Figure]
    ranks: tuple[tuple[int, ...], ...]
    search_seconds: float


@dataclass(frozen=True)
class RetrievalResults:
    """What `evaluate_retrieval` measured, by task name in the order asked."""

    tasks: dict[str, RetrievalResult]
    texts: int
    dimensions: int
    zero_vectors: int
    encode_seconds: float


def evaluate_retrieval(
    encode: Encode, tasks: Sequence[RetrievalTask], *, resamples: int = RESAMPLES, seed: int = 0
) -> RetrievalResults:
    """Every query of every task against all its candidates.

    `encode` is called exactly once, with the distinct texts of all tasks: queries and candidates are worded alike.
    Intervals are percentile bootstraps over `resamples` draws of queries.

    Raises `ValueError` when there is nothing to evaluate, two tasks share a name, or what `encode` returned is not one
    finite row per text.
    """
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) < len(names):
        raise ValueError(f"at least one task is needed, each with its own name; found {', '.join(names) or 'none'}.")
    encoded = encode_distinct(encode, (text for task in tasks for text in (*task.queries, *task.candidates)))
    return RetrievalResults(
        {task.name: _evaluate(encoded, task, resamples, seed) for task in tasks},
        texts=len(encoded.row_of),
        dimensions=encoded.dimensions,
        zero_vectors=encoded.zero_vectors,
        encode_seconds=encoded.seconds,
    )


def answer_ranks(
    queries_QD: NDArray[np.floating[Any]],
    candidates_CD: NDArray[np.floating[Any]],
    relevant: Sequence[Mapping[int, float]],
    itself: Sequence[int | None],
) -> list[dict[int, int]]:
    """For each query the rank, from 1, of each of its answers, by cosine similarity and in order of rank.

    A zero vector has similarity 0 with everything. Memory: one block of similarities beside unit copies of the vectors of
    `_QUERIES` queries and of a block of candidates.
    """
    found: list[dict[int, int]] = []
    for start in range(0, len(queries_QD), _QUERIES):
        block = slice(start, start + _QUERIES)
        found += _ranks_of_block(_unit(queries_QD[block]), candidates_CD, relevant[block], itself[block])
    return found


def _ranks_of_block(
    queries_QD: NDArray[np.float64],
    candidates_CD: NDArray[np.floating[Any]],
    relevant: Sequence[Mapping[int, float]],
    itself: Sequence[int | None],
) -> list[dict[int, int]]:
    """Two passes: the similarities of the answers, then how many other candidates reach them."""
    widest = max(map(len, relevant))
    answers_QR = np.zeros((len(relevant), widest), dtype=np.intp)
    is_answer_QR = np.zeros((len(relevant), widest), dtype=bool)
    for row, places in enumerate(relevant):
        answers_QR[row, : len(places)] = sorted(places)
        is_answer_QR[row, : len(places)] = True
    reached_QR = np.full((len(relevant), widest), np.inf)
    for row in range(len(relevant)):
        places = answers_QR[row][is_answer_QR[row]]
        reached_QR[row, : len(places)] = _unit(candidates_CD[places]) @ queries_QD[row]
    ahead_QR = np.zeros((len(relevant), widest), dtype=np.int64)
    step = max(1, _SIMILARITIES // len(queries_QD))
    for start in range(0, len(candidates_CD), step):
        similar_QC = queries_QD @ _unit(candidates_CD[start : start + step]).T
        width = similar_QC.shape[1]
        for row, own in enumerate(itself):
            skipped = answers_QR[row][is_answer_QR[row]] - start
            similar_QC[row, skipped[(skipped >= 0) & (skipped < width)]] = -np.inf
            if own is not None and 0 <= own - start < width:
                similar_QC[row, own - start] = -np.inf
        for answer in range(widest):
            ahead_QR[:, answer] += (similar_QC >= reached_QR[:, answer, None] - _TIE).sum(axis=1)
    ranks = []
    for row in range(len(relevant)):
        count = int(is_answer_QR[row].sum())
        order = np.argsort(-np.round(reached_QR[row, :count] / _TIE), kind="stable")
        ranks.append(
            {int(answers_QR[row, answer]): place + 1 + int(ahead_QR[row, answer]) for place, answer in enumerate(order)}
        )
    return ranks


def query_figures(
    ranks: Sequence[Mapping[int, int]], relevant: Sequence[Mapping[int, float]]
) -> dict[str, list[float]]:
    """The figures of each query in [0, 1], by name; their means are a task's."""
    figures: dict[str, list[float]] = {"strict": [], "in top 5": []}
    figures |= {f"R@{k}": [] for k in RECALLS} | {"MRR": [], "nDCG@10": []}
    for rank_of, grades in zip(ranks, relevant, strict=True):
        places = np.array(list(rank_of.values()))
        figures["strict"].append(float(places.max() == len(places)))
        figures["in top 5"].append(float(places.max() <= 5))
        for k in RECALLS:
            figures[f"R@{k}"].append(float((places <= k).mean()))
        figures["MRR"].append(float(1 / places.min()))
        best = dict(enumerate(sorted(grades.values(), reverse=True), start=1))
        gained = {rank: grades[answer] for answer, rank in rank_of.items()}
        figures["nDCG@10"].append(_discounted(gained) / _discounted(best))
    return figures


def _evaluate(encoded: EncodedTexts, task: RetrievalTask, resamples: int, seed: int) -> RetrievalResult:
    started = time.perf_counter()
    ranks = answer_ranks(encoded.rows(task.queries), encoded.rows(task.candidates), task.relevant, task.itself)
    seconds = time.perf_counter() - started
    return RetrievalResult(
        name=task.name,
        label=task.label,
        source=task.source,
        queries=len(task.queries),
        candidates=len(task.candidates),
        answers=sum(map(len, task.relevant)),
        figures={
            name: _figure(values, resamples, seed, task.name)
            for name, values in query_figures(ranks, task.relevant).items()
        },
        ranks=tuple(tuple(rank_of.values()) for rank_of in ranks),
        search_seconds=seconds,
    )


def _figure(values: list[float], resamples: int, seed: int, stream: str) -> Figure:
    interval = mean_interval(values, resamples=resamples, seed=seed, stream=stream)
    return Figure(100 * float(np.mean(values)), Interval(100 * interval.low, 100 * interval.high))


def _discounted(gains: Mapping[int, float]) -> float:
    return float(sum(gain / np.log2(rank + 1) for rank, gain in gains.items() if rank <= 10))


def _unit(rows_CD: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    rows = rows_CD.astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit
