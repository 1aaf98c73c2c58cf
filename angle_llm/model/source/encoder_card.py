"""The file `angle_llm.json` of a saved encoder (its card): prompt, pooling, maximum length, base of the adapter."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from angle_llm.io import json_text
from angle_llm.model.source.checks import CARD_NAME, ArtifactError, read_json
from angle_llm.prompts import SidePrompts

FORMAT_VERSION = 1


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class EncoderCard:
    """Contents of `angle_llm.json`: the settings that a saved encoder must be used with."""

    prompt: SidePrompts
    """Prompts of queries and documents. In JSON: one prompt for both, or {"query": …, "document": …}."""
    pooling: str
    max_length: int
    """Maximum number of tokens of a text, prompt and special tokens included."""
    dtype: str
    """Dtype of the base weights in training."""
    base: str | None
    """Base model of an adapter: path, hub id or `package:NAME/path`; None if the folder contains the whole model."""
    base_revision: str | None = None
    """Revision of the base, if `base` is a hub id."""
    base_fingerprint: str | None = None
    """Hash of the base weights before quantization (`weights_fingerprint`). Loading fails if the base has another hash."""
    bits: Literal[4, 8, "fp8"] | None = None
    """Bits of the base weights in training: 4 (NF4), 8 (int8), fp8 (e4m3), None if they were not quantized."""
    dimensions: Annotated[int, Ge(1)] | None = None
    """Number of first dimensions that a vector keeps; None: all."""
    layers: Annotated[int, Ge(1)] | None = None
    """Number of first layers of the base that the adapter uses; None: all."""
    normalize: bool = False
    """Whether vectors are scaled to length 1."""
    attention: Literal["bidirectional"] | None = None
    """Attention of a decoder-only model in training; None: the attention of the architecture."""
    dense: Annotated[int, Ge(0)] = 0
    """Number of Dense modules that are applied to the pooled state, in the folders 2_Dense, 3_Dense, …"""

    def write(self, folder: Path) -> None:
        """Write the card as `angle_llm.json` into a folder."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"prompt": self.prompt.to_dict()}
        (folder / CARD_NAME).write_text(json_text({"format_version": FORMAT_VERSION, **values}), encoding="utf-8")

    def check_base(self, fingerprint: str, dtype: str, folder: Path) -> None:
        """Check the fingerprint of the base, opened in `dtype`, of the adapter in a folder; raise `ArtifactError` if it differs.

        Rounding to float16 and then to the bfloat16 of the fingerprint is not rounding at once, so another dtype than in
        training is then not compared.
        """
        comparable = dtype == self.dtype or "float16" not in (dtype, self.dtype)
        if comparable and self.base_fingerprint not in (None, fingerprint):
            raise ArtifactError(
                f"{folder} was trained on weights with fingerprint {self.base_fingerprint}, but {self.base} has {fingerprint}. "
                f"Restore the original base, or correct `base` in {folder / CARD_NAME}."
            )

    @classmethod
    def read(cls, folder: Path) -> EncoderCard:
        """Read `angle_llm.json` in a folder.

        Raises:
            FileNotFoundError: if the file is missing.
            ArtifactError: if the file is malformed, or has another format version.
            SettingsError: if a prompt in the file is invalid.
        """
        path = folder / CARD_NAME
        values = read_json(path)
        if (version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise ArtifactError(
                f"{path}: expected format_version {FORMAT_VERSION}, got {version!r:.80}. Upgrade angle_llm, or save the "
                "encoder again with this version."
            )
        if isinstance(values.get("prompt"), dict):
            values["prompt"] = SidePrompts.from_dict(values["prompt"], where=str(path))
        try:
            return cls(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            keys = ", ".join(item.name for item in fields(cls))
            raise ArtifactError(
                f"{path}: `{problem['loc'][0]}`: {problem['msg']}. Expected the keys {keys}. Save the encoder again."
            ) from error
