"""STS evaluation: Spearman and Pearson correlation of cosine similarity with gold scores.

    distinct sentences of all tasks ──► encode ──► E (N, D) ──► cosine of each pair ──► correlations per task

Correlations are × 100. An undefined correlation is NaN with a reason; vectors that are not finite raise an error.

A task with sub-tasks has three scores, and papers differ in which they report: `all` (one correlation over all pairs:
SimCSE, PromptEOL, AnglE), the mean over sub-tasks, and the mean weighted by pairs (SemEval 2012 to 2014).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.bootstrap import Interval, compare, percentile_interval, resampled_spearman
from angle_llm.evaluate.correlation import PairScores, UndefinedCorrelationError, pair_cosines, pearson, spearman
from angle_llm.evaluate.encoding import (
    ComparedSettings,
    Encode,
    EncodedTexts,
    OpenEncoder,
    Used,
    check_names,
    encode_distinct,
    encode_sides,
    encode_with,
    evaluated,
    finish,
)
from angle_llm.evaluate.results import Results, TaskResult
from angle_llm.evaluate.sts_report import METRIC, pair_lines, read_scores, score_lines, sts_report, write_lines
from angle_llm.evaluate.sts_tasks import (
    PUBLISHED_TASKS,
    StsPair,
    StsTask,
    StsTaskSettings,
    edited,
    read_pairs,
    select_tasks,
)
from angle_llm.io import write_text
from angle_llm.settings_io import settings_class

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

PUBLISHED_EDITS = ("append_full_stop", "double_quotes_to_single", "final_question_mark_to_full_stop")
"""Edits of each sentence by `--edits published`, as names in `PromptTemplate.edits`."""

PAIR_FORMATS = (".csv", ".jsonl")


@settings_class
class StsEvalSettings(ComparedSettings, StsTaskSettings):
    """Spearman and Pearson correlation on STS tasks, with intervals and published scores.

    Scores depend on the text: published tables use SentEval's (--variant senteval), those of prompted models with
    --edits published; MTEB uses raw text. Intervals cover other test pairs, not another training seed. --against
    compares two models pair by pair.
    """

    edits: Literal["none", "published"] = "none"
    """Edits of each sentence, with any prompt. published: those of PromptEOL and AnglE in evaluation with a prompt: a
    full stop is added, double quotes become single, a final question mark becomes a full stop."""

    markdown: Path | None = None
    """Also write the printed report to this file."""

    csv: Path | None = None
    """Also write the scores to this file, one per line."""

    pairs_out: Path | None = None
    """Also write cosine and gold score of each pair to this .jsonl or .csv file."""

    pairs_text: bool = False
    """Include the two sentences in the file of pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "senteval" and self.data_dir is None:
            raise ValueError("--variant senteval needs --data-dir: the hub has only raw text.")
        if self.pairs_out is not None and self.pairs_out.suffix not in PAIR_FORMATS:
            raise ValueError(
                f"--pairs-out: expected a file name ending in {' or '.join(PAIR_FORMATS)}, got {self.pairs_out}."
            )
        if self.pairs_text and self.pairs_out is None:
            raise ValueError("--pairs-text needs --pairs-out.")


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """Correlations × 100 over `pairs` pairs. If they are undefined, they are NaN and `undefined` is the reason.

    `resampled` is Spearman × 100 in each bootstrap resample, None without resamples.
    """

    pairs: int
    spearman: float
    pearson: float
    undefined: str | None
    resampled: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)

    @property
    def interval(self) -> Interval | None:
        """95 % interval of `spearman` over pairs (see `bootstrap`)."""
        return None if self.resampled is None else percentile_interval(self.resampled)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, for JSON, without the resamples and those of single pairs."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.repr} | {"interval": self.interval}
        return {key: value.to_dict() if isinstance(value, Correlations) else value for key, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class StsTaskResult(Correlations, TaskResult):
    """Correlations of a task over all pairs, and of each sub-task by name; means over sub-tasks, if there are some.

    `text` is the variant in tables: `senteval`, or `senteval, edited`. The second mean is weighted by pairs. Means are
    NaN if one correlation is.
    """

    metric = "spearman"

    variant: str
    edits: str
    text: str
    official_pairs: int | None
    subtasks: dict[str, Correlations]
    mean_over_subtasks: Correlations | None
    weighted_mean_over_subtasks: Correlations | None
    scores: PairScores = field(compare=False, repr=False)
    sentences: tuple[StsPair, ...] = field(compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, for JSON, without those of single pairs."""
        return super().to_dict() | {"subtasks": {name: one.to_dict() for name, one in self.subtasks.items()}}


class StsResults(Results[StsTaskResult]):
    """Results of `evaluate`."""

    @property
    def average_interval(self) -> Interval | None:
        """95 % interval of `average`, tasks resampled independently. None without average or resamples."""
        resampled = [self.tasks[name].resampled for name in self.averaged]
        known = [values for values in resampled if values is not None]
        return percentile_interval(np.mean(known, axis=0)) if known and len(known) == len(resampled) else None

    @property
    def scores(self) -> dict[str, PairScores]:
        """Cosines and gold scores by task name, for `compare`."""
        return {name: task.scores for name, task in self.tasks.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return all values, for JSON; `pairs` has cosine and gold score of each pair, for `read_scores`."""
        facts = super().to_dict()
        return {
            "variant": " + ".join(dict.fromkeys(task.variant for task in self.tasks.values())),
            "sentences": facts.pop("texts"),
            **facts,
            "pairs": {
                name: {"cosine": scores.cosine.tolist(), "gold": scores.gold.tolist()}
                for name, scores in self.scores.items()
            },
        }


def evaluate(
    encode: Encode,
    tasks: Sequence[StsTask],
    *,
    encode_document: Encode | None = None,
    resamples: int = 0,
    seed: int = 0,
) -> StsResults:
    """Return the correlation of cosine similarity with gold scores for each task.

    `encode` is called once, with the distinct sentences of all tasks in order of first appearance. With
    `encode_document`, first sentences are queries and second ones documents, as in training. Each Spearman correlation
    has an interval from `resamples` bootstrap resamples of the pairs; 0: no intervals.

    Raises:
        ValueError: for no tasks, equal names, a task without pairs, or if `encode` does not return one finite row per
            sentence.
    """
    check_names([task.name for task in tasks])
    for task in tasks:
        if not task.pairs:
            raise ValueError(f"task {task.name}: expected at least one pair, got none.")
    pairs = [pair for task in tasks for pair in task.pairs]
    if encode_document is None:
        encoded = encode_distinct(encode, (text for pair in pairs for text in pair[:2]))
    else:
        firsts, seconds = (pair.sentence1 for pair in pairs), (pair.sentence2 for pair in pairs)
        encoded = encode_sides(encode, encode_document, firsts, seconds)
    found = {task.name: _evaluate_task(encoded, task, resamples, seed) for task in tasks}
    return StsResults(found, PUBLISHED_TASKS, **encoded.facts())


def sts_score(pairs: str | Path, *, micro_batch_tokens: int | None = None) -> Callable[[SentenceEncoder], float]:
    """Return a function from an encoder to its Spearman × 100 on a pair file, for evaluation during training.

    The file is read at once; `micro_batch_tokens` is that of `encode`. The function raises `UndefinedCorrelationError`
    with the reason instead of returning NaN.
    """
    task = read_pairs(pairs)
    main = os.environ.get("RANK", "0") == "0"  # all ranks evaluate; one has a progress bar

    def score(encoder: SentenceEncoder) -> float:
        encode, encode_document = encode_with(encoder, micro_batch_tokens, show_progress=main)
        result = evaluate(encode, [task], encode_document=encode_document).tasks[task.name]
        if result.undefined:
            raise UndefinedCorrelationError(f"{pairs}: undefined Spearman correlation: {result.undefined}.")
        return result.spearman

    return score


def _evaluate_task(encoded: EncodedTexts, task: StsTask, resamples: int, seed: int) -> StsTaskResult:
    left_P = encoded.index(pair.sentence1 for pair in task.pairs)
    right_P = encoded.index((pair.sentence2 for pair in task.pairs), "document")
    gold_P = np.array([pair.score for pair in task.pairs], dtype=np.float64)
    scores = PairScores(pair_cosines(encoded.embeddings_ND, left_P, right_P), gold_P)
    subtask_P = np.array([pair.subtask for pair in task.pairs])
    subtasks = {}
    if any(subtask_P):
        for name in dict.fromkeys(subtask_P.tolist()):
            part = PairScores(*(side[subtask_P == name] for side in scores))
            subtasks[name] = _correlations(part, resamples, seed, f"{task.name}/{name}")
    return StsTaskResult(
        **vars(_correlations(scores, resamples, seed, task.name)),
        **{key: value for key, value in vars(task).items() if key != "pairs"},
        text=task.text,
        subtasks=subtasks,
        mean_over_subtasks=_mean(subtasks, weighted=False),
        weighted_mean_over_subtasks=_mean(subtasks, weighted=True),
        scores=scores,
        sentences=task.pairs,
    )


def _mean(subtasks: dict[str, Correlations], weighted: bool) -> Correlations | None:
    if not subtasks:
        return None
    pairs = [one.pairs for one in subtasks.values()]
    both = [(one.spearman, one.pearson) for one in subtasks.values()]
    spearman, pearson = np.average(both, axis=0, weights=pairs if weighted else None).tolist()
    return Correlations(pairs=sum(pairs), spearman=spearman, pearson=pearson, undefined=None)


def _correlations(scores: PairScores, resamples: int, seed: int, stream: str) -> Correlations:
    cosines_P, gold_P = scores
    values, resampled, undefined = (math.nan, math.nan), np.full(resamples, math.nan), None
    try:
        values = 100 * spearman(cosines_P, gold_P), 100 * pearson(cosines_P, gold_P)
        if resamples:
            drawn = resampled_spearman([cosines_P], gold_P, resamples=resamples, seed=seed, stream=stream)
            resampled = 100 * drawn[0]
    except UndefinedCorrelationError as reason:
        undefined = f"cosines (first) and gold scores (second): {reason}"
    return Correlations(
        pairs=len(gold_P),
        spearman=values[0],
        pearson=values[1],
        undefined=undefined,
        resampled=resampled if resamples else None,
    )


def sts_main(settings: StsEvalSettings, open_encoder: OpenEncoder) -> StsResults:
    """Read the tasks, open the encoder, evaluate, compare with `against`, print the report, write the files.

    Data and outputs are checked before a model is opened. With `against`, one model is in memory at a time.
    """
    tasks = select_tasks(settings.tasks, settings.data_dir, settings.variant)
    for file in (settings.markdown, settings.csv, settings.pairs_out):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    other, theirs = settings.against, None
    if other is not None and other.endswith(".json"):
        name, theirs = read_scores(other)
        other = f"{name}, {other}"

    def run(given: StsEvalSettings) -> tuple[StsResults, Used]:
        def evaluate_edited(encoder: Any, encode: Encode, encode_document: Encode | None) -> StsResults:
            used = tasks
            if given.edits == "published":  # a prompt with the same edits has no further effect
                edit = replace(encoder.prompts.query, edits=PUBLISHED_EDITS).edit
                used = [edited(task, given.edits, edit) for task in tasks]
            resampling = {"resamples": given.resamples, "seed": given.seed}
            return evaluate(encode, used, encode_document=encode_document, **resampling)

        return evaluated(given, open_encoder, evaluate_edited)

    results, used = run(settings)
    comparison = None
    if other is not None:
        if theirs is None:
            found, other_used = run(replace(settings, model=other, revision=None, resamples=0, against=None))
            other, theirs = f"{other} ({other_used})", found.scores
        comparison = compare(results.scores, theirs, resamples=settings.resamples, seed=settings.seed)
    report = sts_report(results, settings.model, [str(used)], comparison=comparison, other=other or "")
    finish(settings, METRIC, report, results.to_dict() | {"comparison": comparison}, used)
    if settings.markdown is not None:
        write_text(settings.markdown, report)
    if settings.csv is not None:
        write_lines(settings.csv, list(score_lines(results, settings.model)))
    if settings.pairs_out is not None:
        write_lines(settings.pairs_out, list(pair_lines(results, settings.pairs_text)))
    return results
