"""STS evaluation: Spearman and Pearson correlation of cosine similarity with gold scores.

    distinct sentences of all tasks ──► encode ──► E (N, D) ──► cosine of each pair ──► correlations per task

Correlations are × 100. An undefined correlation is NaN with a reason; vectors that are not finite raise an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from angle_llm.evaluate.bootstrap import RESAMPLES, Comparison, compare, resampled_spearman
from angle_llm.evaluate.correlation import PairScores, UndefinedCorrelationError, pair_cosines, pearson, spearman
from angle_llm.evaluate.encoding import (
    Encode,
    EncodedTexts,
    Encoder,
    EncoderSettings,
    OpenEncoder,
    encode_distinct,
    encode_with,
    make_folders,
    open_from,
    remark_on,
    used_by,
)
from angle_llm.evaluate.sts_report import (
    SavedScores,
    csv_text,
    markdown_report,
    pair_lines,
    read_scores,
    results_dict,
    scores_csv,
)
from angle_llm.evaluate.sts_results import Correlations, StsResults, TaskResult
from angle_llm.evaluate.sts_tasks import StsTask, edited, read_pairs, select_tasks, variant_of
from angle_llm.io import write_json, write_text

PUBLISHED_EDITS = ("append_full_stop", "double_quotes_to_single", "final_question_mark_to_full_stop")
"""Edits of each sentence by `--edits published`, as names in `PromptTemplate.edits`."""

PAIR_FORMATS = (".csv", ".jsonl")


@dataclass(frozen=True, kw_only=True)
class StsEvalSettings(EncoderSettings):
    """Spearman and Pearson correlation on STS tasks, with intervals and published scores.

    Scores depend on the text: published tables use SentEval's (--variant senteval), those of prompted models with
    --edits published; MTEB uses raw text. Intervals cover other test pairs, not another training seed. --against
    compares two models pair by pair.
    """

    data_dir: Path | None = None
    """Directory with sts/, stsb/ and sick/ (SentEval's text: sts_senteval_tok/, …), or with STS/ and SICK/ as
    SentEval's download script writes them. None: the Hugging Face hub."""

    tasks: tuple[str, ...] = ()
    """sts12 … sts16, stsb, stsb-dev, sickr (test split), sickr-all, starter:graded_pairs.tsv, or files (TSV, CSV,
    JSONL, Parquet) with columns sentence1, sentence2, score. Empty: all published tasks that are found."""

    variant: Literal["auto", "raw", "senteval"] = "auto"
    """raw: sentences as released (MTEB). senteval: tokenised and lower-cased (published tables). auto: raw, or senteval
    if the directory has no other text."""

    edits: Literal["none", "published"] = "none"
    """Edits of each sentence, with any prompt. published: those of PromptEOL and AnglE in evaluation with a prompt: a
    full stop is added, double quotes become single, a final question mark becomes a full stop."""

    resamples: int = RESAMPLES
    """Bootstrap resamples of the pairs for each 95 % interval. 0: no intervals."""

    seed: int = 0
    """Seed of the resamples. Changes intervals slightly, scores not at all."""

    against: str | None = None
    """Compare with another model pair by pair: differences with 95 % interval and p-value. A model, opened with the
    same flags (prompt, pooling, …), or a .json file written by --json."""

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
        for flag, value in (("--resamples", self.resamples), ("--seed", self.seed)):
            if value < 0:
                raise ValueError(f"{flag}: expected 0 or more, got {value}.")
        if self.against is not None and not self.resamples:
            raise ValueError("--against needs --resamples for intervals and p-values, got 0.")
        if self.pairs_out is not None and self.pairs_out.suffix not in PAIR_FORMATS:
            raise ValueError(
                f"--pairs-out: expected a file name ending in {' or '.join(PAIR_FORMATS)}, got {self.pairs_out}."
            )
        if self.pairs_text and self.pairs_out is None:
            raise ValueError("--pairs-text needs --pairs-out.")


def evaluate(encode: Encode, tasks: Sequence[StsTask], *, resamples: int = 0, seed: int = 0) -> StsResults:
    """Correlation of cosine similarity with gold scores for each task.

    `encode` is called once, with the distinct sentences of all tasks in order of first appearance. Each Spearman
    correlation has an interval from `resamples` bootstrap resamples of the pairs; 0: no intervals.

    Raises `ValueError` for no tasks, equal names, a task without pairs, or if `encode` does not return one finite row
    per sentence.
    """
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) < len(names) or not all(task.pairs for task in tasks):
        counts = ", ".join(f"{task.name} ({len(task.pairs)} pairs)" for task in tasks) or "none"
        raise ValueError(f"expected tasks with unique names and at least one pair each, got {counts}.")
    pairs = (pair for task in tasks for pair in task.pairs)
    encoded = encode_distinct(encode, (sentence for pair in pairs for sentence in pair[:2]))
    return StsResults(
        tasks={task.name: _evaluate_task(encoded, task, resamples, seed) for task in tasks},
        sentences=len(encoded.row_of),
        dimensions=encoded.dimensions,
        zero_vectors=encoded.zero_vectors,
        encode_seconds=encoded.seconds,
    )


def sts_score(pairs: str | Path, *, micro_batch_tokens: int | None = None) -> Callable[[Encoder], float]:
    """A function from an encoder to its Spearman × 100 on a pair file, for evaluation during training.

    The file is read at once. The function raises `UndefinedCorrelationError` with the reason instead of returning NaN.
    """
    task = read_pairs(pairs)
    main = os.environ.get("RANK", "0") == "0"  # all ranks evaluate; one has a progress bar

    def score(encoder: Encoder) -> float:
        result = evaluate(encode_with(encoder, micro_batch_tokens, show_progress=main), [task]).tasks[task.name]
        if result.undefined:
            raise UndefinedCorrelationError(f"{pairs}: undefined Spearman correlation: {result.undefined}.")
        return result.spearman

    return score


def _evaluate_task(encoded: EncodedTexts, task: StsTask, resamples: int, seed: int) -> TaskResult:
    left_P = np.array([encoded.row_of[pair.sentence1] for pair in task.pairs], dtype=np.intp)
    right_P = np.array([encoded.row_of[pair.sentence2] for pair in task.pairs], dtype=np.intp)
    gold_P = np.array([pair.score for pair in task.pairs], dtype=np.float64)
    scores = PairScores(pair_cosines(encoded.embeddings_ND, left_P, right_P), gold_P)
    names = list(dict.fromkeys(pair.subtask for pair in task.pairs))
    subtask_P = np.array([names.index(pair.subtask) for pair in task.pairs])
    parts = {name: PairScores(*(side[subtask_P == index] for side in scores)) for index, name in enumerate(names)}
    described = ("name", "label", "variant", "edits", "text", "source", "official_pairs")
    return TaskResult(
        **vars(_correlations(scores, resamples, seed, task.name)),
        **{name: getattr(task, name) for name in described},
        subtasks={
            name: _correlations(part, resamples, seed, f"{task.name}/{name}")
            for name, part in parts.items()
            if names != [""]
        },
        scores=scores,
    )


def _correlations(scores: PairScores, resamples: int, seed: int, stream: str) -> Correlations:
    cosines_P, gold_P = scores
    try:
        found = Correlations(len(gold_P), 100 * spearman(cosines_P, gold_P), 100 * pearson(cosines_P, gold_P), None)
    except UndefinedCorrelationError as reason:
        because = f"cosines (first) and gold scores (second): {reason}"
        return Correlations(
            len(gold_P), math.nan, math.nan, because, np.full(resamples, math.nan) if resamples else None
        )
    if not resamples:
        return found
    resampled = resampled_spearman([cosines_P], gold_P, resamples=resamples, seed=seed, stream=stream)
    return replace(found, resampled=100 * resampled[0])


class _Evaluated(NamedTuple):
    """Results of an encoder, the tasks with their edits, and its description as JSON and as text."""

    results: StsResults
    tasks: list[StsTask]
    encoder: dict[str, Any]
    remark: str


def sts_main(settings: StsEvalSettings, open_encoder: OpenEncoder) -> StsResults:
    """Read the tasks, open the encoder, evaluate, compare with `against`, print the report, write the files.

    Data and outputs are checked before a model is opened.
    """
    variant = variant_of(settings.data_dir) if settings.variant == "auto" else settings.variant
    tasks = select_tasks(settings.tasks, settings.data_dir, variant)
    make_folders(settings.json, settings.markdown, settings.csv, settings.pairs_out)
    saved = read_scores(settings.against) if settings.against and settings.against.endswith(".json") else None
    evaluated = _evaluated(settings, tasks, open_encoder)
    results = evaluated.results
    comparison, other = None, ""
    if settings.against:
        if (there := saved) is None:
            flags = replace(settings, model=settings.against, revision=None, resamples=0, against=None)
            there = SavedScores(settings.against, _evaluated(flags, tasks, open_encoder).results.scores)
        comparison = compare(results.scores, there.scores, resamples=settings.resamples, seed=settings.seed)
        other = f"{there.model} ({settings.against})" if saved else there.model
    report = markdown_report(results, settings.model, [evaluated.remark], comparison=comparison, other=other)
    print(report, end="")
    if settings.markdown is not None:
        write_text(settings.markdown, report)
    _write(settings, evaluated, comparison)
    return results


def _evaluated(settings: StsEvalSettings, tasks: Sequence[StsTask], open_encoder: OpenEncoder) -> _Evaluated:
    """Open an encoder and evaluate it. It is released on return: with `against`, one model is in memory at a time."""
    encoder = open_from(settings, open_encoder)
    if settings.edits == "published":  # a prompt with the same edits changes nothing more
        edit = replace(encoder.prompt, edits=PUBLISHED_EDITS).edit
        tasks = [edited(task, settings.edits, edit) for task in tasks]
    encode = encode_with(encoder, settings.micro_batch_tokens)
    results = evaluate(encode, tasks, resamples=settings.resamples, seed=settings.seed)
    return _Evaluated(results, list(tasks), used_by(encoder), remark_on(encoder))


def _write(settings: StsEvalSettings, evaluated: _Evaluated, comparison: Comparison | None) -> None:
    """Write the JSON and CSV files and the file of pairs."""
    results, model = evaluated.results, settings.model
    if settings.json is not None:
        asked, used = asdict(settings), evaluated.encoder
        write_json(settings.json, results_dict(results, model, settings=asked, encoder=used, comparison=comparison))
    if settings.csv is not None:
        write_text(settings.csv, scores_csv(results, model))
    if settings.pairs_out is not None:
        lines = list(pair_lines(results, evaluated.tasks, settings.pairs_text))
        jsonl = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        as_csv = settings.pairs_out.suffix == ".csv"
        write_text(settings.pairs_out, csv_text(list(lines[0]), lines) if as_csv else jsonl)
