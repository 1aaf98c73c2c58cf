"""A sentence-transformers folder, opened with the library itself.

The library is optional (`pip install 'angle_llm[export]'`) and imported when a folder is opened, with
`trust_remote_code` off and without the network.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.io import json_text
from angle_llm.model.checks import EXPORT_NAME, ArtifactError, is_saved_encoder
from angle_llm.prompts import PromptTemplate

LIBRARY = "sentence-transformers"
MODULES_NAME = "modules.json"
"""File in every folder of the library."""


class MissingLibraryError(RuntimeError):
    """sentence-transformers is not installed."""


@dataclass(frozen=True)
class ExportFacts:
    """Prompt, pooling and length of an exported folder, as recorded in `EXPORT_NAME`."""

    prompt: PromptTemplate
    pooling: str
    max_length: int

    def write(self, folder: Path, **more: Any) -> None:
        """Write the facts, and `more`, into a folder."""
        values = {
            "format_version": 1,
            "form": LIBRARY,
            "prompt": self.prompt.to_dict(),
            "pooling": self.pooling,
            "max_length": self.max_length,
            **more,
        }
        (folder / EXPORT_NAME).write_text(json_text(values), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ExportFacts | None:
        """Read the facts; None for a folder of other origin.

        Raises:
            ArtifactError: if the file is damaged.
        """
        path = folder / EXPORT_NAME
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            prompt = PromptTemplate.from_dict(values["prompt"], where=str(path))
            return cls(prompt, str(values["pooling"]), int(values["max_length"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{path} is damaged ({error}). Export the encoder again.") from error


def is_library_folder(path: str | Path) -> bool:
    """Whether a folder is a sentence-transformers folder and not a saved encoder."""
    return (Path(path).expanduser() / MODULES_NAME).is_file() and not is_saved_encoder(path)


def check_library() -> None:
    """Raise `MissingLibraryError` if sentence-transformers is not installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingLibraryError(
            "the comparison needs sentence-transformers, which is not installed: pip install 'angle_llm[export]'. "
            "--no-verify writes an export without it."
        )


class LibraryModel:
    """`SentenceTransformer(folder)` with its stored values, computing in float32."""

    def __init__(self, path: str | Path, device: str | None = None) -> None:
        """Open the folder.

        Raises:
            MissingLibraryError: if sentence-transformers is not installed.
            ArtifactError: for a damaged folder.
        """
        check_library()
        folder = Path(path).expanduser()
        self.facts = ExportFacts.read(folder)
        library: Any = importlib.import_module("sentence_transformers")
        self.model: Any = library.SentenceTransformer(
            str(folder), device=device, local_files_only=True, trust_remote_code=False
        )
        self.dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        """Dtype of the stored weights."""
        self.model.float()

    @property
    def max_length(self) -> int:
        """Maximum number of tokens."""
        return int(self.model.max_seq_length)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        return [self.model.tokenizer(text, truncation=True)["input_ids"] for text in texts]

    def encode(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """`model.encode(texts)`: (N, D) float32."""
        rows_ND: np.ndarray[Any, np.dtype[np.float32]] = self.model.encode(list(texts), show_progress_bar=False)
        return rows_ND
