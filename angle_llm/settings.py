"""The settings of a run: one object, written by a YAML file, the command line, or Python.

Each field explains itself in the line below it; the same line is its `--help` text. An unknown key is an error that names
the nearest known one. The resolved settings are saved with the run and start the same run again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

import yaml

from angle_llm.errors import unknown


class SettingsError(ValueError):
    """Settings that cannot be used, with what to change."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise SettingsError(message)


class Checked:
    """Makes pydantic refuse unknown keys when it reads a settings dataclass."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True)
class DataSource(Checked):
    """Where training rows come from and how they are read."""

    path: str = "starter:nli_triples.jsonl.gz"
    """A JSONL, JSON, CSV, TSV (each also .gz) or Parquet file, `starter:NAME` for a file that comes with the package, a
    data set folder, or a Hugging Face data set id. Only an id reaches the network."""
    format: str = "auto"
    """What a row means: scored_pair, positive_pair, triple, nli_pairs, nli_triples; auto tells by the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our field names to the file's column names, where they differ and are not recognised."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set."""
    name: str | None = None
    """Configuration of a hub data set."""
    score_range: tuple[float, float] | None = None
    """Score of two texts that have nothing in common and of two that mean the same; scores are rescaled to 0..1. A reversed
    range, such as 1 0, is for labels whose small numbers mean alike."""
    where: dict[str, str | int | float] = field(default_factory=dict)
    """Keep only the rows whose columns equal these values."""
    limit: int | None = None
    """Use at most this many examples."""
    shuffle_seed: int | None = None
    """Shuffle the examples with this seed before the limit is taken; none keeps the file's order."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """raise: the first bad row stops the run, with its file and line. skip: bad rows are left out and counted."""
    max_bad_ratio: float = 0.1
    """With skip: a larger share of bad rows than this stops the run all the same."""


@dataclass(frozen=True)
class ModelSettings(Checked):
    """The backbone and how sentences are put through it."""

    path: str = "NousResearch/Llama-2-7b-hf"
    """A model folder, a .gguf file, a hub id, or package:NAME/path/inside for a file in an installed Python package."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the base weights; a trained adapter is float32 regardless. auto: as stored. With bits it is the dtype that
    quantised layers compute in and all else is held in."""
    bits: Literal[4, 8] | None = None
    """Hold the linear layers of the base in 4 bits (NF4 with double quantisation: QLoRA) or 8 (LLM.int8()), and train an
    adapter on them. Needs bitsandbytes: pip install 'angle_llm[quantization]'. None: not quantised."""
    prompt: str | None = None
    """A prompt's name, or the path of a prompt YAML. None: as saved with the model, else summarize_one_word for a causal
    model and plain for a bidirectional one."""
    pooling: str | None = None
    """Which states make the embedding: last, cls, mean, last-avg, last-max, cls-last-avg, first-last-avg. None: as saved
    with the model, else last for a causal model and mean for a bidirectional one."""
    max_length: int | None = None
    """Tokens of a worded sentence, prompt and special tokens included; longer texts lose their end, prompts nothing. None:
    as saved with the model, else 512 or what the model has positions for."""

    def __post_init__(self) -> None:
        positive = self.max_length is None or self.max_length > 0
        _require(positive, f"model.max_length must be positive, got {self.max_length}.")


@dataclass(frozen=True)
class LoraSettings(Checked):
    """The adapter."""

    rank: int = 32
    """Rank of the update. 0: no adapter, all weights are trained."""
    alpha: float = 32
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Probability of dropping an adapter input."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the linear layers to adapt; all-linear takes every one."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    dora: bool = False
    """Learn a magnitude per column beside the direction (DoRA, arXiv 2402.09353)."""

    def __post_init__(self) -> None:
        _require(self.rank >= 0, f"lora.rank must be 0 or more, got {self.rank}.")
        _require(0 < self.alpha < math.inf, f"lora.alpha must be a positive number, got {self.alpha}.")
        _require(0 <= self.dropout < 1, f"lora.dropout is a probability below 1, got {self.dropout}.")
        _require(bool(self.targets), "lora.targets is empty. Name layers, or use all-linear.")


@dataclass(frozen=True)
class ObjectiveSettings(Checked):
    """The loss: a weighted sum of terms. See `angle_llm.objectives` for their formulas. The defaults follow from the
    measurements of docs/LOG.md (binary NLI: the in-batch term alone)."""

    cosine_weight: float = 0.0
    """Weight of the cosine ranking term (CoSENT)."""
    in_batch_weight: float = 1.0
    """Weight of the in-batch contrastive term."""
    angle_weight: float = 0.0
    """Weight of the angle ranking term."""
    regression_weight: float = 0.0
    """Weight of the regression term: squared differences of cosine and score (SBERT). For graded pairs."""
    cosine_temperature: float = 0.05
    """Divides cosine differences."""
    in_batch_temperature: float = 0.05
    """Divides cosines of the in-batch term."""
    angle_temperature: float = 0.05
    """Divides angle differences (the published runs: 1.0)."""
    angle_form: str = "phase"
    """phase, reference or paper."""
    contrastive_form: str = "symmetric"
    """forward: left texts against all right texts. symmetric: every text with a positive against all texts."""
    positive_above: float = 0.5
    """A pair with a score (0..1) above this is a positive of the in-batch term."""


@dataclass(frozen=True)
class NestedSettings(Checked):
    """Depths and widths at which the loss is taken too, so that the trained encoder may be cut to them (Matryoshka). The
    whole vector after all layers is always among them; every depth goes with every width."""

    dimensions: list[int] = field(default_factory=list)
    """The first so many dimensions of a vector, in ascending order, such as 64 128 256."""
    layers: list[int] = field(default_factory=list)
    """The first so many layers, in ascending order, such as 10 20."""
    dimension_weights: list[float] = field(default_factory=list)
    """One for each of the dimensions, and last that of the full width; only their proportions count. Empty: equal."""
    layer_weights: list[float] = field(default_factory=list)
    """One for each of the layers, and last that of all layers; only their proportions count. Empty: equal."""

    def __post_init__(self) -> None:
        for name, values, weights in (
            ("dimensions", self.dimensions, self.dimension_weights),
            ("layers", self.layers, self.layer_weights),
        ):
            ascending = values == sorted(set(values)) and all(value >= 1 for value in values)
            _require(ascending, f"nested.{name} must ascend from 1 or more, each number once; got {values}.")
            which = f"nested.{name.removesuffix('s')}_weights"
            right = not weights or len(weights) == len(values) + 1
            _require(right, f"{which} needs {len(values) + 1} numbers, the last for all {name}; got {weights}.")
            sound = all(0 <= weight < math.inf for weight in weights) and (not weights or sum(weights) > 0)
            _require(sound, f"{which} must be finite numbers, 0 or more, and not all 0; got {weights}.")

    def weight(self, layer: int | None, dimension: int | None) -> float:
        """Of the loss after so many layers at so many dimensions, None being all; those of all such losses sum to 1."""
        by_layer = _share(self.layers, self.layer_weights, layer)
        return by_layer * _share(self.dimensions, self.dimension_weights, dimension)


def _share(values: list[int], weights: list[float], value: int | None) -> float:
    weights = weights or [1.0] * (len(values) + 1)
    return weights[len(values) if value is None else values.index(value)] / sum(weights)


@dataclass(frozen=True)
class OptimizerSettings(Checked):
    """AdamW and its schedule."""

    learning_rate: float = 1e-4
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """What the learning rate does after warm-up."""
    warmup: float = 0.1
    """Below 1: share of the run's steps. 1 or more: number of steps."""
    max_gradient_norm: float = 1.0
    """Gradients are clipped to this norm."""

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, f"optimizer.learning_rate must be positive, got {self.learning_rate}.")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay must be 0 or more, got {self.weight_decay}.")
        whole = 0 <= self.warmup < 1 or self.warmup == int(self.warmup) >= 1
        _require(whole, f"optimizer.warmup is a share below 1 or a whole number of steps, got {self.warmup}.")
        _require(
            self.max_gradient_norm > 0, f"optimizer.max_gradient_norm must be positive, got {self.max_gradient_norm}."
        )

    def warmup_steps(self, steps: int) -> int:
        """Warm-up in steps of a run of so many."""
        return math.ceil(self.warmup * steps) if self.warmup < 1 else int(self.warmup)


@dataclass(frozen=True)
class EvaluationSettings(Checked):
    """What is measured while training; the best model by Spearman is kept."""

    pairs: str | None = None
    """A TSV of graded pairs (sentence1, sentence2, score), or `starter:graded_pairs.tsv`. None: no evaluation."""
    every_steps: int = 0
    """Evaluate each time this many optimizer steps are done; 0: at the end only."""

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, f"evaluation.every_steps must be 0 or more, got {self.every_steps}.")
        named = self.pairs is not None or self.every_steps == 0
        _require(
            named, f"evaluation.every_steps is {self.every_steps}, but evaluation.pairs names nothing to measure on."
        )


@dataclass(frozen=True)
class CheckpointSettings(Checked):
    """What a run can go on from after it was killed. With or without them it computes the same."""

    every_steps: int = 0
    """Write a checkpoint each time this many optimizer steps are done, and at the end; 0: only when a signal ends the
    run. SIGINT and SIGTERM write one before the next step in any case, and the exit code is 130 or 143."""
    keep: int = 2
    """Checkpoints that are kept, the newest ones."""

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, f"checkpoint.every_steps must be 0 or more, got {self.every_steps}.")
        _require(self.keep >= 1, f"checkpoint.keep must be 1 or more, got {self.keep}.")


@dataclass(frozen=True)
class TrainSettings(Checked):
    """Everything that decides what a training run computes, where it is written, and from where it goes on."""

    run_dir: str = "runs/latest"
    """Where the run is written: settings.yaml, metrics.jsonl, tensorboard/, model/, checkpoints/."""
    resume: str = "never"
    """auto: go on from the newest whole checkpoint of the run directory, or start if there is none. never: start over, and
    remove its checkpoints. Otherwise the checkpoint of the run directory to go on from, as its path or name."""
    seed: int = 42
    """Decides the adapter's start, the order of the data and dropout."""
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: DataSource = field(default_factory=DataSource)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    nested: NestedSettings = field(default_factory=NestedSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    batch_size: int = 64
    """Examples of one contrastive batch: each example's texts are negatives of all others. Memory does not limit it."""
    accumulation: int = 1
    """Batches whose gradients are averaged into one optimizer step."""
    epochs: int = 1
    """Passes over the data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever the epochs."""
    micro_batch_tokens: int = 8192
    """Tokens that go through the model at once, padding included, in training and in encoding."""
    graph_tokens: int = 16384
    """Computed tokens of a batch up to which activations are kept for the backward pass; a larger batch is encoded twice
    (gradient caching): the same gradient in less memory and half as much time again."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "epochs", "micro_batch_tokens"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} must be 1 or more, got {value}.")
        _require(0 <= self.seed < 2**32, f"seed must be in 0 .. 2**32 - 1, got {self.seed}.")
        _require(
            self.lora.rank > 0 or self.model.bits is None,
            f"lora.rank 0 trains all weights, and weights held in {self.model.bits} bits have no gradients. Set lora.rank "
            "above 0 to train an adapter on them, or leave model.bits away.",
        )
        trainable = self.lora.rank > 0 or self.model.dtype in ("auto", "float32")
        _require(
            trainable,
            f"lora.rank 0 trains all weights, and in {self.model.dtype} small updates round to nothing. Set model.dtype to "
            "float32, or lora.rank above 0.",
        )
        _require(bool(self.resume), "resume is empty. It is auto, never, or a checkpoint.")
        _require(self.graph_tokens >= 0, f"graph_tokens must be 0 or more, got {self.graph_tokens}.")
        _require(self.max_steps is None or self.max_steps >= 1, f"max_steps must be 1 or more, got {self.max_steps}.")

    @property
    def run_path(self) -> Path:
        """The run directory as a path, `~` expanded."""
        return Path(self.run_dir).expanduser()

    @property
    def decisive(self) -> TrainSettings:
        """These settings without what decides nothing of what a run computes: its place and its checkpoints."""
        return replace(self, run_dir="", resume="never", checkpoint=CheckpointSettings())

    def fingerprint(self) -> str:
        """Equal for settings that compute the same; a checkpoint is known by it."""
        # Through YAML's door and back, so that 8 and 8.0 are one value.
        same = settings_from_dict(TrainSettings, settings_to_dict(self.decisive), where="fingerprint")
        values = settings_to_dict(same)
        # What came later is left out while it does nothing, so that older checkpoints are still known.
        del values["data"]["max_bad_ratio"]  # it stops a run, and changes none
        if same.nested == NestedSettings():
            del values["nested"]
        if not same.objective.regression_weight:
            del values["objective"]["regression_weight"]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


Settings = TypeVar("Settings")


def settings_from_dict(kind: type[Settings], values: object, where: str) -> Settings:
    """Builds settings from plain values; `where` names their origin in errors.

    Raises:
        SettingsError: naming the key, what it needs, what came, and for an unknown key the nearest known one.
    """
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(values, dict):
        raise SettingsError(f"{where}: settings are a mapping of names to values, got {type(values).__name__}.")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        lines = [f"{where}: {_explain(kind, problem)}" for problem in error.errors()]
        raise SettingsError("\n".join(lines)) from error


def _explain(kind: type, problem: Any) -> str:
    path = [str(step) for step in problem["loc"]]
    if problem["type"] == "unexpected_keyword_argument":
        owner: Any = kind
        for step in path[:-1]:
            owner = get_type_hints(owner)[step]
        return f"{unknown('setting', path[-1], _names(owner))} (in {'.'.join(path[:-1]) or 'the top level'})"
    if problem["type"] == "value_error":  # one of ours: it names the field and what came
        return str(problem["ctx"]["error"])
    return f"{'.'.join(path) or 'settings'}: {problem['msg']}, got {problem['input']!r}."


def _names(kind: Any) -> list[str]:
    return [item.name for item in fields(kind)] if is_dataclass(kind) else []


def load_settings(kind: type[Settings], path: str | Path, defaults: Settings | None = None) -> Settings:
    """Reads a YAML file; what it leaves out comes from `defaults`, key by key.

    Raises:
        SettingsError: for a missing or malformed file or a setting that does not fit.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise SettingsError(f"no settings file at {path}. Give the path of a YAML file.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    if defaults is not None and isinstance(values, dict):
        values = merged_settings(settings_to_dict(defaults), values)
    return settings_from_dict(kind, values, where=str(path))


def merged_settings(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested plain values with those of `over` put over them, key by key; `columns` and `where` are replaced whole."""
    result = dict(base)
    for key, value in over.items():
        both_nested = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in {"columns", "where"}
        result[key] = merged_settings(base[key], value) if both_nested else value
    return result


def settings_to_dict(settings: Any) -> dict[str, Any]:
    """Plain values that YAML and JSON can hold."""
    return {key: _plain(value) for key, value in asdict(settings).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def save_settings(settings: Any, path: Path) -> None:
    """Writes settings as YAML, whole or not at all, even if the power fails."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        yaml.safe_dump(settings_to_dict(settings), file, sort_keys=False, allow_unicode=True)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def parse_settings(defaults: Settings, arguments: Sequence[str] | None = None, *, description: str = "") -> Settings:
    """Settings from a command line: `--config FILE` first, then single fields such as `--lora.rank 16`.

    Without arguments the command line of the process is read. `--help` lists every field with its default.
    """
    import sys

    import tyro

    rest = list(sys.argv[1:] if arguments is None else arguments)
    config: str | None = None
    for position, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == "--config":
            config = value if equals else (rest[position + 1] if position + 1 < len(rest) else "")
            del rest[position : position + (1 if equals else 2)]
            break
    kind = type(defaults)
    if config is not None:
        defaults = load_settings(kind, config, defaults)
    description = f"{description}\n\n--config FILE reads a settings YAML first; the options below override it.".strip()
    chosen: Settings = tyro.cli(kind, default=defaults, args=rest, description=description)
    return settings_from_dict(kind, settings_to_dict(chosen), where="command line")
