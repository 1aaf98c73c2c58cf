"""A training run: everything above, the optimizer, and when to measure and to save."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from angle_llm.config.checked import Checked, require
from angle_llm.config.data import DataSettings
from angle_llm.config.model import LoraSettings, ModelSettings
from angle_llm.config.objective import NestedSettings, ObjectiveSettings
from angle_llm.config.reading import settings_from_dict, settings_to_dict


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
        require(self.learning_rate > 0, f"optimizer.learning_rate must be positive, got {self.learning_rate}.")
        require(self.weight_decay >= 0, f"optimizer.weight_decay must be 0 or more, got {self.weight_decay}.")
        whole = 0 <= self.warmup < 1 or self.warmup == int(self.warmup) >= 1
        require(whole, f"optimizer.warmup is a share below 1 or a whole number of steps, got {self.warmup}.")
        require(
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
        require(self.every_steps >= 0, f"evaluation.every_steps must be 0 or more, got {self.every_steps}.")
        named = self.pairs is not None or self.every_steps == 0
        require(
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
        require(self.every_steps >= 0, f"checkpoint.every_steps must be 0 or more, got {self.every_steps}.")
        require(self.keep >= 1, f"checkpoint.keep must be 1 or more, got {self.keep}.")


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
    data: DataSettings = field(default_factory=DataSettings)
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
            require(value >= 1, f"{name} must be 1 or more, got {value}.")
        require(0 <= self.seed < 2**32, f"seed must be in 0 .. 2**32 - 1, got {self.seed}.")
        require(
            self.lora.rank > 0 or self.model.bits is None,
            f"lora.rank 0 trains all weights, and weights held in {self.model.bits} bits have no gradients. Set lora.rank "
            "above 0 to train an adapter on them, or leave model.bits away.",
        )
        trainable = self.lora.rank > 0 or self.model.dtype in ("auto", "float32")
        require(
            trainable,
            f"lora.rank 0 trains all weights, and in {self.model.dtype} small updates round to nothing. Set model.dtype to "
            "float32, or lora.rank above 0.",
        )
        require(bool(self.resume), "resume is empty. It is auto, never, or a checkpoint.")
        require(self.graph_tokens >= 0, f"graph_tokens must be 0 or more, got {self.graph_tokens}.")
        require(self.max_steps is None or self.max_steps >= 1, f"max_steps must be 1 or more, got {self.max_steps}.")

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
        for source in (values["data"], *values["data"]["sets"]):
            del source["max_bad_ratio"]  # it stops a run, and changes none
        for name in ("sets", "temperature", "batches"):
            if getattr(same.data, name) == getattr(DataSettings(), name):
                del values["data"][name]
        if same.nested == NestedSettings():
            del values["nested"]
        if not same.objective.regression_weight:
            del values["objective"]["regression_weight"]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
