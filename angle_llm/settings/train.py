"""Settings of a training run, set by a YAML file, by flags or in Python.

Setting `a.b` is the flag `--a.b`, or `b` under `a` in YAML. The text below a field is its `--help` text. A run saves
its resolved settings, which start the same run again. `settings.parsing` reads and writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from typing_extensions import Self

from angle_llm.objective import FalseNegativeFields, ObjectiveFields
from angle_llm.settings.parsing import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    SettingsError,
    settings_class,
    settings_to_dict,
)

MAX_WEIGHT = 1000
"""Largest weight of a dataset in a mixture."""


@settings_class
class DataSource:
    """A dataset, and how its rows are read."""

    FLAGS: ClassVar[str] = "--data."
    """Prefix of the flags of these settings, for error messages."""

    path: str = "starter:nli_triples.jsonl.gz"
    """A JSONL, JSON, CSV or TSV file in UTF-8 (also .gz), a Parquet file, `starter:NAME` for a file of the package, a
    dataset folder, a BEIR folder with qrels/SPLIT.tsv, or a Hugging Face dataset id. Only an id uses the network.
    FOLDER@NAME is the file FOLDER/NAME.*, or the split NAME of a BEIR folder. ID@SPLIT is a split of a dataset
    (default: train), ID:NAME@SPLIT a split of its configuration NAME. A relative path is searched in the working
    directory, then in ANGLE_LLM_DATA. Several datasets with weights: stsb@train:2.0,my.jsonl, or `sets` in a YAML
    file."""
    format: str = "auto"
    """Format of the rows: scored_pair, positive_pair, triple, group, nli_pairs, nli_triples, labelled_text; text for
    pretraining. auto: detected from the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Pairs of FIELD COLUMN, such as `text1 question text2 answer`. Usual column names are recognised without this."""
    score_range: tuple[float, float] | None = None
    """The score that means *unrelated* and the score that means *same meaning*, such as 0 5; scores are rescaled to
    0..1. A reversed range, such as 1 0, is for labels where a small number means similar. None: 0 1."""
    where: dict[str, str | bool | int | float] = field(default_factory=dict)
    """Pairs of COLUMN VALUE. Only rows with these values are read."""
    limit: Positive | None = None
    """Maximum number of examples of the dataset."""
    shuffle_seed: int | None = None
    """Seed that shuffles the examples before the limit is applied. None: file order."""

    @property
    def encoding(self) -> str:
        """Character encoding of text files."""
        return "utf-8"


@settings_class
class MixedSet(DataSource):
    """One dataset of a training mixture of several datasets."""

    weight: Annotated[float, Gt(0), Le(MAX_WEIGHT)] = 1.0
    """How often an example of this dataset occurs per epoch: 2 is twice, 0.5 is every second epoch."""
    prompt: str | dict[str, str] | None = None
    """Prompt name or YAML file for the texts of this dataset, or {query: …, document: …}. None: the prompts of the
    run."""
    objective: dict[str, Any] = field(default_factory=dict)
    """Objective (loss) settings that differ for this dataset, such as {in_batch_weight: 0, cosine_weight: 1}. In a
    mixed batch, texts of datasets with different objectives or prompts are not negatives of each other."""


@settings_class
class DataSettings(DataSource):
    """The training data: a dataset, or a mixture of datasets."""

    sets: list[MixedSet] = field(default_factory=list)
    """Datasets of a training mixture, each with its format, score range, prompt, weight and objective. YAML only; a
    flag such as --data.sets.0.weight 2 changes single values."""
    batches: Literal["mixed", "by_set"] = "mixed"
    """mixed: a batch has examples of all datasets. by_set: a batch has examples of a single dataset."""

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
    """The base model, and how it encodes texts."""

    path: str = ""
    """Required. A model folder (plain, of sentence-transformers, or a saved encoder, whose training continues), a .gguf file, a
    hub id (ID, or ID@REVISION), or package:NAME/path/inside for a file in an installed Python package."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the base weights; adapter weights are always float32. auto: as stored. With bits: the dtype of
    computation. With lora.rank 0, the weights are float32, bfloat16 is the autocast dtype of training, and auto means
    float32. A GPU that only emulates bfloat16 (T4, V100) trains in float16 instead, with lora.rank 0 or ZeRO in float32. In
    float16, gradients are scaled (not with ZeRO), and a step in which they overflow changes no weight."""
    bits: Literal[4, 8, "fp8"] | None = None
    """Quantise the linear layers of the base to 4 bits (NF4 with double quantisation: QLoRA) or 8 bits (LLM.int8()),
    which needs bitsandbytes: pip install 'angle_llm[quantization]'. fp8: products in FP8 on a GPU that has it (L4, L40S,
    RTX 40, H100 and later), for speed; a CPU computes the same numbers. None: not quantised."""
    prompt: str | dict[str, str] | None = None
    """Prompt name, or path of a prompt YAML file. Two prompts: `query NAME document NAME`, in YAML {query: …,
    document: …}; the first text of a pair is a query, the second a document. None: as saved with the model, else
    summarize_one_word for a causal model and plain for a bidirectional one."""
    pooling: str | None = None
    """Pooling: last, cls, mean, max, mean_sqrt_len, weightedmean, last-avg, last-max, cls-last-avg, first-last-avg.
    None: as saved with the model, else last for a causal model and mean for a bidirectional one."""
    attention: Literal["bidirectional"] | None = None
    """bidirectional: tokens of a decoder-only model attend to later tokens too, as in LLM2Vec; the defaults are then
    prompt plain and pooling mean. None: as saved with the model, else as the architecture."""
    max_length: Positive | None = None
    """Maximum tokens of a text, with prompt and special tokens. A longer text is cut at its end; the prompt is never
    cut. None: as saved with the model (also by sentence-transformers), else 512 or the number of positions of the
    model."""


@settings_class
class FalseNegativeSettings(FalseNegativeFields):
    """Exclude in-batch negatives that are too similar to the anchor. Disabled unless margin or ratio is set."""

    PREFIX: ClassVar[str] = "objective."

    guide: str | None = None
    """An encoder whose cosines decide which negatives are skipped: a folder, a hub id (also ID@REVISION), or
    package:NAME/path. Its vectors of the training texts are computed once and stored in the run directory. None: the
    model in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, is_set in (("scope", self.scope != "in_batch"), ("guide", self.guide is not None)):
            if is_set and not self.is_on:
                raise SettingsError(
                    f"objective.false_negatives.{name}: expected a margin or a ratio too, such as margin 0."
                )

    @property
    def is_on(self) -> bool:
        """Whether in-batch negatives that are too similar to the anchor are skipped: margin or ratio is set."""
        return self.margin is not None or self.ratio is not None


@settings_class
class ObjectiveSettings(ObjectiveFields):
    """The training loss: a weighted sum of terms (formulas in `angle_llm.losses`, measurements in docs/results.md)."""

    PREFIX: ClassVar[str] = "objective."

    false_negatives: FalseNegativeSettings = field(default_factory=FalseNegativeSettings)
    teacher: str | None = None
    """A teacher encoder whose vectors, or cosines, the model learns to imitate: a folder, a hub id (also ID@REVISION),
    or package:NAME/path. Its vectors of the training texts are computed once and stored in the run directory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("teacher_vector_weight", "teacher_similarity_weight"):
            if getattr(self, name) and self.teacher is None:
                flag = name.replace("_", "-")
                raise SettingsError(
                    f"--objective.{flag}: expected --objective.teacher too, got none. Set it to a model."
                )


@settings_class
class NestedSettings:
    """Layers and embedding dimensions at which the loss is computed too, so that the encoder can be truncated
    (Matryoshka). Every number of layers is combined with every number of dimensions. All layers and all dimensions are
    always included; the terms have equal weights."""

    dimensions: list[int] = field(default_factory=list)
    """Numbers of leading embedding dimensions at which the loss is computed too, ascending, such as 64 128 256."""
    layers: list[int] = field(default_factory=list)
    """Numbers of leading layers after which the loss is computed too, ascending, such as 10 20."""

    def __post_init__(self) -> None:
        for name, values in (("dimensions", self.dimensions), ("layers", self.layers)):
            if values != sorted(set(values)) or any(value < 1 for value in values):
                raise SettingsError(f"nested.{name}: expected ascending numbers of 1 or more, got {values}.")


@settings_class
class LoraSettings:
    """The LoRA adapter."""

    rank: NonNegative = 32
    """Rank of the LoRA matrices. 0: no adapter, all weights are trained. If model.path is a saved adapter, training
    continues with the settings of that adapter, and a different setting is refused unless it is the default."""
    alpha: PositiveFloat = 32.0
    """The LoRA update of a weight is scaled by alpha / rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout probability of the inputs of the LoRA adapter."""
    targets: Annotated[list[str], MinLen(1)] = field(default_factory=lambda: ["all-linear"])
    """Names of the linear layers that get an adapter. all-linear: every linear layer."""
    train_dense: bool = False
    """Train the Dense modules of a sentence-transformers model (such as EmbeddingGemma) with the adapter. False: they are
    frozen. With lora.rank 0 they are always trained."""


@settings_class
class OptimizerSettings:
    """AdamW, and its learning rate by step."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw: AdamW of torch, fused on a GPU. adamw_8bit: AdamW of bitsandbytes with moments of 8 bits, which need a quarter
    of the memory; only without ZeRO. Needs pip install 'angle_llm[quantization]'."""
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate."""
    schedule: Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] = "linear"
    """Learning rate after the warm-up, as in transformers. linear and cosine fall to about 0 at the last step. constant
    has no warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    warmup: NonNegativeFloat = 0.1
    """Length of the learning-rate warm-up. Below 1: fraction of all steps. 1 or more: number of steps."""
    max_gradient_norm: PositiveFloat = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise SettingsError(
                f"optimizer.warmup: expected a fraction below 1 or a whole number of steps, got {self.warmup}."
            )

    def warmup_steps(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps."""
        return math.ceil(self.warmup * steps) if self.warmup < 1 else int(self.warmup)


@settings_class
class EvaluationSettings:
    """Evaluation before, during and after training, which selects the best model."""

    tasks: list[str] = field(default_factory=list)
    """Held-out tasks: UTF-8 files of scored pairs (Spearman), of questions and answers (nDCG@10, recall, MRR, MAP) or of
    texts with a class (accuracy, 5NN, MAP), BEIR folders, FOLDER@NAME (the file FOLDER/NAME.*, or qrels/NAME.tsv of a
    BEIR folder), or mteb:NAME, a task of MTEB. The first metric of the first task selects the best model. Empty: no
    evaluation."""
    columns: dict[str, str] = field(default_factory=dict)
    """Pairs of FIELD COLUMN, such as `text1 question text2 answer`. Usual column names are recognised without this. In
    a file without the named columns, only usual names are recognised."""
    format: str = "auto"
    """Format of the files, such as positive_pair for answers beside a column of votes. auto: by the names of the columns."""
    score_range: tuple[float, float] | None = None
    """In scored pairs, the score that means *unrelated* and the score that means *same meaning*. Set it for a reversed range,
    such as 1 0; the scale of other scores has no effect. None: a larger score means more similar."""
    corpus: str | None = None
    """A text file or table (UTF-8) with more candidate answers for tasks of questions and answers. A table has the
    column `text` or `sentence`, or a single column."""
    every_steps: NonNegative = 0
    """Number of optimizer steps between evaluations. 0: before and after training only."""
    metric: str | None = None
    """Metric that selects the best model, such as `test/pearson` (TASK/METRIC). Higher is better. None: the first metric
    of the first task."""

    def __post_init__(self) -> None:
        names = ("columns", "format", "score_range", "corpus", "every_steps", "metric")
        set_names = [name for name in names if getattr(self, name) not in (None, 0, "auto", {})]
        if set_names and not self.tasks:
            raise SettingsError(f"evaluation.{set_names[0]} needs evaluation.tasks, which is not set.")


@settings_class
class EarlyStoppingSettings:
    """When a run stops before its last step, because its evaluations no longer improve."""

    patience: Positive | None = None
    """Stop after this number of evaluations without improvement. Needs --evaluation.every-steps. None: train to the last
    step."""
    metric: str | None = None
    """Metric that must improve, such as `test/pearson` (TASK/METRIC). Higher is better. None: the metric that selects the
    best model."""
    min_delta: NonNegativeFloat = 0.0
    """The metric must rise by more than this to count as improved. Built-in metrics are × 100."""

    def __post_init__(self) -> None:
        if self.patience is None and (self.metric is not None or self.min_delta):
            raise SettingsError(
                "early_stopping.metric and early_stopping.min_delta need early_stopping.patience, which is not set."
            )


@settings_class
class PretrainingSettings:
    """Pretraining on texts without labels. With a format other than `text`, all texts of a row are used."""

    task: Literal["mntp", "simcse"] | None = None
    """mntp: predict masked tokens from the token before them (LLM2Vec); needs bidirectional attention. simcse: the two
    embeddings of a text with two dropout masks are a positive pair (unsupervised SimCSE); needs dropout, such as
    --lora.dropout 0.1. None: training on labelled pairs."""
    mask_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Probability that a token is masked, with task mntp. 80 % of the masked tokens become the mask token (or "_"), 10 % a
    random token, and 10 % stay."""

    def __post_init__(self) -> None:
        if self.task != "mntp" and self.mask_fraction != PretrainingSettings.mask_fraction:
            raise SettingsError(
                f"--pretraining.mask-fraction {self.mask_fraction}: expected --pretraining.task mntp, got {self.task}. Omit "
                "--pretraining.mask-fraction."
            )


@settings_class
class CheckpointSettings:
    """Checkpoints from which a run resumes. They do not change the result."""

    every_steps: NonNegative = 0
    """Number of optimizer steps between checkpoints; the last step writes a checkpoint too. 0: checkpoints only on
    SIGINT (exit code 130), SIGTERM (143) and SIGHUP (129), which always write a checkpoint before the next step, and at the
    end of a resumed run."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""


BUDGET_SETTINGS = ("micro_batch_tokens", "graph_tokens", "activation_checkpointing", "layout")
"""Settings of memory use and of the layout of texts. A run can resume with different values."""


@settings_class
class TrainSettings:
    """All settings of a training run."""

    COMMON_FLAGS: ClassVar[str] = (
        "Most runs set --model.path, --data.path, --data.format, --batch-size, --epochs, --optimizer.learning-rate, "
        "--lora.rank, --evaluation.tasks and --run-dir; the defaults of the other flags work."
    )

    run_dir: str = "runs/latest"
    """Output folder: settings.yaml, metrics.jsonl, tensorboard/, model/, checkpoints/, result.json (of a finished run),
    and interrupted/ (weights of a failed run, removed when the run is finished). The folder of a different run or of a
    finished run is refused, and one with checkpoints unless resume is set."""
    batch_size: Positive = 64
    """Examples of a contrastive batch on all processes together; all other texts of the batch are negatives. Memory
    does not limit it."""
    epochs: Positive = 1
    """Number of passes over the data."""
    max_steps: Positive | None = None
    """Maximum number of optimizer steps."""
    accumulation: Positive = 1
    """Number of batches whose gradients are averaged into an optimizer step."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 42
    """Seed of adapter initialisation, data order and dropout."""
    resume: str | None = None
    """auto: resume from the newest complete checkpoint in run_dir, or start without one. never: start again and remove
    checkpoints. The name or path of a checkpoint in run_dir: resume from it, and remove later checkpoints. None: start;
    refused if run_dir has checkpoints."""
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Experiment trackers that get the numbers of metrics.jsonl. Trackers must be installed; tensorboard writes into
    run_dir."""
    micro_batch_tokens: Positive | None = None
    """Maximum tokens of a forward pass with padding, in training and evaluation. None in training: chosen at the start
    for the free memory of the device, at most 16384 (2048 without a CUDA GPU), and stored in checkpoints. None in
    evaluation: 16384 (2048 without a CUDA GPU)."""
    graph_tokens: NonNegative | None = None
    """Maximum computed tokens per process whose activations are kept for the backward pass. Accumulated batches are
    encoded together up to this number. A larger batch is encoded twice (gradient caching): the same gradient with less
    memory and about 50 % more time. None: chosen like micro_batch_tokens; at most 16384 on a CPU."""
    activation_checkpointing: Literal["auto", "always", "never"] = "auto"
    """Store only the inputs of layers in the forward pass and recompute the layers in the backward pass: the same
    gradient with less memory and about 50 % more time. Useful for long texts; for large batches, graph_tokens has the
    same cost. auto: used if a step does not fit without it, if the larger micro-batches save time on a GPU, or if a single
    text runs out of memory."""
    layout: Literal["auto", "padded"] = "auto"
    """auto: texts share the computation of common prefixes, or are packed without padding, if the model allows it and it
    is faster. padded: usual batches with the attention of the library."""
    allow_cpu: bool = False
    """Train a model of more than 3 billion weights on a CPU, which takes days to weeks."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """The base model, and how it encodes texts."""
    data: DataSettings = field(default_factory=DataSettings)
    """The training data: a dataset, or a mixture of datasets."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """Weights, temperatures and variants of the terms of the training loss."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """The LoRA adapter."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """AdamW, and its learning rate by step."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Evaluation before, during and after training, which selects the best model."""
    early_stopping: EarlyStoppingSettings = field(default_factory=EarlyStoppingSettings)
    """When a run stops before its last step, because its evaluations no longer improve."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """Checkpoints from which a run resumes. They do not change the result."""
    nested: NestedSettings = field(default_factory=NestedSettings)
    """Nested dimensions and layers (Matryoshka)."""
    pretraining: PretrainingSettings = field(default_factory=PretrainingSettings)
    """Pretraining on texts without labels."""

    def __post_init__(self) -> None:
        if self.lora.rank == 0 and self.model.bits is not None:
            raise SettingsError(
                f"lora.rank 0 trains all weights, and quantised weights (model.bits {self.model.bits}) have no gradients. Set "
                "lora.rank above 0, or model.bits to None."
            )
        if self.lora.rank == 0 and self.model.dtype == "float16":
            raise SettingsError(
                "lora.rank 0 trains all weights, and float16 loses small gradients. Set model.dtype to bfloat16 or float32, or "
                "lora.rank above 0."
            )
        conflicts = {
            "nested": self.nested != NestedSettings(),
            "objective.*": self.pretraining.task == "mntp" and self.objective != ObjectiveSettings(),
            "objective.cosine-weight": self.objective.cosine_weight > 0,  # all pairs of SimCSE have the same score
            "objective.angle-weight": self.objective.angle_weight > 0,
            "objective.class-weight": self.objective.class_weight > 0,
            "objective.teacher": self.objective.teacher is not None,
            "objective.kl-weight": self.objective.kl_weight > 0,
            "objective.margin-mse-weight": self.objective.margin_mse_weight > 0,
            "objective.false-negatives.guide": self.objective.false_negatives.guide is not None,
        }
        if self.pretraining.task is not None and (set_names := [name for name, is_set in conflicts.items() if is_set]):
            raise SettingsError(f"--pretraining.task and --{set_names[0]} exclude each other. Omit one of them.")

    @property
    def run_path(self) -> Path:
        """Path of the run directory, with `~` expanded."""
        return Path(self.run_dir).expanduser()

    @property
    def loaded_model(self) -> ModelSettings:
        """The model settings with the dtype in which weights are loaded.

        The dtype is float32 if all weights are trained, because other dtypes round small updates to zero.
        """
        return self.model if self.lora.rank else replace(self.model, dtype="float32")

    @property
    def autocasts(self) -> bool:
        """Whether training uses bfloat16 autocast with float32 weights."""
        return self.lora.rank == 0 and self.model.dtype == "bfloat16"

    @property
    def identity(self) -> Self:
        """These settings, with settings that do not affect the training result reset to fixed values.

        A run directory can only be resumed with an equal identity. Token budgets change only the order of additions and
        dropout masks, so a run can resume with different budgets.
        """
        unused = {name: getattr(TrainSettings, name) for name in BUDGET_SETTINGS}
        unused |= {"checkpoint": CheckpointSettings(), "report_to": [], "allow_cpu": False}
        return replace(self, run_dir="", resume="never", **unused)

    def fingerprint(self) -> str:
        """Return a hash of `identity`, which is stored with checkpoints."""
        values = settings_to_dict(self.identity)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@settings_class
class PlanSettings(TrainSettings):
    """Settings of `angle-llm plan`: a training run, and the devices for which memory is forecast."""

    memory: PositiveFloat | None = None
    """Free memory of a device in GiB, for which unset token budgets are chosen as in a training run. None:
    micro_batch_tokens 8192 (2048 on a CPU) and graph_tokens 16384."""
    processes: Positive = 1
    """Number of training processes, with one device per process."""
    zero: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: 1 partitions the optimizer state, 2 also gradients, 3 also weights."""
    fsdp: bool = False
    """Whether FSDP partitions the frozen weights."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Training state that ZeRO keeps in host memory. optimizer: the optimizer state. parameters: also the weights
    (stage 3)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Kind of device; attention kernels of a GPU and of a CPU need different memory in training. auto: cuda if
    available, else cpu. Set cuda to plan a GPU run on a machine without a GPU."""
    json: str | None = None
    """Also write the forecast to this JSON file, sizes in bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp and self.zero:
            raise SettingsError(f"--fsdp excludes --zero {self.zero}. Omit one of them.")
        if self.zero and self.optimizer.name == "adamw_8bit":
            raise SettingsError(f"--optimizer.name adamw_8bit excludes --zero {self.zero}: ZeRO supports adamw only.")
        if self.offload != "none" and self.zero == 0:
            raise SettingsError(f"--offload {self.offload} needs ZeRO. Set --zero 1, 2 or 3, or --offload none.")
        if self.offload == "parameters" and self.zero != 3:
            raise SettingsError(f"--offload parameters needs --zero 3, got {self.zero}. Or set --offload optimizer.")

    @property
    def device_kind(self) -> str:
        """Device type of the planned run: `cuda` or `cpu`."""
        import torch

        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"
