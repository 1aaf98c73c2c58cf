"""Encoders without a neural network, files, and a parser of Markdown tables."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tyro
from torch import nn

from angle_llm.prompts import PromptTemplate, Side, SidePrompts


def hashed_words(texts: Sequence[str]) -> np.ndarray:
    """Counts of words hashed into 512 columns."""
    rows = np.zeros((len(texts), 512), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in text.lower().split():
            row[zlib.crc32(word.encode()) % 512] += 1
    return rows


class Words:
    """An encoder as the commands need it; records how it was opened and called."""

    prompts = SidePrompts(PromptTemplate("plain", "{text}"), PromptTemplate("plain", "{text}"))
    side: Side | None = None
    prompt = prompts.query
    pooling = "sum"
    max_length = 77
    model = nn.Linear(1000, 2000, bias=False)
    scale = 1.0
    """0 gives zero vectors."""

    def __init__(self, path: str = "", /, **options: object) -> None:
        self.opened = (path, options)
        self.calls: list[dict[str, object]] = []

    def encode(
        self,
        texts: Sequence[str],
        *,
        micro_batch_tokens: int | None = None,
        show_progress: bool = False,
        instruction: Sequence[str | None] = (),
    ) -> np.ndarray:
        self.calls.append({"texts": len(texts), "micro_batch_tokens": micro_batch_tokens})
        return self.scale * hashed_words(texts)


def recorded(encode: Callable[[list[str]], np.ndarray], calls: list[list[str]]) -> Callable[[list[str]], np.ndarray]:
    """`encode` that appends the texts of each call."""

    def recording(texts: list[str]) -> np.ndarray:
        calls.append(list(texts))
        return encode(texts)

    return recording


def parsed(kind: type, *arguments: object) -> object:
    """Settings as the command line gives them."""
    return tyro.cli(kind, args=list(map(str, arguments)))


def opens(monkeypatch: pytest.MonkeyPatch, opened: Callable[..., object]) -> None:
    """Let the commands open encoders by `opened`, a function of model and options."""
    monkeypatch.setattr("angle_llm.model.encoder.SentenceEncoder.from_pretrained", opened)


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    """Write a file, its folders too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def rows_of(report: str) -> dict[str, list[str]]:
    """Cells of the first table by the first cell of their row."""
    lines = report.split("\n\n")[0].split("\n")
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in cells}
