"""A folder of `angle-llm export --to onnx`, computed by onnxruntime and tokenizers.

Legend: N texts, D dimensions.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from angle_llm.export.exported_folder import ExportFacts, ProgramModel
from angle_llm.model.source.checks import EXPORT_NAME, as_artifact_error, read_json
from angle_llm.settings.parsing import need_library

GRAPH_NAME = "onnx/model.onnx"
"""The graph, where the ONNX backend of sentence-transformers and transformers.js look for it."""

Rows = np.ndarray[Any, np.dtype[np.float32]]


_BATCH = 32
"""Number of texts that are encoded together."""


def is_onnx_folder(path: str | Path) -> bool:
    """Return whether a path is a folder of `export_onnx`. It also looks like a sentence-transformers folder."""
    folder = Path(path).expanduser()
    return (folder / EXPORT_NAME).is_file() and (folder / GRAPH_NAME).is_file()


def onnx_usage(folder: Path) -> str:
    """Return Python code that encodes texts with onnxruntime and tokenizers, in Markdown."""
    library = read_json(folder / "config_sentence_transformers.json")
    heads = library["prompts"]  # empty, or the prompts of both sides, of which one can be empty
    texts = "[head + text for text in texts]" if heads else "texts"
    head_line = f"head = {next(iter(heads.values()))!r}  # of {', '.join(map(repr, heads))}: {heads}\n" if heads else ""
    return f"""```python
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")  # cuts and pads{"" if heads else ", and adds the prompt"}
session = onnxruntime.InferenceSession("{GRAPH_NAME}")
{head_line}found = tokenizer.encode_batch({texts})
ids, mask = (np.array([getattr(one, name) for one in found]) for name in ("ids", "attention_mask"))
(rows,) = session.run(["sentence_embedding"], {{"input_ids": ids, "attention_mask": mask}})
```"""


class OnnxModel(ProgramModel):
    """An exported ONNX folder with the interface of `SentenceEncoder`, computed by onnxruntime on the CPU."""

    dtype = "float32"
    """Dtype of activations, and of weights unless `bits` is 8."""

    def __init__(self, path: str | Path) -> None:
        """Open the folder.

        Raises:
            MissingLibraryError: if onnxruntime is not installed.
            ArtifactError: for a folder with damaged files.
        """
        need_library("onnxruntime", "an ONNX folder (Python 3.11 or later)", "onnx")
        runtime: Any = importlib.import_module("onnxruntime")
        folder = Path(path).expanduser()
        facts = ExportFacts.read(folder)
        assert facts is not None  # `is_onnx_folder` has checked that the file exists
        library = read_json(folder / "config_sentence_transformers.json")
        self._heads: dict[str, str] = library["prompts"]
        self._default = library["default_prompt_name"]
        self.prompts, self.pooling = facts.prompt, facts.pooling
        self.normalize, self.bits = facts.normalize, facts.bits
        with as_artifact_error(folder):
            self.session: Any = runtime.InferenceSession(str(folder / GRAPH_NAME), providers=["CPUExecutionProvider"])
            self.tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.max_length = int((self.tokenizer.truncation or {})["max_length"])  # a KeyError is converted too

    @property
    def _head(self) -> str:
        """Prompt of the side that goes before each text; empty if the tokenizer of the folder adds the prompt."""
        return self._heads.get(self.side or "", self._heads.get(self._default, ""))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, prompt included, padding excluded."""
        return [self.tokenizer.encode(self._head + text).ids for text in texts]

    def encode(self, texts: Sequence[str], **_: Any) -> Rows:
        """Return the embeddings (N, D) in float32. Options of `SentenceEncoder.encode` have no effect.

        Batches hold texts with similar numbers of characters, and are padded as `tokenizer.json` says.
        """
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        rows_ND = np.empty((len(texts), self.session.get_outputs()[0].shape[1]), np.float32)
        for first in range(0, len(order), _BATCH):
            numbers = order[first : first + _BATCH]
            batch = self.tokenizer.encode_batch([self._head + texts[number] for number in numbers])
            ids, mask = (np.array([getattr(one, name) for one in batch]) for name in ("ids", "attention_mask"))
            inputs = {"input_ids": ids, "attention_mask": mask}
            rows_ND[numbers] = self.session.run(["sentence_embedding"], inputs)[0]
        return rows_ND
