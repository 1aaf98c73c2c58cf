"""The text model of a composite model, such as Gemma-3 with a vision tower: its configuration and the names of its tensors.

    model.vision_tower.…                                 a composite model: towers, which are never read, adapted or saved,
    model.language_model.layers.0.self_attn.q_proj       and a text model
                         layers.0.self_attn.q_proj       the text model that this package opens
    base_model.model.model.language_model.layers.0.…     a saved adapter, for peft and vLLM on the composite model

In a composite model, a text passes through the text model only, so the vectors are equal.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from angle_llm.model.source.checks import ArtifactError

COMPOSITE = "composite_model"
"""Name of the attribute of a backbone that holds its `Composite`, if the backbone is the text model of a composite model."""
TEXT_PREFIX = r"^(model\.)?(language_model|text_model)\.(model\.)?"
"""Pattern of the part of a tensor name in a composite model that is not in the name in the text model."""
_PATHS = {
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm", "granite_docling", "modernvbert"), "model.text_model"),
    **dict.fromkeys(("clip", "pe_audio", "tipsv2", "ultravbert", "vision-text-dual-encoder"), "model.text_model"),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo", "llama4"), "language_model.model"),
}
"""Model type → path of the text model in the class with a head, if it is not `model.language_model`."""
_EQUAL_TYPES = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"
}  # fmt: skip
"""Text model → model type with the same tensors and vectors, which more programs open.

The text model has three positions for each token (mrope). In a text they are equal, so the rotation is the usual one.
"""
_TOWERS = {"vision_config", "audio_config", "vq_config"}


class Composite(NamedTuple):
    """A composite model that a text model was read from."""

    model_class: str
    """Name of its class in `transformers`, in which the path is valid."""
    path: str
    """Path of the text model in this class, such as `model.language_model`."""


def text_name(name: str) -> str:
    """Return the name in the text model of a tensor or layer of a composite model; return any other name unchanged."""
    return re.sub(TEXT_PREFIX, "", name)


def text_part(config: Any, name: str) -> tuple[Any, Composite | None]:
    """Return the configuration of the text model of a composite model, and the composite model; else `config` and None.

    `name` is for the message.

    Raises:
        ArtifactError: for a composite model whose text model cannot be opened alone, or that is stored quantized.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    # Models that are not composite.
    towers = [part for part in type(config).sub_configs if part in _TOWERS and getattr(config, part) is not None]
    try:
        text = config.get_text_config()
    except ValueError:  # several text models, as in MusicGen
        text = None
    if config.is_encoder_decoder or (text is config and not towers):
        return config, None
    # Composite models that cannot be opened.
    mapping: Any = transformers.MODEL_MAPPING
    is_transposed = config.model_type == "qwen3_vl_moe"  # transformers transposes the experts of the whole model only
    if text is config or type(text) not in mapping or type(config) not in mapping or is_transposed:
        raise ArtifactError(
            f"{name} is a multimodal model of type {config.model_type}, and transformers cannot open its text model alone. Use "
            "the language model that it was made from, or another multimodal model (Gemma-3, Qwen3-VL, Mistral-3, …)."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ArtifactError(
            f"{name} is a multimodal model that is stored quantized, so its text model cannot be opened alone. Use the "
            "original model; --model.bits 4 or 8 quantizes its text model."
        )
    # Class and path of the composite model, and the configuration of the text model.
    without_head = MODEL_MAPPING_NAMES[config.model_type]
    model_class = (config.architectures or [without_head])[0]
    path = _PATHS.get(config.model_type, "model.language_model")
    path = path.removeprefix("model.") if model_class == without_head else path
    text.dtype = config.dtype or text.dtype
    if hasattr(config, "tie_word_embeddings"):
        text.tie_word_embeddings = config.tie_word_embeddings
    text._name_or_path = config._name_or_path
    return _as_equal_type(text), Composite(model_class, path)


def _as_equal_type(text: Any) -> Any:
    """Return the configuration of the equal model type in `_EQUAL_TYPES`; return any other configuration unchanged."""
    from transformers import CONFIG_MAPPING

    if text.model_type not in _EQUAL_TYPES:
        return text
    config_class = CONFIG_MAPPING[_EQUAL_TYPES[text.model_type]]
    supported = config_class().to_dict().keys() - {"model_type", "transformers_version"}
    values = {key: value for key, value in text.to_dict().items() if key in supported}
    rope = values["rope_parameters"]
    # `type` is the name in older files, `mrope` for Qwen2.5-VL, and contradicts `rope_type`.
    unused = {"type", *(key for key in rope if key.startswith("mrope_"))}
    values["rope_parameters"] = {key: value for key, value in rope.items() if key not in unused}
    equal = config_class(**values)
    equal._name_or_path = text._name_or_path
    return equal
