"""Build models from a configuration, without loading weights.

The **tiny copy** is a small model of the same architecture with random weights on the CPU. Tests of the architecture run
on the tiny copy, for example whether the model is causal. The **meta model** has the shapes, dtypes and adapters of the
model on torch's `meta` device, where tensors take no memory. A training step of the meta model allocates the same tensors
as a real step, so the memory of the step can be forecast.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layers.lora import add_lora
from angle_llm.model.layers.quantization import is_quantizable
from angle_llm.model.layers.quantized_layers import Bits
from angle_llm.model.layout.attention import Kernel
from angle_llm.model.source.artifact import card_of
from angle_llm.model.source.backbone import empty_backbone, load_config, load_tokenizer, torch_dtype
from angle_llm.model.source.resolve import ModelSource
from angle_llm.prompts import load_prompts
from angle_llm.settings.train import LoraSettings, ModelSettings

_BYTES_PER_WEIGHT: dict[Bits, float] = {4: 1 / 2 + (1 + 4 / 256) / 64, 8: 1.0, "fp8": 2.0}
"""Bits → bytes of a quantized weight. NF4 has a scale of a byte per 64 weights, and a float32 number per 256 scales; FP8 has
a transposed copy in training."""
_SHALLOW = {"vocab_size": 128, "vocab_size_per_layer_input": 128, "num_hidden_layers": 2}
"""Config values of a tiny copy (small model of the same architecture) that does not work with the values in `_SMALL`."""
_SMALL = _SHALLOW | {
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32, "intermediate_size": 48,
    "ffn_dim": 48, "word_embed_proj_dim": 32,
}  # fmt: skip
"""Config values of a tiny copy (small model of the same architecture)."""


def tiny_encoder_copy(source: ModelSource, settings: ModelSettings) -> tuple[SentenceEncoder, Any]:
    """Return an encoder with a small random backbone of a model's architecture, and the configuration of the full model.

    Prompt, pooling, maximum length, tokenizer and micro-batches are equal to the encoder that
    `SentenceEncoder.from_pretrained` loads; embeddings are meaningless.

    Raises:
        ArtifactError: for a damaged folder.
        ValueError: for an encoder-decoder, or an architecture that cannot be built small.
        FileNotFoundError, SettingsError: as in `SentenceEncoder.from_pretrained`.
    """
    prompt = None if settings.prompt is None else load_prompts(settings.prompt)
    config = load_config(source.backbone, source.backbone_revision)
    tokenizer = load_tokenizer(*source.tokenizer)
    small = tiny_copy(config)
    library = source.read_library(prompt)
    card = source.card if library is None else card_of(library, tokenizer, small)
    options: dict[str, Any] = {"prompt": prompt, "pooling": settings.pooling, "max_length": settings.max_length}
    if card is not None:
        options = {name: value or getattr(card, name) for name, value in options.items()}
        options["normalize"] = card.normalize
    return SentenceEncoder(small, tokenizer, **options), config


def tiny_copy(config: Any) -> nn.Module:
    """Return a small backbone with the architecture of `config`, with random weights on the CPU.

    The sizes in `_SMALL` are tried first, then the sizes in `_SHALLOW`.

    Raises:
        ValueError: if the architecture works with neither of them.
    """
    for sizes in (_SMALL, _SHALLOW):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model: nn.Module = empty_backbone(_resized(config, sizes), torch.float32)
                # Biases and norms get random values too: probes compare states, which must not be equal by chance.
                for parameter in model.parameters():
                    parameter.data.add_(torch.randn_like(parameter) * 0.05)
                with torch.no_grad():
                    model(input_ids=torch.tensor([[1, 2, 3]]))
            return model.eval()
        except Exception as error:  # an architecture can refuse other sizes in any way
            reason = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"the architecture {config.model_type} cannot be made small ({reason}), which a forecast needs. Plan with a model of "
        "another architecture; training works without a forecast."
    )


def _resized(config: Any, sizes: dict[str, int]) -> Any:
    """Return a copy of a model configuration with the sizes limited to `sizes`, such as {"hidden_size": 32}.

    Ids of special tokens that are not in the small vocabulary become None.
    """
    small = copy.deepcopy(config)
    for name, value in sizes.items():
        with suppress(RuntimeError):  # of transformers, for a size that differs between layers
            if isinstance(size := getattr(small, name, None), int):
                setattr(small, name, min(size, value))
    # A layer of every type, and at least two layers. If the last layers share keys and values: every type twice.
    types = list(getattr(small, "layer_types", None) or ())
    if distinct_types := list(dict.fromkeys(types)):
        shared = len(distinct_types) if getattr(small, "num_kv_shared_layers", 0) else 0
        layer_types = (distinct_types * 2)[: max(2, len(distinct_types) + shared)]
        values = small.to_dict()
        with suppress(AttributeError):  # configs like Falcon-H1's compute the types
            small.layer_types = layer_types
            small.num_hidden_layers = len(layer_types)
        # Values for each layer, which other sizes depend on, are those of the first layer with the type.
        origin = [types.index(layer_type) for layer_type in layer_types]
        for name, value in values.items():
            if isinstance(value, list) and len(value) == len(types) and name != "layer_types":
                setattr(small, name, [value[layer] for layer in origin])
        config_of = {int(layer): value for layer, value in values.get("per_layer_config", {}).items()}
        if shared:
            small.num_kv_shared_layers = shared
        if config_of:
            small.per_layer_config = {new: config_of[old] for new, old in enumerate(origin) if old in config_of}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(token := getattr(small, name, None), int) and token >= sizes["vocab_size"]:
            setattr(small, name, None)
    return small


def stored_dtype(config: Any, name: str) -> torch.dtype:
    """Return the torch dtype of a dtype setting; `auto` is the dtype in the model configuration, or float32 without it."""
    stored = getattr(config, "dtype", None) or "float32" if name == "auto" else name
    return stored if isinstance(stored, torch.dtype) else torch_dtype(stored.removeprefix("torch."))


def meta_backbone(config: Any, dtype: torch.dtype, lora: LoraSettings | None = None, *, divided: bool = False) -> Any:
    """Return a backbone on the meta device in training mode, with a float32 LoRA adapter if `lora` is given.

    Args:
        config: model configuration of `transformers`.
        dtype: dtype of the base weights. A quantized base has the same activations; see `frozen_bytes` for its weights.
        divided: whether ZeRO-3 partitions the weights, so that layers must gather them.

    Raises:
        ValueError: if a LoRA target is not the name of a layer.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        backbone = empty_backbone(config, dtype)
        if divided:
            for parameter in backbone.parameters():
                parameter.ds_id = 0  # the mark of ZeRO-3, by which layers find partitioned weights
        if lora is not None:
            backbone = add_lora(backbone, lora)
    return backbone.train()


def put_in(model: EmbeddingModel, backbone: Any, kernel: Kernel = None) -> EmbeddingModel:
    """Return an embedding model in training mode with another backbone, which is on the meta device.

    The model does not use autocast, and its head has no weights. `kernel` is the attention kernel for texts in one
    sequence.
    """
    # `count_passes` computes as under autocast. Dense modules are left out, because they need little memory.
    options = replace(model.options, autocasts=False, attention_kernel=kernel)
    return EmbeddingModel(backbone, options, head=model.head.without_weights()).train()


def frozen_bytes(backbone: nn.Module, head: nn.Module | None = None, bits: Bits | None = None) -> int:
    """Return the bytes of the frozen weights and the buffers of a backbone and a head, which may share weights.

    With `bits`, the linear layers of the backbone count as quantized.
    """
    layers: list[tuple[str, Any]] = list(backbone.named_modules()) if bits else []
    quantized = {id(layer.weight) for name, layer in layers if is_quantizable(backbone, name, layer)}
    model = nn.ModuleList([backbone] if head is None else [backbone, head])
    total = float(sum(buffer.nbytes for buffer in model.buffers()))
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        total += (
            _BYTES_PER_WEIGHT[bits] * parameter.numel() if bits and id(parameter) in quantized else parameter.nbytes
        )
    return round(total)
