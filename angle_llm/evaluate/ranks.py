"""Exact ranks of the answers of queries by cosine similarity, in blocks, and the metrics that follow from them.

The rank of an answer is 1, plus the candidates that are not answers and at least as similar to the query, plus the
answers before it. So only one block of similarities is kept, the search is exact for any number of candidates, and ties
are pessimistic: of equal similarities (within 1e-9), candidates that are not answers rank first. Among answers, the
earlier candidate ranks first.

Metrics of a query with R answers (without ties equal to those of trec_eval):

* nDCG@10: grades as gains (not 2^grade - 1), discounted by log2(rank + 1), over the best possible;
* R@k: share of its answers in the first k; MRR: 1 / rank of its first answer, MRR@10: 0 if that rank is above 10;
* MAP@100: mean over its answers of the precision at their rank, 0 for ranks above 100.

Only for groups of texts:

* strict: 1 if the first R candidates are exactly its answers. With five captions per image this is AnglE's "strict
  accuracy" (arXiv 2309.12871): the top 5 of all captions, the query included, are the captions of the image. The paper
  does not state whether the query counts among the five;
* in top 5: 1 if the first five candidates contain all answers: the other reading, for R = 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from angle_llm.evaluate.encoding import Rows
from angle_llm.vectors import unit_rows

RECALLS = (1, 5, 10, 100)
"""The k of recall at k."""

_TIE = 1e-9  # float64 products of float32 vectors differ by 1e-15 between shapes of a block
_SIMILARITIES = 2**22  # numbers in a block of similarities, and in its candidates: 32 MiB
_QUERIES = 256


def answer_ranks(
    queries_QD: Rows, candidates_CD: Rows, relevant: Sequence[Mapping[int, float]], itself: Sequence[int | None]
) -> list[dict[int, int]]:
    """Return for each query, answer → rank (from 1) by cosine similarity, in order of rank.
    A zero vector has similarity 0.

    Two passes: the similarities of the answers, then the number of other candidates that reach them.
    """
    answers = [np.array(sorted(places), dtype=np.intp) for places in relevant]
    skipped = [places if own is None else np.append(places, own) for places, own in zip(answers, itself, strict=True)]
    step = max(1, _SIMILARITIES // max(queries_QD.shape[1], min(_QUERIES, len(queries_QD)), 1))
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
    ranks: Sequence[Mapping[int, int]], relevant: Sequence[Mapping[int, float]], *, strict: bool = False
) -> dict[str, list[float]]:
    """Return the metrics of each query in [0, 1] by name; with `strict` also those for groups of texts, first."""
    names = ("nDCG@10", *(f"R@{k}" for k in RECALLS), "MRR", "MRR@10", "MAP@100")
    metrics: dict[str, list[float]] = {name: [] for name in (*(("strict", "in top 5") if strict else ()), *names)}
    for rank_of, grades in zip(ranks, relevant, strict=True):
        places = np.array(list(rank_of.values()))  # ascending
        first = 1 / float(places[0])
        best = dict(enumerate(sorted(grades.values(), reverse=True), start=1))
        gained = {rank: grades[answer] for answer, rank in rank_of.items()}
        precision = np.arange(1, len(places) + 1) / places
        values = {f"R@{k}": (places <= k).mean() for k in RECALLS} | {
            "nDCG@10": _discounted(gained) / _discounted(best),
            "MRR": first,
            "MRR@10": first if places[0] <= 10 else 0.0,
            "MAP@100": np.where(places <= 100, precision, 0.0).mean(),
            "strict": places[-1] == len(places),
            "in top 5": places[-1] <= 5,
        }
        for name, found in metrics.items():
            found.append(float(values[name]))
    return metrics


def _discounted(gains: Mapping[int, float]) -> float:
    return float(sum(gain / np.log2(rank + 1) for rank, gain in gains.items() if rank <= 10))
