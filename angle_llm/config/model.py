"""The backbone and its adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from angle_llm.config.checked import Checked, require


@dataclass(frozen=True)
class ModelSettings(Checked):
    """The backbone and how sentences are put through it."""

    path: str = "NousResearch/Llama-2-7b-hf"
    """A model folder, a .gguf file, a hub id, or package:NAME/path/inside for a file in an installed Python package."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the base weights; a trained adapter is float32 regardless. auto: as stored. With bits it is the dtype that
    quantised layers compute in and all else is held in. To train, bfloat16 or float32: losses are not scaled here, and in
    float16 the small gradients of large batches vanish."""
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
        require(positive, f"model.max_length must be positive, got {self.max_length}.")


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
        require(self.rank >= 0, f"lora.rank must be 0 or more, got {self.rank}.")
        require(0 < self.alpha < math.inf, f"lora.alpha must be a positive number, got {self.alpha}.")
        require(0 <= self.dropout < 1, f"lora.dropout is a probability below 1, got {self.dropout}.")
        require(bool(self.targets), "lora.targets is empty. Name layers, or use all-linear.")
