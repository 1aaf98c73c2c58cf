"""Tiny composite models, of a text model and towers: random weights from a config and a seed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tiny_tokenizers import TOKENIZERS, VOCABULARY
from torch import nn
from transformers import AutoModel, AutoModelForImageTextToText

POSITIONS = 256
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
}
_GEMMA = _TEXT | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_PER_LAYER = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
}
_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
_MROPE = {"rope_type": "default", "rope_theta": 20_000.0, "mrope_section": [1, 1, 2]}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3_000.0},
}
_HYBRID = _TEXT | {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": _MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
}  # fmt: skip


def _composite(config: str, text: dict[str, Any], **towers: Any) -> Callable[[], Any]:
    """Return a function that makes a configuration; it fails if the installed transformers has no such model."""
    return lambda: getattr(transformers, config)(text_config=text, **towers)


_no_towers = partial(_composite, vision_config=None, audio_config=None)
_mistral = partial(_composite, "Mistral3Config", vision_config=_TOWER | {"model_type": "pixtral"})
_qwen = partial(_composite, vision_config=_QWEN_TOWER)

CONFIGS: dict[str, Callable[[], Any]] = {
    "gemma3": _composite("Gemma3Config", _GEMMA | {"rope_parameters": _GEMMA_ROPE}, vision_config=_TOWER, mm_tokens_per_image=4),
    "gemma3n": _composite(
        "Gemma3nConfig",
        _GEMMA | _PER_LAYER | {
            "intermediate_size": [48] * 4, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]
        },
    ),
    "gemma4": _no_towers("Gemma4Config", _GEMMA | _PER_LAYER | {"global_head_dim": 16}),
    "qwen2_vl": _composite(
        "Qwen2VLConfig", _TEXT | {"rope_parameters": _MROPE},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 1},
    ),
    "qwen2_5_vl": _composite(
        "Qwen2_5_VLConfig", _TEXT | {"rope_parameters": _MROPE}, vision_config=_QWEN_TOWER | {"fullatt_block_indexes": [0]}
    ),
    "qwen3_vl": _composite(
        "Qwen3VLConfig", _TEXT | {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
        vision_config=_QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": _qwen("Qwen3_5Config", _HYBRID),
    "mistral3": _mistral(_TEXT | {"model_type": "mistral", "sliding_window": None}),
    "ministral3": _mistral(_TEXT | {"model_type": "ministral3", "rope_parameters": _YARN}),
    "smolvlm": _composite("SmolVLMConfig", _TEXT | {"model_type": "llama"}, vision_config=_TOWER),
    "llava": _composite(
        "LlavaConfig", _TEXT | {"model_type": "llama"}, vision_config=_TOWER | {"model_type": "clip_vision_model"}
    ),
    "embedding_gemma2": _no_towers(
        "EmbeddingGemma2Config",
        _TEXT | {
            "num_hidden_layers": 4, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 6,
            "sliding_window_pattern": 2, "hidden_size_per_layer_input": 8, "embedding_dim": 48,
        },
    ),
}  # fmt: skip
"""Name → configuration of a composite model."""
TEXT_TYPES = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3", "qwen3_5": "qwen3_5_text", "mistral3": "mistral", "ministral3": "ministral3", "smolvlm": "llama",
    "llava": "llama", "embedding_gemma2": "embedding_gemma2_text",
}  # fmt: skip
"""Name → model type of the text model that is opened."""


@contextmanager
def no_tower_of_timm() -> Iterator[None]:
    """Replace the towers of Gemma-3n by a linear layer inside this context, because they need the package timm."""
    original = AutoModel.from_config

    def make(config: Any) -> nn.Module:
        return original(config) if config.model_type == "gemma3n_text" else nn.Linear(2, 2)

    with patch("transformers.models.gemma3n.modeling_gemma3n.AutoModel", SimpleNamespace(from_config=make)):
        yield


def tiny_composite(name: str) -> Any:
    """Return a composite model with its language-model head, if it has one; also norms and biases are random."""
    auto: Any = AutoModel if name == "embedding_gemma2" else AutoModelForImageTextToText
    torch.manual_seed(0)
    with no_tower_of_timm():
        model = auto.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_composite(name: str, folder: Path) -> tuple[Path, Any]:
    """Write the folder of a composite model as published; return the folder and the composite model without its head."""
    model = tiny_composite(name)
    model.save_pretrained(folder)
    TOKENIZERS["qwen" if "qwen" in name else "llama2"]().save_pretrained(folder)
    return folder, getattr(model, "model", model)
