"""Flags that several commands share: to open an encoder, and to read the rows of data files (except for training)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from angle_llm.settings.parsing import Positive, settings_class
from angle_llm.settings.train import DataSource


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


@settings_class
class CommandSource(DataSource):
    """A dataset that a command other than training reads, and how its rows are read."""

    FLAGS: ClassVar[str] = "--"

    encoding: str = "utf-8"


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Flags that set how the rows of data files are read."""

    format: str = "auto"
    """Format of the rows: scored_pair, positive_pair, triple, group, nli_pairs, nli_triples, labelled_text.
    auto: detected from the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Pairs of FIELD COLUMN, such as `text1 question text2 answer`. Usual column names are recognised without this."""
    score_range: tuple[float, float] | None = None
    """The score that means *unrelated* and the score that means *same meaning*, such as 0 5.
    None: 0 1."""
    where: dict[str, str | bool | int | float] = field(default_factory=dict)
    """Pairs of COLUMN VALUE. Only rows with these values are read."""
    encoding: str = "utf-8"
    """Character encoding of text files, such as utf-8 or cp1252. Output files are UTF-8."""

    def source_of(self, path: str, **more: Any) -> CommandSource:
        """Return the settings of a dataset: the path of a file, these settings, and further fields in `more`."""
        shared = {item.name: getattr(self, item.name) for item in fields(RowSettings)}
        return CommandSource(path=path, **shared, **more)
