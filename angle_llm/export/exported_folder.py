"""Exported sentence-transformers folders: the recorded facts, and the folder opened with sentence-transformers.

The library is optional (`pip install 'angle_llm[export]'`) and imported when a folder is opened. Folders are opened
without `trust_remote_code` and without the network.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self

from angle_llm import __version__
from angle_llm.io import write_json
from angle_llm.model.source.checks import EXPORT_NAME, as_artifact_error, read_json
from angle_llm.prompts import Side, SidePrompts
from angle_llm.settings.parsing import need_library

LIBRARY = "sentence-transformers"
"""Name of the library, and name of the kind of stored encoder that the library opens."""


@dataclass(frozen=True)
class ExportFacts:
    """Prompt, pooling, maximum length and other facts of an exported sentence-transformers folder.

    The folder stores the facts in the file `EXPORT_NAME`.
    """

    prompt: SidePrompts
    pooling: str
    max_length: int
    plain_names: Sequence[str] = ()
    """Names of added tokens that the exported tokenizer, unlike the encoder, splits like plain text."""
    normalize: bool = False
    """Whether embeddings have length 1."""
    head: str | None = None
    """Prompt that sentence-transformers adds before a text, and that other programs must send. None: the tokenizer adds
    it."""
    as_llama: bool = False
    """Whether a Qwen2 model is stored as a LLaMA model."""
    dense: int = 0
    """Number of Dense modules that are applied to the pooled state."""
    bits: int | None = None
    """Bits of quantised weights; None for other weights."""

    def write(self, folder: Path) -> None:
        """Write the facts of the exported folder to the JSON file `EXPORT_NAME` in `folder`."""
        values = {**vars(self), "prompt": self.prompt.to_dict(), "angle_llm": __version__}
        write_json(folder / EXPORT_NAME, {"format_version": 1, "form": LIBRARY, **values})

    @classmethod
    def read(cls, folder: Path) -> ExportFacts | None:
        """Read the facts of an exported folder; return None if this package did not export the folder.

        Raises:
            ArtifactError: if `EXPORT_NAME` is damaged.
        """
        path = folder / EXPORT_NAME
        if not path.is_file():
            return None
        stored = read_json(path)
        with as_artifact_error(path):
            values = {field.name: stored[field.name] for field in fields(cls) if field.name in stored}
            return cls(**values | {"prompt": SidePrompts.from_dict(stored["prompt"], where=str(path))})


class ProgramModel:
    """A model that another program computes, with the interface of `SentenceEncoder`."""

    bits: int | None = None
    side: Side | None = None

    def for_side(self, side: Side) -> Self:
        """Return a model that encodes all texts as queries or as documents; the weights are shared."""
        sided = copy.copy(self)
        sided.side = side
        return sided


class SentenceTransformersModel(ProgramModel):
    """A sentence-transformers folder with the interface of `SentenceEncoder`, for comparison with other encoders.

    The model has the stored weights and computes in float32.
    """

    def __init__(self, path: str | Path, *, device: str | None, prompt: SidePrompts, pooling: str) -> None:
        """Open a folder with sentence-transformers.

        `prompt` and `pooling` are assumed if this package did not export the folder.

        Raises:
            MissingLibraryError: if sentence-transformers is not installed.
            ArtifactError: for a damaged folder.
        """
        need_library("sentence_transformers", "a folder of sentence-transformers", "export")
        folder = Path(path).expanduser()
        facts = ExportFacts.read(folder)
        library: Any = importlib.import_module("sentence_transformers")
        self.model: Any = library.SentenceTransformer(
            str(folder), device=device, local_files_only=True, trust_remote_code=False
        )
        self.dtype = next(self.model.parameters()).dtype
        """Dtype of the stored weights."""
        self.model.float()
        self.prompts, self.pooling = (facts.prompt, facts.pooling) if facts else (prompt, pooling)
        self.max_length = int(self.model.max_seq_length)
        self.normalize = any(type(module).__name__ == "Normalize" for module in self.model)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, including the prompt."""
        head = self.model.prompts.get(self.side or self.model.default_prompt_name, "")
        return [self.model.tokenizer(head + text, truncation=True)["input_ids"] for text in texts]

    def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the embeddings (N, D) in float32. Options of `SentenceEncoder.encode` have no effect."""
        encode = getattr(self.model, f"encode_{self.side}" if self.side else "encode")
        rows_ND: np.ndarray[Any, np.dtype[np.float32]] = encode(list(texts), show_progress_bar=False)
        return rows_ND
