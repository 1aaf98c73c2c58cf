"""Flags that open an encoder, for all commands that embed texts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from angle_llm.settings.parsing import Positive


@dataclass(frozen=True, kw_only=True)
class EncoderName:
    """The flag that names the encoder to load."""

    model: str
    """The encoder to load: a saved directory, a model folder, an adapter folder of peft, a hub id (ID, or ID@REVISION),
    a .gguf file, or package:NAME/path/inside."""


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """Flags that set how an encoder is loaded, and how texts are encoded."""

    prompt: str | dict[str, str] | None = None
    """Prompt name or YAML file, or `query NAME document NAME`. None: as saved with the model, else summarize_one_word
    for a causal model and plain for a bidirectional one."""
    instruction: str | None = None
    """Instruction of texts without one of their own, for a prompt with {instruction}. None: the default of the prompt."""
    pooling: str | None = None
    """Pooling of token states to a vector: last, mean, cls, … None: as saved with the model, else last for a causal
    model and mean for a bidirectional one."""
    max_length: Positive | None = None
    """Maximum tokens of a text with its prompt. None: as saved with the model, else 512 or the number of positions of
    the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights. auto: the dtype of training for a saved encoder, the stored dtype for a model."""
    bits: Literal["auto", 4, 8, "fp8"] | None = "auto"
    """Quantise the linear layers to 4 or 8 bits, which needs bitsandbytes, or to fp8. auto: as in training for a saved encoder; a
    model is not quantised."""
    attention: Literal["bidirectional"] | None = None
    """bidirectional: tokens of a decoder-only model attend to later tokens too. None: as saved with the model, else as
    the architecture."""
    device: str | None = None
    """Device on which texts are encoded, such as cpu or cuda:0. None: the best available device."""

    def options(self) -> dict[str, Any]:
        """Return these settings as keyword arguments of `SentenceEncoder.from_pretrained`."""
        return {item.name: getattr(self, item.name) for item in fields(EncoderOptions)}
