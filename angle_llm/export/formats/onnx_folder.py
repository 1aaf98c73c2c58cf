"""A folder of `angle-llm export --to onnx`, computed by onnxruntime and tokenizers alone, without torch.

Legend: N texts, D dimensions.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.prompts import Side, SidePrompts
from angle_llm.settings.parsing import need_library

GRAPH_NAME = "onnx/model.onnx"
"""The graph, where the ONNX backend of sentence-transformers and transformers.js look for it."""
FACTS_NAME = "angle_llm_export.json"
"""`checks.EXPORT_NAME`, whose module imports torch."""
_UNIT_LENGTH = 1e-3
"""Largest deviation from length 1 of a normalized vector: float32 gives 1e-6, int8 weights change only its direction."""

Rows = np.ndarray[Any, np.dtype[np.float32]]


def is_onnx_folder(path: str | Path) -> bool:
    """Return whether a path is a folder of `export_onnx`. It also looks like a sentence-transformers folder."""
    folder = Path(path).expanduser()
    return (folder / FACTS_NAME).is_file() and (folder / GRAPH_NAME).is_file()


def onnx_usage(folder: Path) -> str:
    """Return Python code that encodes texts with onnxruntime and tokenizers, in Markdown."""
    library = json.loads((folder / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    heads = {name: head for name, head in library["prompts"].items() if head}
    texts = "[head + text for text in texts]" if heads else "texts"
    shown = f"head = {next(iter(heads.values()))!r}  # of {', '.join(map(repr, heads))}: {heads}\n" if heads else ""
    return f"""```python
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")  # cuts and pads{"" if heads else ", and adds the prompt"}
session = onnxruntime.InferenceSession("{GRAPH_NAME}")
{shown}found = tokenizer.encode_batch({texts})
ids, mask = (np.array([getattr(one, name) for one in found]) for name in ("ids", "attention_mask"))
(rows,) = session.run(["sentence_embedding"], {{"input_ids": ids, "attention_mask": mask}})
```"""


class OnnxModel:
    """An exported ONNX folder with the interface of `SentenceEncoder`, computed by onnxruntime on the CPU."""

    dtype = "float32"
    """Dtype of activations, and of weights unless `bits` is 8."""

    def __init__(self, path: str | Path, *, texts_together: int = 32) -> None:
        """Open the folder. `texts_together` is the batch size.

        Raises:
            MissingLibraryError: if onnxruntime is not installed.
            ValueError: for a damaged folder.
        """
        need_library("onnxruntime", "an ONNX folder", "onnx")
        runtime: Any = importlib.import_module("onnxruntime")
        tokenizers: Any = importlib.import_module("tokenizers")
        folder = Path(path).expanduser()
        try:
            facts = json.loads((folder / FACTS_NAME).read_text(encoding="utf-8"))
            library = json.loads((folder / "config_sentence_transformers.json").read_text(encoding="utf-8"))
            self.prompts = SidePrompts.from_dict(facts["prompt"], where=str(folder / FACTS_NAME))
            self.pooling, self.bits = str(facts["pooling"]), facts["bits"]
            self._heads: dict[str, str] = library["prompts"]
            self._default = library["default_prompt_name"]
            self.session: Any = runtime.InferenceSession(str(folder / GRAPH_NAME), providers=["CPUExecutionProvider"])
            self.tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.max_length = int(self.tokenizer.truncation["max_length"])
        except Exception as error:  # onnxruntime and tokenizers raise errors of many classes
            raise ValueError(f"{folder} is not a complete ONNX folder ({error}). Export the encoder again.") from error
        self.texts_together = texts_together
        self.side: Side | None = None
        lengths = np.linalg.norm(self.encode(["a", "Someone is eating."]), axis=1)
        self.normalize = bool(np.abs(lengths - 1).max() < _UNIT_LENGTH)
        """Whether vectors have length 1, measured: a cosine does not show it."""

    def for_side(self, side: Side) -> OnnxModel:
        """Return a model that encodes all texts as queries, or as documents."""
        sided = copy.copy(self)
        sided.side = side
        return sided

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
        for first in range(0, len(order), self.texts_together):
            numbers = order[first : first + self.texts_together]
            batch = self.tokenizer.encode_batch([self._head + texts[number] for number in numbers])
            ids, mask = (np.array([getattr(one, name) for one in batch]) for name in ("ids", "attention_mask"))
            inputs = {"input_ids": ids, "attention_mask": mask}
            rows_ND[numbers] = self.session.run(["sentence_embedding"], inputs)[0]
        return rows_ND
