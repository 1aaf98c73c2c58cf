"""Build models from a configuration, without loading weights.

The **tiny copy** is a small model of the same architecture with random weights on the CPU. Tests of the architecture run
on the tiny copy, for example whether the model is causal. The **meta model** has the shapes, dtypes and adapters of the
model on torch's `meta` device, where tensors take no memory. A training step of the meta model allocates the same tensors
as a real step, so the memory of the step can be forecast.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layers.lora import add_lora
from angle_llm.model.layers.quantization import check_bits, empty_layer, replace_linear
from angle_llm.model.layout.attention import Kernel
from angle_llm.model.source.artifact import card_of
from angle_llm.model.source.backbone import (
    check_decoder_or_encoder,
    empty_backbone,
    load_config,
    load_tokenizer,
    torch_dtype,
)
from angle_llm.model.source.resolve import ModelSource
from angle_llm.prompts import load_prompts
from angle_llm.settings.train import LoraSettings, ModelSettings

_BLOCK = 64
"""Number of weights that share a scale in NF4 quantization."""
_SCALES = 256
"""Number of scales that share a second-level scale, in NF4 with double quantization."""

_SHALLOW = {"vocab_size": 128, "num_hidden_layers": 2}
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
        FileNotFoundError, PromptError: as in `SentenceEncoder.from_pretrained`.
    """
    prompt = None if settings.prompt is None else load_prompts(settings.prompt)
    config = load_config(source.backbone, source.backbone_revision)
    check_decoder_or_encoder(config, source.path)
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
                # Also biases and norms: probes compare states, which must not be equal by chance.
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
        if isinstance(present := getattr(small, name, None), int):
            setattr(small, name, min(present, value))
    # A layer of every type, and at least two layers.
    if kinds := list(dict.fromkeys(getattr(small, "layer_types", None) or ())):
        small.layer_types = (kinds * 2)[: max(2, len(kinds))]
        small.num_hidden_layers = len(small.layer_types)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(token := getattr(small, name, None), int) and token >= sizes["vocab_size"]:
            setattr(small, name, None)
    return small


def stored_dtype(config: Any, name: str) -> torch.dtype:
    """Return the torch dtype of a dtype setting; `auto` is the dtype in the model configuration, or float32 without it."""
    stored = getattr(config, "dtype", None) or "float32" if name == "auto" else name
    return stored if isinstance(stored, torch.dtype) else torch_dtype(stored.removeprefix("torch."))


def meta_backbone(
    config: Any,
    dtype: torch.dtype,
    lora: LoraSettings | None = None,
    *,
    bits: int | None = None,
    divided: bool = False,
) -> Any:
    """Return a backbone on the meta device in training mode, with a float32 LoRA adapter if `lora` is given.

    Args:
        config: model configuration of `transformers`.
        dtype: dtype of the base weights that are not quantized.
        bits: 4 or 8 to use the shapes and dtypes of quantized linear layers.
        divided: whether ZeRO-3 partitions the weights, so that layers must gather them.

    Raises:
        ValueError: if a LoRA target is not the name of a layer.
        QuantizationError: if the backbone cannot be quantized (see `quantize`).
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        backbone = empty_backbone(config, dtype)
        if bits is not None:
            check_bits(bits)
            replace_linear(backbone, bits, _nf4 if bits == 4 else _int8)
        if divided:
            for parameter in backbone.parameters():
                parameter.ds_id = 0
        if lora is not None:
            backbone = add_lora(backbone, lora)
    return backbone.train()


def put_in(model: EmbeddingModel, backbone: Any, kernel: Kernel = None) -> EmbeddingModel:
    """Return an embedding model in training mode with another backbone, which is on the meta device.

    The model does not use autocast, and its head has no weights. `kernel` is the attention kernel for texts in one
    sequence, unless the options of `model` have one.
    """
    # Autocast does not support the meta device. Dense modules need little memory.
    kernel = model.options.attention_kernel or kernel
    options = replace(model.options, autocasts=False, attention_kernel=kernel)
    return EmbeddingModel(backbone, options, head=model.head.without_weights()).train()


def _nf4(layer: nn.Linear) -> Any:
    """Return an NF4 layer of bitsandbytes with uninitialized weights, in the shape of a linear layer.

    It has half a byte per weight, a byte per 64 weights (scale), and 4 bytes per 256 * 64 weights (second-level scale).
    """
    bnb: Any = importlib.import_module("bitsandbytes")
    held = empty_layer(layer, 4)
    blocks = -(-layer.weight.numel() // _BLOCK)
    scales = bnb.functional.QuantState(
        torch.empty(-(-blocks // _SCALES)), code=torch.empty(256), blocksize=_SCALES, dtype=torch.float32
    )
    held.quant_state = bnb.functional.QuantState(
        torch.empty(blocks, dtype=torch.uint8),
        shape=layer.weight.shape,
        code=torch.empty(16),
        blocksize=_BLOCK,
        quant_type="nf4",
        dtype=layer.weight.dtype,
        offset=torch.empty(()),
        state2=scales,
    )
    packed = torch.empty(-(-layer.weight.numel() // 2), 1, dtype=torch.uint8)
    held.weight = bnb.nn.Params4bit(
        packed, quant_state=held.quant_state, quant_type="nf4", module=held, bnb_quantized=True
    )
    return held


def _int8(layer: nn.Linear) -> Any:
    """Return an 8-bit layer of bitsandbytes with uninitialized weights, in the shape of a linear layer.

    It has a byte per weight, and a scale of 4 bytes per output.
    """
    bnb: Any = importlib.import_module("bitsandbytes")
    held = empty_layer(layer, 8)
    rounded = torch.empty(layer.weight.shape, dtype=torch.int8)
    held.weight = bnb.nn.Int8Params(rounded, requires_grad=False, has_fp16_weights=False)
    held.weight.CB = held.weight.data
    held.weight.SCB = torch.empty(layer.out_features)
    return held


def held_bytes(backbone: nn.Module) -> int:
    """Return the number of bytes of the parameters and buffers of a model, with the scales of 4-bit weights.

    Tensors that share memory count once.
    """
    tensors: list[torch.Tensor] = [*backbone.parameters(), *backbone.buffers()]
    for parameter in backbone.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            tensors += [state.absmax, state.code]
            tensors += [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
