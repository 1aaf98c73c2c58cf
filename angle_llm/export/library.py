"""A sentence-transformers folder, used through the library itself: what its users get.

The library is optional (`pip install 'angle_llm[export]'`) and imported when such a folder is opened, not before. It runs
with `trust_remote_code` off and without the network.
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
"""What every folder of the library holds."""


class MissingLibraryError(RuntimeError):
    """sentence-transformers is needed, and is not installed."""


@dataclass(frozen=True)
class ExportFacts:
    """What an exported folder says of itself in `EXPORT_NAME`; its tokenizer and the library's files do it."""

    prompt: PromptTemplate
    pooling: str
    max_length: int

    def write(self, folder: Path, **more: Any) -> None:
        """Writes the facts, and `more`, into a folder."""
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
        """Reads them; None for a folder from elsewhere.

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
    """Whether a folder is one of sentence-transformers, and no saved encoder."""
    return (Path(path).expanduser() / MODULES_NAME).is_file() and not is_saved_encoder(path)


def check_library() -> None:
    """Raises `MissingLibraryError` where sentence-transformers is not installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        raise MissingLibraryError(
            "this folder is compared as sentence-transformers uses it, and that library is not installed. Install it: "
            "pip install 'angle_llm[export]'. (An export can be written without it: --no-verify.)"
        )


class LibraryModel:
    """A folder as `SentenceTransformer(folder)` opens it, computing in float32 with the values it has."""

    def __init__(self, path: str | Path, device: str | None = None) -> None:
        """Opens the folder.

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
        """Of the stored weights."""
        self.model.float()

    @property
    def max_length(self) -> int:
        """Tokens at most, as the library has it."""
        return int(self.model.max_seq_length)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids the library's tokenizer gives, text by text."""
        return [self.model.tokenizer(text, truncation=True)["input_ids"] for text in texts]

    def encode(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """`model.encode(texts)` with no further argument but that no bar is drawn: (N, D) float32."""
        rows_ND: np.ndarray[Any, np.dtype[np.float32]] = self.model.encode(list(texts), show_progress_bar=False)
        return rows_ND
