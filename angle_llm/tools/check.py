"""`angle-llm data check`: report problems of data files before training, and recommend a training command."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from angle_llm.settings.commands import CheckSettings
from angle_llm.settings.parsing import check_new_folder, flags_of
from angle_llm.settings.train import DataSource, ModelSettings

if TYPE_CHECKING:
    from angle_llm.tools.quality import FileReport, TokenCounter


RECOMMENDED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("recommended.yaml").read_text(encoding="utf-8"))
"""Content of recommended.yaml: training settings by kind of model, and settings of the objective by data format."""
_FEW_ROWS = 640
"""Below this number of rows, small decoders get batches of 16 and three epochs: batches of 64 give fewer than ten steps."""
_MEDIUM, _LARGE = 1_000_000_000, 4_000_000_000
"""Numbers of weights above which a decoder gets the settings `medium_decoder` and `large_decoder`."""


@dataclass(frozen=True)
class CheckResult:
    """Reports of checked data files, and what they were compared with."""

    model: str
    """A line about the model whose tokens are counted, or the reason why tokens are not counted."""
    against: list[str]
    """Names of the evaluation sets that the files were compared with."""
    against_skipped: list[str]
    """Skipped files, splits and rows, with the reason."""
    fixed: list[dict[str, Any]]
    """Path and row counts of the cleaned copies."""
    files: list[FileReport]

    @property
    def trouble(self) -> int:
        """Number of files with a problem that must be fixed before training."""
        return sum(report.trouble for report in self.files)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary of JSON values."""
        files = [{**asdict(report), "trouble": report.trouble} for report in self.files]
        return {**asdict(self), "trouble": self.trouble > 0, "files": files}

    def text(self) -> str:
        """Return the result as lines of text; the verdict is last."""
        from angle_llm.data.keys import printable

        lines = [self.model]
        if self.against:
            lines.append(f"compared with evaluation sets: {', '.join(self.against)}")
            lines.append(f"  skipped: {', '.join(self.against_skipped) or 'nothing'}")
        for report in self.files:
            lines += [f"\n{report.path}", *(f"  {name:12}{value}" for name, value in report.lines())]
        for copy in self.fixed:
            lines.append(
                f"\n{copy['path']}: {copy['rows_in']:,} rows = {copy['kept']:,} kept in {copy['cleaned']} + "
                f"{copy['quarantined']:,} removed, with reasons in {copy['quarantine']}"
            )
        verdict = f"trouble in {self.trouble} of {len(self.files)} files" if self.trouble else "no trouble"
        if not self.fixed and any(report.rejected or report.removed for report in self.files):
            verdict += "; --fix FOLDER writes copies without these rows"
        return printable("\n".join([*lines, f"\n{verdict}"]))


def check_main(settings: CheckSettings) -> None:
    """Check data files and print a report per file; exit with code 1 if a problem must be fixed first, else 0."""
    result = check_data(settings)
    print(json.dumps(result.to_dict(), indent=2) if settings.json else result.text())
    sys.exit(1 if result.trouble else 0)


def check_data(settings: CheckSettings) -> CheckResult:
    """Check data files, and write cleaned copies if they are requested.

    Raises:
        DataError, FileNotFoundError, ArtifactError, SettingsError, ValueError: if an evaluation set, the model or the
            `--fix` folder cannot be used. Errors of a data file are in its report instead.
    """
    from angle_llm.data.leakage import read_evaluation_sets
    from angle_llm.io import write_folder
    from angle_llm.tools.quality import check_files, open_tokens, write_fixed

    # Reports of all files.
    if settings.fix is not None:
        check_new_folder("--fix", settings.fix)
    sets, skipped = read_evaluation_sets(settings.against, settings.columns) if settings.against else ([], [])
    model = ModelSettings(path=settings.model, prompt=settings.prompt, max_length=settings.max_length)
    token_counter = None if settings.model == "none" else open_tokens(model)
    sources = [settings.source_of(path) for path in settings.files]
    reports = check_files(sources, token_counter, sets)
    # Cleaned copies of the files that can be read.
    readable = [(source, report) for source, report in zip(sources, reports, strict=True) if report.format is not None]
    fixed: list[dict[str, Any]] = []
    if settings.fix is not None and readable:
        out = settings.fix.expanduser()
        write_folder(out, lambda folder: fixed.extend(write_fixed(readable, folder, out)))
    # Training commands, with the cleaned copies. Training reads UTF-8 only, and no single texts.
    model_kind = "" if token_counter is None else _model_kind(token_counter)
    paths = [copy["cleaned"] for copy in fixed] or [source.path for source, _ in readable]
    for path, (source, report) in zip(paths, readable, strict=True):
        if report.can_train and report.format != "text" and (fixed or source.encoding == DataSource().encoding):
            report.train = _train_flags(model, token_counter, model_kind, replace(source, path=path), report)
    model_line = "no --model: tokens are not counted, and the training command lacks the settings of a model"
    if token_counter is not None:
        encoder = token_counter.encoder
        model_line = (
            f"tokens of {model.path}: {encoder.prompts}, pooling {encoder.pooling}, max_length {encoder.max_length}"
        )
    return CheckResult(model_line, [tested.name for tested in sets], skipped, fixed, files=reports)


def _model_kind(token_counter: TokenCounter) -> str:
    """Return the key of recommended.yaml for a model."""
    import torch

    from angle_llm.model.meta_model import meta_backbone

    if not token_counter.encoder.model.options.causal and token_counter.encoder.attention != "bidirectional":
        return "small_encoder"
    weights = sum(parameter.numel() for parameter in meta_backbone(token_counter.config, torch.float32).parameters())
    return "large_decoder" if weights > _LARGE else "medium_decoder" if weights > _MEDIUM else "small_decoder"


def _train_flags(
    model: ModelSettings, token_counter: TokenCounter | None, model_kind: str, source: DataSource, report: FileReport
) -> str:
    """Return the flags of the recommended `angle-llm train` command for a data file.

    `model_kind` is the key of recommended.yaml for the model. Without `token_counter`, the model is the placeholder MODEL.
    """
    settings: dict[str, Any] = RECOMMENDED.get(model_kind, {})
    if report.rows_used < _FEW_ROWS and model_kind == "small_decoder":
        settings = {**settings, "batch_size": 16, "epochs": 3}
    # Settings of the objective. Pairs with one label are not graded: the default objective learns them as positives.
    objective = RECOMMENDED["objectives"].get(report.format, {})
    if report.format == "scored_pair" and len(report.scores) == 1:
        objective = {}
    elif report.format == "scored_pair" and model_kind == "small_decoder":
        settings = {**settings, "optimizer": {"learning_rate": RECOMMENDED["graded_rate"]}}
    # Settings of the model.
    model_flags: dict[str, Any] = {"path": "MODEL"}
    if token_counter is not None:
        if token_counter.source.adapter is not None:  # training continues with the rank and bits of the adapter
            card = token_counter.source.card
            settings = {**settings, "lora": {}, "model": {"bits": None if card is None else card.bits}}
        model_flags = {"path": model.path, **settings.get("model", {})}
        model_flags |= {"prompt": model.prompt, "pooling": model.pooling, "max_length": model.max_length}
    # Settings of the data: the file is read exactly as by this check.
    data = {
        "path": source.path,
        "format": None if source.format == DataSource.format else source.format,
        "columns": source.columns,
        "score_range": source.score_range,
        "where": source.where,
    }
    settings = {**settings, "model": model_flags, "data": data, "objective": objective}
    first = [name for name in ("model", "lora", "optimizer", "data", "objective") if name in settings]
    return shlex.join(flags_of({name: settings[name] for name in [*first, *settings]}))
