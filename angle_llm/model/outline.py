"""A model without its weights: what can be known of it, and what a step of it would compute, before anything is loaded.

Two stand-ins are made from the configuration alone. The **twin** has the architecture in small, with random weights on
the CPU: whatever is asked of a model (does it look ahead? may texts share prefixes?) is asked of the twin. The **outline**
has the shapes, dtypes and adapters of the real one on torch's `meta` device, where tensors have no values and take no
memory: a step of it makes every tensor the real step would make.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from angle_llm.config import LoraSettings, ModelSettings
from angle_llm.model import quantization
from angle_llm.model.artifact import EncoderCard
from angle_llm.model.backbone import BackboneLocation, load_tokenizer, locate, torch_dtype
from angle_llm.model.checks import ArtifactError, is_saved_encoder
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.fast_paths import PooledLastLayer, mend
from angle_llm.model.lora import add_lora, is_adapted
from angle_llm.model.pooling import EmbeddingModel
from angle_llm.prompts import PromptTemplate, load_prompt

META = torch.device("meta")
BLOCK = 64
"""NF4: weights that share a scale."""
SCALES = 256
"""NF4 with double quantisation: scales that share a scale of their own."""

_SMALL = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
}
_SHALLOW = {"vocab_size": 128, "num_hidden_layers": 2}
"""For an architecture whose parts must fit in a way `_SMALL` does not know."""


def encoder_twin(settings: ModelSettings) -> tuple[SentenceEncoder, Any]:
    """The encoder as `SentenceEncoder.from_pretrained` would open it, over the twin; and the real configuration.

    Its prompt, pooling, lengths, tokenizer and plans are those of the real one, its vectors mean nothing.

    Raises:
        ArtifactError: for a saved adapter, which is not trained further.
        ValueError: for an encoder-decoder, or an architecture no twin can be made of.
        FileNotFoundError, PromptError: as opening the model would.
    """
    location, prompt, pooling, length = _as_named(settings)
    config = load_config(location, settings.revision)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{settings.path} is an encoder-decoder ({config.model_type}), and cannot be a sentence encoder."
        )
    tokenizer = load_tokenizer(location, settings.revision)
    return SentenceEncoder(twin(config), tokenizer, prompt=prompt, pooling=pooling, max_length=length), config


def _as_named(settings: ModelSettings) -> tuple[BackboneLocation, PromptTemplate | None, str | None, int | None]:
    """Where the weights are, and prompt, pooling and length as named or as saved with the model."""
    prompt = None if settings.prompt is None else load_prompt(settings.prompt)
    if not is_saved_encoder(settings.path):
        return locate(settings.path), prompt, settings.pooling, settings.max_length
    card = EncoderCard.read(Path(settings.path).expanduser())
    if card.base is not None:
        raise ArtifactError(
            f"{settings.path} is an adapter that has been trained already. Start from its base, {card.base}."
        )
    return (
        BackboneLocation(str(Path(settings.path).expanduser())),
        prompt or card.prompt,
        settings.pooling or card.pooling,
        settings.max_length or card.max_length,
    )


def load_config(location: BackboneLocation, revision: str | None = None) -> Any:
    """The configuration alone; of a GGUF file, its header."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(location.name, revision=revision, trust_remote_code=False, **location.arguments)
    if location.gguf_file is not None:
        config.dtype = "float32"  # what `load_backbone` makes of it unless told otherwise
    return config


def twin(config: Any) -> nn.Module:
    """The architecture in small, with random weights on the CPU; wider where the narrow one does not work.

    Raises:
        ValueError: if it works in no size.
    """
    errors = []
    for changes in (_SMALL, _SHALLOW):
        small = _changed(config, changes)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = _without_head(small, torch.float32)
                for parameter in model.parameters():  # biases and norms too, or states would hide differences
                    parameter.data.add_(torch.randn_like(parameter) * 0.05)
                with torch.no_grad():
                    model(input_ids=torch.tensor([[1, 2, 3]]))
        except Exception as error:  # an architecture may refuse changed widths in any way
            errors.append(f"{type(error).__name__}: {error}")
            continue
        made: nn.Module = model.eval()
        return made
    raise ValueError(
        f"the architecture {config.model_type} cannot be made small to be asked what it is ({errors[-1]}). Plan with a "
        "model of another architecture; training does not need this."
    )


def _changed(config: Any, changes: dict[str, int]) -> Any:
    small = copy.deepcopy(config)
    kinds = getattr(small, "layer_types", None)
    for name, value in changes.items():
        present = getattr(small, name, None)
        if isinstance(present, int):
            setattr(small, name, min(present, value))
    if kinds:  # one layer of each kind, two at least
        chosen = list(dict.fromkeys(kinds))
        small.layer_types = (chosen * 2)[: max(2, len(chosen))]
        small.num_hidden_layers = len(small.layer_types)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(small, name, None)
        if isinstance(token, int) and token >= changes["vocab_size"]:
            setattr(small, name, None)
    return small


def _without_head(config: Any, dtype: torch.dtype) -> Any:
    """The layers a backbone is loaded as, with new weights."""
    from transformers import AutoModel

    if getattr(config, "quantization_config", None) is not None:
        delattr(config, "quantization_config")
    model = AutoModel.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def stored_dtype(config: Any, name: str) -> torch.dtype:
    """What `load_backbone(dtype=name)` gives the weights: for auto what the configuration says, float32 if it does not."""
    if name != "auto":
        return torch_dtype(name)
    stored = getattr(config, "dtype", None) or "float32"
    return stored if isinstance(stored, torch.dtype) else torch_dtype(str(stored).removeprefix("torch."))


def backbone_outline(
    config: Any, dtype: torch.dtype, lora: LoraSettings | None = None, *, bits: int | None = None, divided: bool = False
) -> Any:
    """The backbone on the meta device, as training holds it: its base in `dtype` or in bits, its adapter in float32.

    `divided`: as under ZeRO-3, where layers compute by the way that gathers their weights.

    Raises:
        ValueError: if no layer bears the name of an adapter's target.
        QuantizationError: as `modeling.quantized` raises it.
    """
    with META:
        backbone = _without_head(copy.deepcopy(config), dtype)
        if bits is not None:
            _hold_in_bits(backbone, bits)
        if divided:
            for parameter in backbone.parameters():
                parameter.ds_id = 0
        if lora is not None:
            backbone = add_lora(backbone, lora)
    return backbone.train()


def put_in(model: EmbeddingModel, backbone: Any) -> EmbeddingModel:
    """Gives the twin's model the outline's layers, and the shorter last layer if the twin has it."""
    shorter = model._last_layer is not None
    model.backbone = backbone
    inner = backbone.get_base_model() if is_adapted(backbone) else backbone
    model._last_layer = PooledLastLayer(inner.layers[-1]) if shorter else None
    return model.train()


def _hold_in_bits(backbone: nn.Module, bits: int) -> None:
    """What `quantization.quantize` makes of the linear layers, without values."""
    quantization.check_bits(bits)
    names = [name for name, layer in backbone.named_modules() if type(layer) is nn.Linear]
    if not names:
        raise quantization.QuantizationError(
            f"{type(backbone).__name__} has no torch.nn.Linear layers, so nothing can be held in {bits} bits. Leave bits away."
        )
    hold = _nf4 if bits == 4 else _int8
    for name in names:
        layer: Any = backbone.get_submodule(name)
        held = hold(layer)
        held.bias = None if layer.bias is None else layer.bias.requires_grad_(False)
        mend(held)
        backbone.set_submodule(name, held)
    setattr(backbone, f"is_loaded_in_{bits}bit", True)


def _nf4(layer: nn.Linear) -> Any:
    """Half a byte a weight, a byte for every 64 of them, and four for every 256 of those."""
    bnb: Any = importlib.import_module("bitsandbytes")
    weights, dtype = layer.weight.numel(), layer.weight.dtype
    held = bnb.nn.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, dtype, device=META)
    blocks = -(-weights // BLOCK)
    scales_of_scales = bnb.functional.QuantState(
        torch.empty(-(-blocks // SCALES)), code=torch.empty(256), blocksize=SCALES, dtype=torch.float32
    )
    held.quant_state = bnb.functional.QuantState(
        torch.empty(blocks, dtype=torch.uint8),
        shape=layer.weight.shape,
        code=torch.empty(16),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.empty(()),
        state2=scales_of_scales,
    )
    packed = torch.empty(-(-weights // 2), 1, dtype=torch.uint8)
    held.weight = bnb.nn.Params4bit(
        packed, quant_state=held.quant_state, quant_type="nf4", module=held, bnb_quantized=True
    )
    return held


def _int8(layer: nn.Linear) -> Any:
    """A byte a weight, and four for every row."""
    bnb: Any = importlib.import_module("bitsandbytes")
    options: dict[str, Any] = {"has_fp16_weights": False, "threshold": quantization.OUTLIER, "device": META}
    held = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, layer.bias is not None, **options)
    rounded = torch.empty(layer.weight.shape, dtype=torch.int8)
    held.weight = bnb.nn.Int8Params(rounded, requires_grad=False, has_fp16_weights=False)
    held.weight.CB, held.weight.SCB = held.weight.data, torch.empty(layer.out_features)
    return held


def held_bytes(backbone: nn.Module) -> int:
    """Bytes of all that a model holds: parameters and buffers once each, and the scales of 4-bit weights."""
    tensors: list[torch.Tensor] = [*backbone.parameters(), *backbone.buffers()]
    for parameter in backbone.parameters():
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
