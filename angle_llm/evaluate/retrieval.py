"""Retrieval evaluation: exact search by cosine similarity, metrics per query, comparison with other models.

    distinct texts ──► encode ──► similarity of each query with every candidate ──► rank of each answer ──► metrics

Contents, in order: result types, ranks and metrics, `evaluate_retrieval`, the command, comparison, report.
`retrieval_tasks` reads the tasks.

Rank of an answer = 1 + the number of candidates that are not answers and at least as similar to the query + the number
of answers ranked before it. So only one block of similarities is in memory, and the search is exact for any number of
candidates. Ties are pessimistic: of equal similarities (within 1e-9), candidates that are not answers rank first. Among
tied answers, the candidate with the smaller index ranks first.

Metrics of a query with R answers (without ties equal to the metrics of trec_eval):

* nDCG@10: grades as gains (not 2^grade - 1), discounted by log2(rank + 1), divided by the best possible sum;
* R@k: share of the answers in the first k; MRR: 1 / rank of the first answer, MRR@10: 0 if that rank is above 10;
* MAP@100: mean over the answers of the precision at their rank, 0 for ranks above 100.

Only for groups of texts:

* strict: 1 if the first R candidates are exactly the answers. With five captions per image this is AnglE's "strict
  accuracy" (arXiv 2309.12871): the top 5 of all captions, the query included, are the captions of the image. The paper
  does not state whether the query counts among the five.

Only for texts with a class:

* accuracy: 1 if the mean vector of the class, without the query, is nearer than the means of other classes;
* 5NN: 1 if the class is the most frequent of the 5 nearest texts (of equally frequent classes, the nearest); MAP: as above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from angle_llm.data.examples import training_source
from angle_llm.data.sources import evaluation_source, resolve_source
from angle_llm.evaluate.bootstrap import FEWEST_ITEMS, Difference, Interval, mean_difference, mean_interval
from angle_llm.evaluate.encoding import (
    RESAMPLES,
    Encode,
    EncodedTexts,
    EncoderFacts,
    Rows,
    check_names,
    encode_sides,
    evaluate_model,
    unique_names,
    write_results,
)
from angle_llm.evaluate.results import Results, TaskResult, difference_cells, read_results, report, short_name, table
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, read_answers, read_beir, read_classes, read_groups
from angle_llm.io import progress_bar
from angle_llm.model.unit_vectors import unit_rows
from angle_llm.prompts import InstructedText
from angle_llm.settings.commands import RetrievalSettings

METRIC = "exact retrieval by cosine similarity, × 100; ties go to the candidate that is not an answer"

RECALLS = (1, 5, 10, 100)
"""Values of k for the metrics R@k (recall in the first k candidates)."""

_TIE = 1e-9  # float64 products of float32 vectors differ by 1e-15 between shapes of a block
_SIMILARITIES = 2**22  # most numbers in a block of similarities, and in the vectors of its candidates: 32 MiB
_QUERIES = 256
_NEIGHBOURS = 5
_RERANKED_QUERIES = 32  # their similarities with all candidates are in memory


# --------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Metric:
    """Mean × 100 of a retrieval metric over queries, its 95 % bootstrap interval, and the value × 100 of each query.

    The interval is None if no bootstrap resamples were computed.
    """

    value: float
    interval: Interval | None
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RetrievalResult(TaskResult):
    """Result of a retrieval task: its metrics by name, the main metric first, and the ranks of the answers.

    `queries`, `candidates` and `answers` are numbers; `graded`: whether the answers have different grades. `ranks` has the
    ascending ranks of the answers of each query. `skipped` is the number of queries that skip a candidate, because the
    candidate is the query itself. `unanswered` is the number of judged queries without an answer, which are in no other number.
    `digest` identifies the task (see `RetrievalTask.digest`). `reranked` has the metrics × 100 of each query after reranking,
    if any.
    """

    queries: int
    candidates: int
    answers: int
    graded: bool
    skipped: int
    unanswered: int
    digest: str
    metrics: dict[str, Metric]
    query_ids: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    reranked: dict[str, list[float]] | None = None


RetrievalResults: TypeAlias = Results[RetrievalResult]


@dataclass(frozen=True)
class EvaluatedModel:
    """An evaluated model in a comparison: facts by table row, and its metrics × 100 of each query by task and metric.

    `digests` maps a task name to a hash of the task. Only models with equal digests can be compared.
    """

    name: str
    facts: Mapping[str, object]
    digests: Mapping[str, str]
    values: Mapping[str, Mapping[str, Sequence[float]]]

    @classmethod
    def of(cls, name: str, content: Mapping[str, Any]) -> EvaluatedModel:
        """Create the model from the content of a JSON file of `eval retrieval --json`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: for other content, such as missing or NaN values.
        """
        encoder = EncoderFacts(**content["encoder"])
        seconds = content["encode_seconds"]
        facts = {
            **encoder.columns(),
            "weights, millions": f"{encoder.weights / 1e6:,.0f}",
            "dimensions": content["dimensions"],
            "texts per second": f"{content['texts'] / seconds:,.0f}" if seconds else None,
        }
        values = {}
        for task_name, task in content["tasks"].items():
            values[task_name] = {metric: result["values"] for metric, result in task["metrics"].items()}
            values_MQ = np.array(list(values[task_name].values()), dtype=np.float64)
            if values_MQ.shape[1:] != (len(task["query_ids"]),) or not np.isfinite(values_MQ).all():
                raise ValueError(f"task {task_name!r}: expected a finite value of each query")
        digests = {task_name: task["digest"] for task_name, task in content["tasks"].items()}
        return cls(name, facts, digests, values)


Comparison: TypeAlias = tuple[EvaluatedModel, dict[str, dict[str, Difference]]]
"""A model, and the differences × 100 in retrieval metrics between the evaluated model and this model, by task and metric.

p-values are not corrected for the number of metrics."""


# ----------------------------------------------------------------------------------------------- ranks and metrics


def answer_ranks(
    queries_QD: Rows, candidates_CD: Rows, relevant: Sequence[Mapping[int, float]], itself: Sequence[int | None]
) -> list[dict[int, int]]:
    """Rank the answers of each query among all candidates by cosine similarity; return answer → rank (from 1) by query.

    Q queries and C candidates have D dimensions. `relevant[q]` maps the index of each answer of query q to its grade;
    `itself[q]` is the index of a candidate that query q skips, or None. Answers are in ascending order of rank. A zero
    vector has similarity 0. The first pass computes the similarities of the answers; the second pass counts all further
    candidates that are at least as similar.
    """
    answers = [np.array(sorted(grades), dtype=np.intp) for grades in relevant]
    skipped = [rows if skip is None else np.append(rows, skip) for rows, skip in zip(answers, itself, strict=True)]
    candidates_at_once = max(1, _SIMILARITIES // max(queries_QD.shape[1], min(_QUERIES, len(queries_QD)), 1))
    ranks_of = []
    for first in range(0, len(queries_QD), _QUERIES):
        block_QD = unit_rows(queries_QD[first : first + _QUERIES])
        queries = range(first, first + len(block_QD))
        similarities = [
            unit_rows(candidates_CD[answers[query]]) @ row for query, row in zip(queries, block_QD, strict=True)
        ]
        ahead = [np.zeros(len(similar_R), dtype=np.int64) for similar_R in similarities]
        for start in range(0, len(candidates_CD), candidates_at_once):
            similar_QC = block_QD @ unit_rows(candidates_CD[start : start + candidates_at_once]).T
            for query, similar_C, similar_R, ahead_R in zip(queries, similar_QC, similarities, ahead, strict=True):
                position = skipped[query] - start  # in the block, if it is not negative or too large
                similar_C[position[(position >= 0) & (position < len(similar_C))]] = -np.inf
                ahead_R += (similar_C >= similar_R[:, None] - _TIE).sum(axis=1)
        for query, similar_R, ahead_R in zip(queries, similarities, ahead, strict=True):
            order = np.argsort(-np.round(similar_R / _TIE), kind="stable")
            ranks = ahead_R[order] + np.arange(1, len(order) + 1)  # other candidates ahead, and answers up to this one
            ranks_of.append(dict(zip(answers[query][order].tolist(), ranks.tolist(), strict=True)))
    return ranks_of


def query_metrics(
    ranks: Sequence[Mapping[int, int]], relevant: Sequence[Mapping[int, float]], *, strict: bool = False
) -> dict[str, list[float]]:
    """Return the retrieval metrics in [0, 1] of each query, as lists by metric name.

    Args:
        ranks: rank by answer for each query, from `answer_ranks`.
        relevant: grade by answer for each query.
        strict: add the metric `strict` (the first R candidates are exactly the R answers), as the first.
    """
    names = ["nDCG@10", *(f"R@{k}" for k in RECALLS), "MRR", "MRR@10", "MAP@100"]
    metrics: dict[str, list[float]] = {name: [] for name in (["strict", *names] if strict else names)}
    for rank_of, grades in zip(ranks, relevant, strict=True):
        rank_R = np.array(list(rank_of.values()))  # `answer_ranks` returns ascending ranks
        reciprocal = 1 / float(rank_R[0])
        ideal_gains = dict(enumerate(sorted(grades.values(), reverse=True), start=1))
        gains = {rank: grades[answer] for answer, rank in rank_of.items()}
        precision_R = np.arange(1, len(rank_R) + 1) / rank_R
        values = {f"R@{k}": (rank_R <= k).mean() for k in RECALLS} | {
            "nDCG@10": _discounted(gains) / _discounted(ideal_gains),
            "MRR": reciprocal,
            "MRR@10": reciprocal if rank_R[0] <= 10 else 0.0,
            "MAP@100": np.where(rank_R <= 100, precision_R, 0.0).mean(),
            "strict": rank_R[-1] == len(rank_R),
        }
        for name, value_of_query in metrics.items():
            value_of_query.append(float(values[name]))
    return metrics


def class_metrics(queries_QD: Rows, candidates_CD: Rows, task: RetrievalTask) -> dict[str, list[float]]:
    """Return the metrics in [0, 1] of Q queries among C candidates with classes, as lists by name; rows have D dimensions."""
    names, class_of = np.unique(task.classes, return_inverse=True)
    class_Q, class_C = class_of[: len(queries_QD)], class_of[len(queries_QD) :]
    unit_CD = unit_rows(candidates_CD)
    sum_KD = np.zeros((len(names), unit_CD.shape[1]))
    np.add.at(sum_KD, class_C, unit_CD)
    empty_K, mean_KD = ~sum_KD.any(axis=1), unit_rows(sum_KD)
    metrics: dict[str, list[float]] = {"accuracy": [], f"{_NEIGHBOURS}NN": [], "MAP": []}
    unit_QD = unit_rows(queries_QD)
    step = max(1, _SIMILARITIES // max(1, len(unit_CD)))
    similar_of_query = (row_C for at in range(0, len(unit_QD), step) for row_C in unit_QD[at : at + step] @ unit_CD.T)
    for query, (row_D, similar_C) in enumerate(zip(unit_QD, similar_of_query, strict=True)):
        # Similarities to the candidates and to the class means, without the query itself.
        itself, correct = task.itself[query], class_Q[query]
        mean_K = np.where(empty_K, -np.inf, mean_KD @ row_D)
        if itself is not None:
            similar_C[itself] = -np.inf
            others_1D = (sum_KD[class_C[itself]] - unit_CD[itself])[None]
            mean_K[class_C[itself]] = (unit_rows(others_1D) @ row_D)[0] if others_1D.any() else -np.inf
        # A tie with another class is wrong.
        metrics["accuracy"].append(float(mean_K[correct] > np.delete(mean_K, correct).max() + _TIE))
        # Texts in order of similarity; of equal similarities, texts of the class are last.
        order = np.lexsort((class_C == correct, -np.round(similar_C / _TIE)))[: len(class_C) - (itself is not None)]
        # Weights 3, 2.5, 2.25, …: the class with most neighbours wins; if numbers are equal, the class of the nearest.
        weights = (2 + 0.5 ** np.arange(_NEIGHBOURS))[: len(order)]
        votes_K = np.bincount(class_C[order[:_NEIGHBOURS]], weights, len(names))
        metrics[f"{_NEIGHBOURS}NN"].append(float(votes_K.argmax() == correct))
        rank_R = np.flatnonzero(class_C[order] == correct) + 1
        metrics["MAP"].append(float((np.arange(1, len(rank_R) + 1) / rank_R).mean()) if len(rank_R) else 0.0)
    return metrics


def _discounted(gains: Mapping[int, float]) -> float:
    """Return the sum of gains (rank → gain) over the first ten ranks, each gain divided by log2(rank + 1)."""
    return float(sum(gain / np.log2(rank + 1) for rank, gain in gains.items() if rank <= 10))


class Reranking(NamedTuple):
    """The function that scores pairs of a query and a candidate, and the number of first candidates that it orders."""

    score_pairs: Callable[[Sequence[tuple[InstructedText, str]]], Rows]
    top: int


def rerank(reranking: Reranking, task: RetrievalTask, queries_QD: Rows, candidates_CD: Rows) -> list[dict[int, int]]:
    """Return answer → rank by query, ascending, after the first candidates of each query are ordered by their scores.

    Later candidates keep their ranks. Ties are pessimistic, as in `answer_ranks`.
    """
    ranks_of = []
    step = _SIMILARITIES // 256
    with progress_bar("rerank", len(queries_QD), "query") as bar:
        for start in range(0, len(queries_QD), _RERANKED_QUERIES):
            block_QD = unit_rows(queries_QD[start : start + _RERANKED_QUERIES])
            blocks = (candidates_CD[first : first + step] for first in range(0, len(candidates_CD), step))
            similar_QC = np.hstack([block_QD @ unit_rows(block_CD).T for block_CD in blocks])
            for query, similar_C in enumerate(similar_QC, start):
                # Candidates in order of similarity; of equal similarities, answers are last.
                is_answer_C = np.isin(np.arange(len(similar_C)), list(task.relevant[query]))
                order_C = np.lexsort((is_answer_C, -np.round(similar_C / _TIE)))
                order_C = order_C[order_C != (-1 if task.itself[query] is None else task.itself[query])]
                # The first candidates in order of their scores.
                first_K = order_C[: reranking.top]
                score_K = reranking.score_pairs([(task.queries[query], task.candidates[row]) for row in first_K])
                order_C[: len(first_K)] = first_K[np.lexsort((is_answer_C[first_K], -score_K))]
                position_R = np.flatnonzero(is_answer_C[order_C])
                ranks_of.append(dict(zip(order_C[position_R].tolist(), (position_R + 1).tolist(), strict=True)))
                bar.update()
    return ranks_of


# ------------------------------------------------------------------------------------------------------ evaluation


def evaluate_retrieval(
    encode: Encode,
    tasks: Sequence[RetrievalTask],
    *,
    encode_document: Encode | None = None,
    resamples: int = RESAMPLES,
    reranking: Reranking | None = None,
) -> RetrievalResults:
    """Evaluate an encoder on retrieval tasks: rank the answers of each query among all candidates of its task.

    `encode` is called once with all distinct texts. With `encode_document`, it is called with the queries only, and
    `encode_document` with the candidates. Intervals are percentile bootstraps over queries; `resamples` 0: no
    intervals. With `reranking`, the results also have the metrics after it.

    Raises:
        ValueError: for no tasks, equal task names, or if a function does not return one finite row per text.
    """
    check_names([task.name for task in tasks])
    queries = [text for task in tasks for text in (*task.queries, *(task.candidates if task.classes else ()))]
    documents = [text for task in tasks if not task.classes for text in task.candidates]
    encoded = encode_sides(encode, encode_document if documents else None, queries, documents)
    results = {task.name: _evaluate(encoded, task, resamples, reranking) for task in tasks}
    return Results(results, (), **encoded.facts())


def _evaluate(
    encoded: EncodedTexts, task: RetrievalTask, resamples: int, reranking: Reranking | None
) -> RetrievalResult:
    """Return the result of a retrieval task: search with the embeddings of its texts, and compute the metrics.

    `resamples` is the number of bootstrap resamples of the queries for the intervals; 0: no intervals.
    """
    queries_QD = encoded.rows(task.queries)
    candidates_CD = encoded.rows(task.candidates, "query" if task.classes else "document")
    ranks: list[dict[int, int]] = []
    if task.classes:
        shares_of = class_metrics(queries_QD, candidates_CD, task)
    else:
        ranks = answer_ranks(queries_QD, candidates_CD, task.relevant, task.itself)
        shares_of = query_metrics(ranks, task.relevant, strict=task.strict)
    metrics = {}
    for name, shares in shares_of.items():
        values = 100 * np.array(shares)
        interval = mean_interval(values, resamples=resamples, stream=task.name) if resamples else None
        metrics[name] = Metric(float(values.mean()), interval, tuple(values.tolist()))
    reranked = None
    if reranking is not None:
        after = rerank(reranking, task, queries_QD, candidates_CD)
        after_metrics = query_metrics(after, task.relevant, strict=task.strict)
        reranked = {name: [100 * share for share in shares] for name, shares in after_metrics.items()}
    return RetrievalResult(
        name=task.name,
        label=task.name,
        source=task.source,
        queries=len(task.queries),
        candidates=len(task.candidates),
        answers=sum(map(len, task.relevant)),
        graded=len({grade for grades in task.relevant for grade in grades.values()}) > 1,
        skipped=sum(candidate is not None for candidate in task.itself),
        unanswered=task.unanswered,
        digest=task.digest,
        metrics=metrics,
        query_ids=task.query_ids,
        ranks=tuple(tuple(rank_of.values()) for rank_of in ranks),
        reranked=reranked,
    )


# --------------------------------------------------------------------------------------------------------- command


def read_tasks(settings: RetrievalSettings) -> list[RetrievalTask]:
    """Read the retrieval tasks that the settings select. Tasks with equal names get their folders as prefixes.

    Raises:
        ValueError: if no task is selected, or a task is selected twice.
    """
    judged = [evaluation_source(folder) for folder in settings.folders]
    pairs = [training_source(settings.source_of(path)) for path in settings.pairs]
    groups = [resolve_source(path, tables=True, in_memory=True) for path in settings.groups]
    classes = [training_source(settings.source_of(path)) for path in settings.classes]
    if folder := next((source.text for source in pairs if source.kind == "beir"), None):
        raise ValueError(
            f"--pairs: expected pairs, got the BEIR folder {folder}. Name it without --pairs, to search its corpus."
        )
    if not (sources := [*judged, *pairs, *groups, *classes]):
        raise ValueError("no task: name a BEIR folder, or set --pairs, --groups or --classes.")
    tasks = [read_beir(source, binary=settings.binary) for source in judged]
    column = None if settings.groups else settings.column
    tasks += [read_answers(settings.source_of(source.text), settings.corpus, column, source) for source in pairs]
    tasks += [read_groups(source, settings.column) for source in groups]
    reference = None if settings.reference is None else settings.source_of(settings.reference)
    tasks += [read_classes(settings.source_of(source.text), source, reference) for source in classes]
    names = unique_names([task.name for task in tasks], sources)
    return [replace(task, name=name) for task, name in zip(tasks, names, strict=True)]


def retrieval_main(settings: RetrievalSettings) -> RetrievalResults:
    """Run `angle-llm eval retrieval`: evaluate the model, compare it with the `--against` models, and write the report.

    The report is printed, and results are written to the file of `--json`. Data and output paths are checked before a
    model is opened. One encoder is in memory at a time, and the reranker beside the first. If a
    comparison with another encoder fails, the results of the model are printed and written before the error.

    Raises:
        FileNotFoundError, ValueError: if a file of `--against` is missing, or has other content.
    """
    tasks = read_tasks(settings)
    stored = {
        path: read_results(path, lambda content: EvaluatedModel.of(content["model"], content))
        for path in settings.against
        if path.endswith(".json")
    }

    def evaluated(model: str, results: RetrievalResults, encoder: EncoderFacts) -> EvaluatedModel:
        return EvaluatedModel.of(model, results.to_dict() | {"encoder": asdict(encoder)})

    reranking = None
    if settings.rerank is not None:
        from angle_llm.model.reranker import Reranker

        reranker = Reranker(settings.rerank, dtype=settings.dtype, device=settings.device)
        reranking = Reranking(reranker.scores, settings.top)
    results, encoder = evaluate_model(settings, settings.model, evaluate_retrieval, tasks, reranking=reranking)
    ours = evaluated(settings.model, results, encoder)
    comparisons = []
    if settings.rerank is not None:
        values = {name: task.reranked or {} for name, task in results.tasks.items()}
        name = f"{settings.model}, first {settings.top:,} ordered by {settings.rerank}"
        facts = {**ours.facts, "texts per second": None}  # the speed of the reranker is not measured
        comparisons.append(compare_queries(ours, replace(ours, name=name, facts=facts, values=values)))

    def write() -> None:
        differences = [{"other": compared.name, "tasks": tasks} for compared, tasks in comparisons]
        text = retrieval_report(results, ours, comparisons)
        write_results(settings, METRIC, text, results.to_dict() | {"comparisons": differences}, encoder)

    try:
        for against in settings.against:
            theirs = stored.get(against) or evaluated(
                against, *evaluate_model(settings, against, evaluate_retrieval, tasks, resamples=0)
            )
            comparisons.append(compare_queries(ours, theirs))
    except Exception:  # not on Ctrl-C: a program that resumes must not take incomplete results for complete ones
        write()
        raise
    write()
    return results


def compare_queries(ours: EvaluatedModel, theirs: EvaluatedModel) -> Comparison:
    """Compare the retrieval metrics of two models on all tasks of `ours`, on the same bootstrap resamples of queries.

    Differences are `ours` minus `theirs`.

    Raises:
        ValueError: if `theirs` lacks a task, or has other queries, candidates, grades or metrics in a task.
    """
    differences = {}
    for name, values in ours.values.items():
        if theirs.digests.get(name) != ours.digests[name] or theirs.values[name].keys() != values.keys():
            raise ValueError(
                f"--against: {theirs.name} was evaluated on {', '.join(theirs.digests)}; expected also {name} with the same "
                "queries, candidates and grades. Evaluate both models on the same files with the same flags."
            )
        differences[name] = {
            metric: mean_difference(of_queries, theirs.values[name][metric], stream=name)
            for metric, of_queries in values.items()
        }
    return theirs, differences


# ---------------------------------------------------------------------------------------------------------- report


def retrieval_report(results: RetrievalResults, ours: EvaluatedModel, comparisons: Sequence[Comparison]) -> str:
    """Return the Markdown report of a retrieval evaluation: a table for each task, then notes.

    A table has the facts of the model and its metrics, then these values of each compared model, and the differences.
    """
    # Notes on the columns.
    notes = [
        "Scores × 100 of an exact search by cosine similarity. If cosines are equal, right answers are ranked last. R@k: share "
        "of the right answers of a query among the first k candidates. MRR: 1 / rank of the first right answer. MAP@100: mean "
        "precision at the ranks of the right answers. 95 %: interval, from a bootstrap over the queries.",
    ]
    if any("strict" in task.metrics for task in results.tasks.values()):
        notes.append("strict: share of queries whose R answers are the first R candidates.")
    if any(not task.answers for task in results.tasks.values()):
        notes.append("accuracy: nearest class mean. 5NN: most frequent class of 5 neighbours. MAP: texts of the class.")
    if comparisons and any(task.queries < FEWEST_ITEMS for task in results.tasks.values()):
        notes.append(
            f"Differences over fewer than {FEWEST_ITEMS} queries have no interval and no p, because they cannot show a clear one."
        )
    if comparisons:
        notes.append(
            f"Compared with {' and '.join(compared.name for compared, _ in comparisons)}. A positive difference means "
            f"that {ours.name} is better. If the 95 % interval of a difference includes 0, the difference is not clear. p is "
            "two-sided and not corrected for several metrics or models. Texts per second depend on the machine and its other "
            "work."
        )
    for compared, _ in comparisons:
        if compared.facts["tokens"] != ours.facts["tokens"]:
            notes.append(
                f"{compared.name} truncates texts at {compared.facts['tokens']} tokens, this model at {ours.facts['tokens']}, "
                "which can change scores as much as training: set --max-length."
            )
    # A table for each task, with four columns for each compared model.
    tables = []
    for task in results.tasks.values():
        header = [task.label, short_name(ours.name), "95 %"]
        rows: list[list[object]] = [[label, fact, None] for label, fact in ours.facts.items()]
        rows += [[name, metric.value, metric.interval] for name, metric in task.metrics.items()]
        for compared, differences in comparisons:
            header += [short_name(compared.name), "difference", "95 %", "p"]
            cells: list[list[object]] = [[fact, None, None, None] for fact in compared.facts.values()]
            cells += map(difference_cells, differences[task.name].values())
            rows = [[*row, *of_other] for row, of_other in zip(rows, cells, strict=True)]
        tables.append(table(header, rows, words=1))
        answers = f"{task.answers:,} answers" if task.answers else "the texts of a class are its answers"
        answers += " with grades, which --binary ignores" if task.graded else ""
        skipped = f"; {task.skipped:,} queries are not compared with their own text or document" if task.skipped else ""
        notes.append(f"{task.label}: {task.queries:,} queries, {task.candidates:,} candidates, {answers}{skipped}.")
        if task.unanswered:
            notes.append(f"{task.label}: {task.unanswered:,} judged queries have no answer and are not counted.")
    return report(ours.name, tables, notes, results)
