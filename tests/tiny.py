"""Tiny language models of every kind the package supports: random weights from a config, seeded, made in memory.

Every parameter is random, biases and norms too, so that a state depends on every token it may look at, and on its
position. `tiny_backbone("llama")` gives the layers alone, `tiny_encoder("llama")` an encoder with the tokenizer of its
kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)

from angle_llm.model.encoder import SentenceEncoder

POSITIONS = 128
"""Positions of every tiny model, RoBERTa's two unused ones not counted."""
WINDOW = 6
"""Tokens a sliding-window layer looks back on: fewer than any worded sentence has."""

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped-query attention
    "max_position_embeddings": POSITIONS,
}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class Kind:
    """A kind of language model."""

    config: Callable[[], PretrainedConfig]
    tokenizer: str
    causal: bool = True
    dimensions: int = 32


KINDS: dict[str, Kind] = {
    "llama": Kind(lambda: LlamaConfig(**_DECODER, tie_word_embeddings=False), "llama2"),
    "llama-tied": Kind(lambda: LlamaConfig(**_DECODER, tie_word_embeddings=True), "smollm2"),
    "mistral": Kind(lambda: MistralConfig(**_DECODER, sliding_window=WINDOW), "llama2"),
    "qwen2": Kind(lambda: Qwen2Config(**_DECODER), "smollm2"),
    "qwen3": Kind(lambda: Qwen3Config(**_DECODER, head_dim=16), "llama3"),
    "gemma2": Kind(lambda: Gemma2Config(**_DECODER, head_dim=8, sliding_window=WINDOW), "llama2"),
    "opt": Kind(
        lambda: OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            word_embed_proj_dim=24,
            do_layer_norm_before=False,
            dropout=0.1,
        ),
        "roberta",
        dimensions=24,
    ),
    "gpt2": Kind(
        lambda: GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=POSITIONS,
            bos_token_id=2,
            eos_token_id=2,
        ),
        "smollm2",
    ),
    "bert": Kind(lambda: BertConfig(**_ENCODER, max_position_embeddings=POSITIONS), "bert", causal=False),
    "roberta": Kind(
        lambda: RobertaConfig(**_ENCODER, max_position_embeddings=POSITIONS + 2, pad_token_id=1),
        "roberta",
        causal=False,
    ),
}
CAUSAL = [name for name, kind in KINDS.items() if kind.causal]
BIDIRECTIONAL = [name for name, kind in KINDS.items() if not kind.causal]


def tiny_backbone(kind: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, window: int | None = None) -> Any:
    """The layers of a kind, without head or pooler, in evaluation mode; `window` replaces that of its sliding layers."""
    model = _seeded(AutoModel.from_config, kind, seed, **({} if window is None else {"sliding_window": window}))
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return _cast(model, dtype).eval()


def tiny_causal_lm(kind: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Any:
    """A kind with its language-model head, as it is published."""
    return _cast(_seeded(AutoModelForCausalLM.from_config, kind, seed), dtype).eval()


def tiny_encoder(kind: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> SentenceEncoder:
    """An encoder of a kind; `options` are those of `SentenceEncoder`."""
    return SentenceEncoder(tiny_backbone(kind, dtype, seed=seed), TOKENIZERS[KINDS[kind].tokenizer](), **options)


def save_tiny_base(kind: str, folder: Path, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Path:
    """Writes a model folder as they are published: weights, config, tokenizer, no card."""
    tiny_backbone(kind, dtype, seed=seed).save_pretrained(folder)
    TOKENIZERS[KINDS[kind].tokenizer]().save_pretrained(folder)
    return folder


def train_a_little(model: nn.Module) -> None:
    """Gives an adapter what training gives it: values in lora_B, which starts at 0."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """As `from_pretrained(dtype=…)` does: the weights alone. `model.to(dtype)` would round the rotary frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _seeded(build: Callable[[PretrainedConfig], nn.Module], kind: str, seed: int, **changed: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = KINDS[kind].config()
        config.update(changed)
        model = build(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model
