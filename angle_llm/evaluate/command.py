"""The STS command: settings, and what happens between them and the printed table.

`eval/sts.py` and `angle-llm eval` are the same few lines: read `StsEvalSettings` from the command line and hand them to
`sts_main` with a way to open an encoder. This room never imports one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from angle_llm.evaluate.comparison import Comparison, compare
from angle_llm.evaluate.encoding import (
    EncoderSettings,
    OpenedEncoder,
    OpenEncoder,
    encode_with,
    open_from,
    remark_on,
    used_by,
)
from angle_llm.evaluate.pairs import STARTER, StsTask, edited, read_pairs
from angle_llm.evaluate.report import markdown_report
from angle_llm.evaluate.resampling import RESAMPLES
from angle_llm.evaluate.sts import StsResults, evaluate
from angle_llm.evaluate.sts_files import (
    PAIR_FORMATS,
    SavedScores,
    figures_csv,
    pair_lines,
    read_scores,
    results_dict,
)
from angle_llm.evaluate.tasks import PUBLISHED_TASKS, TextVariant, available_tasks, read_task, variant_of
from angle_llm.io import write_json, write_text

EDITS: dict[str, tuple[str, ...]] = {
    "none": (),
    "published": ("append_full_stop", "double_quotes_to_single", "final_question_mark_to_full_stop"),
}
"""What may be done to each sentence before it is worded: names a prompt's `edits` know, in their order."""


@dataclass(frozen=True, kw_only=True)
class StsEvalSettings(EncoderSettings):
    """Spearman and Pearson correlation on the STS tasks, with intervals, beside the published figures.

    A figure means little without its text: the published tables are on SentEval's (--variant senteval), those of
    prompted models with --edits published; MTEB is on the raw text. Intervals tell what other test pairs might have
    given, not what another training seed would. Two models are compared pair by pair with --against.
    """

    data_dir: Path | None = None
    """Directory with sts/, stsb/ and sick/ (text in SentEval's form: sts_senteval_tok/, …),
    or with STS/ and SICK/ as SentEval's download script leaves them.
    None: the Hugging Face hub."""

    tasks: tuple[str, ...] = ()
    """sts12 … sts16, stsb, stsb-dev, sickr (test split), sickr-all, starter:graded_pairs.tsv,
    or TSV files with columns sentence1, sentence2, score.
    Empty: every published task that is there."""

    variant: Literal["auto", "raw", "senteval"] = "auto"
    """raw: the sentences as released (MTEB).
    senteval: tokenised and lower-cased (the published tables).
    auto: raw, or senteval where the directory holds nothing else."""

    edits: Literal["none", "published"] = "none"
    """What is done to each sentence, whatever the prompt.
    published: what PromptEOL and AnglE do on evaluating with a prompt:
    a full stop is added, double quotes become single, a final question mark becomes a full stop."""

    resamples: int = RESAMPLES
    """Bootstrap resamples of the pairs behind each 95 % interval. 0: no intervals."""

    seed: int = 0
    """Seed of the resamples: it moves intervals a little, figures not at all."""

    against: str | None = None
    """Compare with another model, pair by pair: each difference with its 95 % interval and p-value.
    A name or path, opened with the same flags (prompt, pooling, …), or a .json file that --json wrote."""

    markdown: Path | None = None
    """Also write what is printed to this file."""

    csv: Path | None = None
    """Also write the figures to this file, one a line."""

    pairs_out: Path | None = None
    """Also write each pair's cosine and gold score to this .jsonl or .csv file."""

    pairs_text: bool = False
    """Put the two sentences into the file of pairs too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "senteval" and self.data_dir is None:
            raise ValueError("--variant senteval needs --data-dir: the hub holds raw text only.")
        if self.resamples < 0 or self.seed < 0:
            raise ValueError(f"--resamples and --seed must be at least 0, found {self.resamples} and {self.seed}.")
        if self.against is not None and not self.resamples:
            raise ValueError("--against needs --resamples: the interval and the p-value come from them.")
        if self.pairs_out is not None and self.pairs_out.suffix not in PAIR_FORMATS:
            raise ValueError(f"--pairs-out must end in {' or '.join(PAIR_FORMATS)}, found {self.pairs_out}.")
        if self.pairs_text and self.pairs_out is None:
            raise ValueError("--pairs-text needs --pairs-out, the file to put the sentences into.")


class Measured(NamedTuple):
    """An encoder's results, on tasks as it was given them (edited), and how it worded, pooled and cut."""

    results: StsResults
    tasks: list[StsTask]
    encoder: dict[str, Any]
    remark: str


def sts_main(settings: StsEvalSettings, open_encoder: OpenEncoder) -> StsResults:
    """Read the tasks, open the encoder, evaluate, compare where asked to, print the report and write the files.

    Data and outputs are checked before a model is opened, so that a typing mistake costs no waiting.
    """
    variant = variant_of(settings.data_dir) if settings.variant == "auto" else settings.variant
    tasks = select_tasks(settings.tasks, settings.data_dir, variant)
    for path in (settings.json, settings.markdown, settings.csv, settings.pairs_out):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    saved = read_scores(settings.against) if settings.against and settings.against.endswith(".json") else None
    measured = _measure(settings, tasks, open_encoder)
    comparison, other = None, ""
    if settings.against:
        there = saved or _other_scores(settings, settings.against, tasks, open_encoder)
        comparison = compare(measured.results.scores, there.scores, resamples=settings.resamples, seed=settings.seed)
        other = f"{there.model} ({settings.against})" if saved else there.model
    report = markdown_report(measured.results, settings.model, [measured.remark], comparison=comparison, other=other)
    print(report, end="")
    _write(settings, measured, comparison, report)
    return measured.results


def select_tasks(names: Sequence[str], data_dir: Path | None, variant: TextVariant) -> list[StsTask]:
    """The tasks called `names`: task names, or paths of pair files. No names: every published task there is.

    On the hub SICK comes with all its splits, so `sickr-all` stands for `sickr` there.
    """
    if not names:
        present = available_tasks(data_dir, variant)
        names = [name for name in PUBLISHED_TASKS if name in present]
        if data_dir is None:
            names = [*names, "sickr-all"]
        if not names:
            raise FileNotFoundError(
                f"no STS task on {variant} text below {data_dir}. Needed: one of sts/stsNN.test.tsv, stsb/test.tsv, "
                "sick/test.tsv (folders end in _senteval_tok for senteval text), or SentEval's own STS/ and SICK/ "
                "(senteval text); or name tasks or files with --tasks."
            )
    return [read_pairs(name) if _is_path(name) else read_task(data_dir, name, variant) for name in names]


def _is_path(name: str) -> bool:
    return name.startswith(STARTER) or name.endswith(".tsv") or "/" in name


def _measure(settings: StsEvalSettings, tasks: Sequence[StsTask], open_encoder: OpenEncoder) -> Measured:
    """Opens the encoder, lets go of it at the end: of two to compare, one at a time is in memory."""
    encoder = open_from(settings, open_encoder)
    given = [_edit(task, settings.edits, encoder) for task in tasks]
    encode = encode_with(encoder, settings.micro_batch_tokens)
    results = evaluate(encode, given, resamples=settings.resamples, seed=settings.seed)
    return Measured(results, given, used_by(encoder), remark_on(encoder))


def _edit(task: StsTask, edits: str, encoder: OpenedEncoder) -> StsTask:
    # A prompt knows the edits by name. Doing one twice, here and in the encoder's own prompt, is doing it once.
    return edited(task, edits, replace(encoder.prompt, edits=EDITS[edits]).edit) if EDITS[edits] else task


def _other_scores(
    settings: StsEvalSettings, model: str, tasks: Sequence[StsTask], open_encoder: OpenEncoder
) -> SavedScores:
    other = replace(settings, model=model, revision=None, resamples=0, against=None)
    return SavedScores(model, _measure(other, tasks, open_encoder).results.scores)


def _write(settings: StsEvalSettings, measured: Measured, comparison: Comparison | None, report: str) -> None:
    results, model = measured.results, settings.model
    if settings.json is not None:
        asked, used = asdict(settings), measured.encoder
        write_json(settings.json, results_dict(results, model, settings=asked, encoder=used, comparison=comparison))
    if settings.markdown is not None:
        write_text(settings.markdown, report)
    if settings.csv is not None:
        write_text(settings.csv, figures_csv(results, model))
    if settings.pairs_out is not None:
        lines = pair_lines(results, measured.tasks, settings.pairs_text)
        write_text(settings.pairs_out, PAIR_FORMATS[settings.pairs_out.suffix](lines))
