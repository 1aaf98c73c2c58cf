"""Settings of a training run: one object, set by a YAML file, by flags or in Python.

Setting `a.b` is the flag `--a.b`, or `b` under `a` in YAML. The text below a field is its `--help` text. The resolved
settings are saved with the run and start the same run again. `settings_io` reads and writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from angle_llm.objective_settings import FalseNegativeSettings as FalseNegativeSettings
from angle_llm.objective_settings import NestedSettings as NestedSettings
from angle_llm.objective_settings import ObjectiveSettings as ObjectiveSettings
from angle_llm.settings_io import (
    NonNegative,
    Positive,
    PositiveFloat,
    SettingsError,
    settings_class,
    settings_to_dict,
)

_MAX_WEIGHT = 1000


@settings_class
class DataSource:
    """One dataset and how its rows are read."""

    FLAGS: ClassVar[str] = "--data."
    """Start of the flags of these settings, for messages."""

    path: str = "starter:nli_triples.jsonl.gz"
    """A JSONL, JSON, CSV, TSV (each also .gz) or Parquet file, `starter:NAME` for a file of the package, a dataset
    folder, a BEIR folder with qrels/SPLIT.tsv, or a Hugging Face dataset id; only an id uses the network. FOLDER@NAME is
    the file FOLDER/NAME.*, or the split NAME of a BEIR folder; ID@SPLIT is a split of a dataset. A relative path is
    searched in the working directory, then in ANGLE_LLM_DATA. Several datasets with weights: stsb@train:2.0,my.jsonl; or
    `sets` in a YAML file."""
    format: str = "auto"
    """Meaning of a row: scored_pair, positive_pair, triple, group, nli_pairs, nli_triples.
    auto: detected from the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Pairs of FIELD COLUMN, such as `text1 question text2 answer`. Usual column names are recognised without this."""
    delimiter: str | None = None
    """Column separator of CSV and TSV files. None: tab for .tsv, detected for .csv (a comma, or one of ; tab |)."""
    encoding: str = "utf-8"
    """Character encoding of text files, such as utf-8 or cp1252."""
    split: str = "train"
    """Split of a hub dataset or a BEIR folder."""
    revision: str | None = None
    """Commit, tag or branch of a hub dataset."""
    name: str | None = None
    """Configuration of a hub dataset."""
    score_range: tuple[float, float] | None = None
    """The score that means *unrelated* and the score that means *same meaning*, such as 0 5; scores are rescaled to 0..1.
    A reversed range, such as 1 0, is for labels where a small number means similar. None: 0 1."""
    where: dict[str, str | bool | int | float] = field(default_factory=dict)
    """Pairs of COLUMN VALUE: only rows with these values are read."""
    limit: Positive | None = None
    """Use at most this many examples."""
    shuffle_seed: int | None = None
    """Shuffle the examples with this seed before the limit is applied. None: file order."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """raise: the first bad row stops the run with its file and line. skip: bad rows are skipped and counted."""
    max_bad_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """With skip: a larger share of bad rows stops the run."""


@settings_class
class MixedSet(DataSource):
    """One dataset of a mixture."""

    weight: Annotated[float, Gt(0), Le(_MAX_WEIGHT)] = 1.0
    """Occurrences of each example per epoch: 2 is twice, 0.5 every other epoch."""
    prompt: str | dict[str, str] | None = None
    """Prompt name or YAML file for the texts of this dataset, or {query: …, document: …}. None: the prompts of the
    run."""
    objective: dict[str, Any] = field(default_factory=dict)
    """Objective settings that differ for this dataset, such as {in_batch_weight: 0, cosine_weight: 1}. In a mixed
    batch, datasets with another objective or prompt are not used as negatives."""


@settings_class
class DataSettings(DataSource):
    """The training data: one dataset, or a mixture of several."""

    sets: list[MixedSet] = field(default_factory=list)
    """Datasets of a mixture, each with its own format, range, prompt, weight and objective. YAML only; a flag such as
    --data.sets.0.weight 2 changes single values."""
    temperature: PositiveFloat = 1.0
    """Share of each dataset in an epoch: proportional to weight · n^(1/temperature) for n examples, at the epoch length
    of temperature 1. A large temperature gives all datasets equal shares."""
    batches: Literal["mixed", "by_set"] = "mixed"
    """mixed: a batch holds examples of all datasets. by_set: each batch holds one dataset only."""

    def __post_init__(self) -> None:
        for item in fields(DataSource) if self.sets else ():
            value = getattr(self, item.name)
            if value != getattr(DataSource(), item.name):
                raise SettingsError(
                    f"data.sets and data.{item.name} ({value!r}) exclude each other. Set it per dataset "
                    f"(--data.sets.0.{item.name.replace('_', '-')}), or omit data.sets."
                )


@settings_class
class ModelSettings:
    """The base model and how texts are encoded."""

    path: str = "NousResearch/Llama-2-7b-hf"
    """A model folder (also of sentence-transformers, or a saved encoder: its training continues), a .gguf file, a hub id,
    or package:NAME/path/inside for a file in an installed Python package."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the base weights; adapter weights are always float32. auto: as stored. With bits: the dtype of
    computation. With lora.rank 0 the weights are float32, and bfloat16 is the dtype of products in training (autocast);
    auto means float32. Train in bfloat16 or float32: there is no loss scaling, and float16 loses small gradients."""
    bits: Literal[4, 8] | None = None
    """Quantise the linear layers of the base to 4 bits (NF4 with double quantisation: QLoRA) or 8 bits (LLM.int8()).
    Needs bitsandbytes: pip install 'angle_llm[quantization]'. None: not quantised."""
    prompt: str | dict[str, str] | None = None
    """Prompt name, or path of a prompt YAML file. Two prompts: `query NAME document NAME`, in YAML {query: …,
    document: …}; the first text of a pair is a query, the second a document. None: as saved with the model, else
    summarize_one_word for a causal model and plain for a bidirectional one."""
    pooling: str | None = None
    """Pooling: last, cls, mean, max, mean_sqrt_len, weightedmean, last-avg, last-max, cls-last-avg, first-last-avg. None:
    as saved with the model, else last for a causal model and mean for a bidirectional one."""
    max_length: Positive | None = None
    """Maximum tokens of a text, prompt and special tokens included. A longer text is cut at its end, the prompt never.
    None: as saved with the model (a folder of sentence-transformers too), else 512 or the number of positions of the model."""


@settings_class
class LoraSettings:
    """The LoRA adapter."""

    rank: NonNegative = 32
    """Rank of the update. 0: no adapter, all weights are trained. If model.path is a saved adapter, training continues it
    with its own lora settings; a setting that is neither the default nor the adapter's is refused."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout probability of adapter inputs."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the linear layers with an adapter; all-linear: every linear layer."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    dora: bool = False
    """Learn a magnitude per output of each layer (DoRA, arXiv 2402.09353)."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise SettingsError("lora.targets is empty. Name layers, or use all-linear.")


@settings_class
class OptimizerSettings:
    """AdamW and its learning rate schedule."""

    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Decoupled weight decay."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate after warm-up."""
    warmup: Annotated[float, Ge(0)] = 0.1
    """Below 1: share of the steps. 1 or more: number of steps."""
    max_gradient_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""

    def __post_init__(self) -> None:
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise SettingsError(f"optimizer.warmup: expected a share below 1 or a whole number, got {self.warmup}.")

    def warmup_steps(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps."""
        return math.ceil(self.warmup * steps) if self.warmup < 1 else int(self.warmup)


@settings_class
class EvaluationSettings:
    """Evaluation before, during and after training; the best model is kept."""

    tasks: list[str] = field(default_factory=list)
    """Held-out tasks: UTF-8 files of scored pairs (Spearman) or of questions and answers (nDCG@10, recall, MRR, MAP), BEIR
    folders, FOLDER@NAME (the file FOLDER/NAME.*, or qrels/NAME.tsv of a BEIR folder), or mteb:NAME, a task of MTEB. Empty:
    no evaluation."""
    columns: dict[str, str] = field(default_factory=dict)
    """Pairs of FIELD COLUMN, such as `text1 question text2 answer`. Usual column names are recognised without this. In a
    file that lacks a named column, only usual names are recognised."""
    corpus: str | None = None
    """A text file or table (UTF-8) with more candidates for questions and answers."""
    corpus_column: str | None = None
    """Column of the corpus that contains the text. None: `text`, `sentence`, or the only one."""
    every_steps: NonNegative = 0
    """Evaluate every this many optimizer steps; 0: at the end only."""
    best_by: str | None = None
    """Metric that selects the best model: TASK/METRIC as in metrics.jsonl, or METRIC of the first task. None: the
    first metric of the first task."""
    patience: Positive | None = None
    """Stop after this many evaluations without a new best one. None: train to the end."""

    def __post_init__(self) -> None:
        names = ("columns", "corpus", "corpus_column", "every_steps", "best_by", "patience")
        if (given := [name for name in names if getattr(self, name)]) and not self.tasks:
            raise SettingsError(f"evaluation.{given[0]} is set, but evaluation.tasks is not.")
        if self.corpus_column and not self.corpus:
            raise SettingsError("evaluation.corpus_column is set, but evaluation.corpus is not.")
        if self.patience and not self.every_steps:
            raise SettingsError("evaluation.patience needs evaluation.every_steps.")


@settings_class
class CheckpointSettings:
    """Checkpoints to resume from. They do not change what a run computes."""

    every_steps: NonNegative = 0
    """Write a checkpoint every this many optimizer steps and at the end; 0: only on SIGINT (exit code 130) or SIGTERM
    (143), which write one before the next step in any case."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""


BUDGET_SETTINGS = ("micro_batch_tokens", "graph_tokens", "activation_checkpointing")
"""Settings of memory use, with which a run can resume differently."""


@settings_class
class TrainSettings:
    """All settings of a training run."""

    COMMON_FLAGS: ClassVar[str] = (
        "Most runs set --model.path, --data.path, --data.format, --batch-size, --epochs, --optimizer.learning-rate, "
        "--lora.rank, --evaluation.tasks and --run-dir; the defaults of the other flags work."
    )

    run_dir: str = "runs/latest"
    """Output folder: settings.yaml, metrics.jsonl, tensorboard/, model/, result.json (of a finished run), checkpoints/,
    and interrupted/ (weights of a run that failed, removed when it is finished). A folder of another run, or of a
    finished one, is refused."""
    batch_size: Positive = 64
    """Examples of one contrastive batch: all other texts of the batch are negatives. Not limited by memory."""
    epochs: Positive = 1
    """Passes over the data."""
    max_steps: Positive | None = None
    """Stop after this many optimizer steps."""
    accumulation: Positive = 1
    """Batches whose gradients are averaged into one optimizer step."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 42
    """Seed of adapter initialisation, data order and dropout."""
    resume: str = "never"
    """auto: resume from the newest complete checkpoint in run_dir; start if there is none. never: start again and
    remove checkpoints. Otherwise the name or path of a checkpoint in run_dir."""
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Experiment trackers that get the numbers of metrics.jsonl; each must be installed. tensorboard writes into run_dir."""
    overwrite: bool = False
    """Remove model and checkpoints of a finished run in run_dir, and train again."""
    micro_batch_tokens: Positive | None = None
    """Maximum tokens of one forward pass, padding included, in training and evaluation. None in training: chosen at the
    start for the free memory of the device, at most 16384 (2048 on a CPU), and stored in checkpoints. None in
    evaluation: 16384 (2048 on a CPU)."""
    graph_tokens: NonNegative | None = None
    """Maximum computed tokens per process whose activations are kept for the backward pass. Accumulated batches are
    encoded together up to this number. A larger batch is encoded twice (gradient caching): the same gradient with less
    memory and about 50 % more time. None: chosen like micro_batch_tokens; at most 16384 on a CPU."""
    activation_checkpointing: Literal["auto", "always", "never"] = "auto"
    """Keep only the inputs of layers in the forward pass and recompute the layers in the backward pass: the same
    gradient with less memory and about 50 % more time. Useful for long texts; for large batches, graph_tokens has the
    same cost. auto: used if the longest text is forecast not to fit otherwise, if a GPU would compute a large batch in
    micro-batches below 1024 tokens, or if a single text runs out of memory."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    nested: NestedSettings = field(default_factory=NestedSettings)

    def __post_init__(self) -> None:
        if self.lora.rank == 0 and self.model.bits is not None:
            raise SettingsError(
                f"lora.rank 0 trains all weights, and weights quantised to {self.model.bits} bits have no gradients. Set "
                "lora.rank above 0, or model.bits to None."
            )
        if self.lora.rank == 0 and self.model.dtype == "float16":
            raise SettingsError(
                "lora.rank 0 trains all weights, and float16 loses small gradients. Set model.dtype to bfloat16 or float32, or "
                "lora.rank above 0."
            )
        if not self.resume:
            raise SettingsError("resume is empty. Expected auto, never, or a checkpoint.")

    @property
    def run_path(self) -> Path:
        """The run directory as a path, `~` expanded."""
        return Path(self.run_dir).expanduser()

    @property
    def loaded_model(self) -> ModelSettings:
        """The model with the dtype in which it is loaded: float32 if all weights are trained, because other dtypes round
        small updates to zero."""
        return self.model if self.lora.rank else replace(self.model, dtype="float32")

    @property
    def autocasts(self) -> bool:
        """Whether training computes products of float32 weights in bfloat16."""
        return self.lora.rank == 0 and self.model.dtype == "bfloat16"

    @property
    def identity(self) -> TrainSettings:
        """Settings that affect the result; used to recognise the same run. Token budgets change only the order of
        additions and dropout masks: a run can resume with others."""
        unused = {name: getattr(TrainSettings, name) for name in BUDGET_SETTINGS}
        unused |= {"checkpoint": CheckpointSettings(), "report_to": []}
        return replace(self, run_dir="", resume="never", overwrite=False, **unused)

    def fingerprint(self) -> str:
        """Return a hash of `identity`: equal for settings that compute the same; stored with checkpoints."""
        unused = (*BUDGET_SETTINGS, "report_to")
        values = {name: value for name, value in settings_to_dict(self.identity).items() if name not in unused}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
