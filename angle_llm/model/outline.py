"""Models without weights, for the forecast: made from the configuration only.

The **twin** is a small model of the same architecture, with random weights on the CPU: probes (causal? prefix sharing?)
run on it. The **outline** has the shapes, dtypes and adapters of the model on torch's `meta` device, where tensors take
no memory: a step of it makes every tensor of the real step.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import nn

from angle_llm.config import LoraSettings, ModelSettings
from angle_llm.model import hub
from angle_llm.model.artifact import EncoderCard, card_of
from angle_llm.model.backbone import (
    BackboneLocation,
    check_decoder_or_encoder,
    empty_backbone,
    load_config,
    load_tokenizer,
    locate,
    torch_dtype,
)
from angle_llm.model.depth import cut_config
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.fast_paths import PooledLastLayer
from angle_llm.model.library_folder import LibraryFolder
from angle_llm.model.lora import add_lora, without_adapter
from angle_llm.model.pooling import EmbeddingModel
from angle_llm.model.quantization import check_bits, empty_layer, replace_linear
from angle_llm.prompts import load_prompts

_BLOCK = 64
"""NF4: weights per scale."""
_SCALES = 256
"""NF4 with double quantization: scales per scale of scales."""

_SHALLOW = {"vocab_size": 128, "num_hidden_layers": 2}
"""For an architecture whose sizes depend on each other in other ways than `_SMALL`."""
_SMALL = _SHALLOW | {
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32, "intermediate_size": 48,
    "ffn_dim": 48, "word_embed_proj_dim": 32,
}  # fmt: skip


def encoder_twin(settings: ModelSettings) -> tuple[SentenceEncoder, Any]:
    """Return the encoder of `SentenceEncoder.from_pretrained` on the twin, and the real configuration.

    Its prompt, pooling, lengths, tokenizer and plans are the real ones; its vectors are meaningless.

    Raises:
        ArtifactError: for a damaged folder.
        ValueError: for an encoder-decoder, or an architecture without a twin.
        FileNotFoundError, PromptError: as when opening the model.
    """
    prompt = None if settings.prompt is None else load_prompts(settings.prompt)
    found, card, library = hub.find(settings.path, settings.revision), None, None
    if found.folder is not None:
        location, card = BackboneLocation(str(found.folder)), EncoderCard.read(found.folder)
        config = load_config(locate(card.base or location.name), card.base_revision)
    else:
        location = locate(settings.path)
        library = None if found.library is None else LibraryFolder.read(found.library, prompt)
        config = load_config(location, found.commit or settings.revision)
    check_decoder_or_encoder(config, settings.path)
    tokenizer, small = load_tokenizer(location, found.commit or settings.revision), twin(config)
    card = card if library is None else card_of(library, tokenizer, small)
    options: dict[str, Any] = {"prompt": prompt, "pooling": settings.pooling, "max_length": settings.max_length}
    if card is not None:
        options = {name: value or getattr(card, name) for name, value in options.items()}
        options["normalize"] = card.normalize
    return SentenceEncoder(small, tokenizer, **options), config


def twin(config: Any) -> nn.Module:
    """Return a small model of the architecture, with random weights on the CPU; wider where the smallest one fails.

    Raises:
        ValueError: if it fails in all sizes.
    """
    for sizes in (_SMALL, _SHALLOW):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model: nn.Module = empty_backbone(_resized(config, sizes), torch.float32)
                for parameter in model.parameters():  # also biases and norms, or equal states would hide differences
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
    small = copy.deepcopy(config)
    for name, value in sizes.items():
        if isinstance(present := getattr(small, name, None), int):
            setattr(small, name, min(present, value))
    if kinds := list(dict.fromkeys(getattr(small, "layer_types", None) or ())):  # one layer of each kind, at least two
        small.layer_types = (kinds * 2)[: max(2, len(kinds))]
        small.num_hidden_layers = len(small.layer_types)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(token := getattr(small, name, None), int) and token >= sizes["vocab_size"]:
            setattr(small, name, None)
    return small


def stored_dtype(config: Any, name: str) -> torch.dtype:
    """Return the dtype of `load_backbone(dtype=name)`; for auto that of the configuration, float32 if it has none."""
    stored = getattr(config, "dtype", None) or "float32" if name == "auto" else name
    return stored if isinstance(stored, torch.dtype) else torch_dtype(stored.removeprefix("torch."))


def backbone_outline(
    config: Any,
    dtype: torch.dtype,
    lora: LoraSettings | None = None,
    *,
    bits: int | None = None,
    divided: bool = False,
    layers: int | None = None,
) -> Any:
    """Return the backbone of training on the meta device: its base in `dtype` or in bits, its adapter in float32.

    `divided`: as under ZeRO-3, where layers gather their weights. `layers`: only the first ones.

    Raises:
        ValueError: if no layer has the name of a target of the adapter.
        QuantizationError: as `quantize`.
    """
    config = copy.deepcopy(config)
    if layers is not None:
        cut_config(config, layers)
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


def put_in(model: EmbeddingModel, backbone: Any) -> EmbeddingModel:
    """Return a copy of a model around an outline, with the short last layer if the model has it; it reads the last
    layer only."""
    inner: Any = without_adapter(backbone)
    sketch = copy.copy(model)
    sketch._modules = {}  # the copy shares the dictionary
    sketch.backbone = backbone
    sketch.projection, sketch.autocasts = None, False  # autocast does not know the meta device
    sketch._last_layer = None if model._last_layer is None else PooledLastLayer(inner.layers[-1])
    sketch.read_layers(())
    return sketch.train()


def _nf4(layer: nn.Linear) -> Any:
    """Return the layer in NF4: half a byte per weight, one byte per 64 weights, and four bytes per 256 of those."""
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
    """Return the layer in 8 bits: one byte per weight, and four per row."""
    bnb: Any = importlib.import_module("bitsandbytes")
    held = empty_layer(layer, 8)
    rounded = torch.empty(layer.weight.shape, dtype=torch.int8)
    held.weight = bnb.nn.Int8Params(rounded, requires_grad=False, has_fp16_weights=False)
    held.weight.CB, held.weight.SCB = held.weight.data, torch.empty(layer.out_features)
    return held


def held_bytes(backbone: nn.Module) -> int:
    """Return the bytes of a model: parameters and buffers once each, and the scales of 4-bit weights."""
    tensors: list[torch.Tensor] = [*backbone.parameters(), *backbone.buffers()]
    for parameter in backbone.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            tensors += [state.absmax, state.code]
            tensors += [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
