"""Each distinct text of all tasks goes through the encoder once; a task then takes the rows it needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Encode: TypeAlias = Callable[[list[str]], NDArray[np.floating[Any]]]
"""Sentences (N,) to rows (N, D), in the order given."""


class Encoder(Protocol):
    """What has an `encode` that can be told how much to compute at once, such as `SentenceEncoder`."""

    def encode(
        self, texts: Sequence[str], *, micro_batch_tokens: int | None = None, show_progress: bool = False
    ) -> NDArray[np.floating[Any]]:
        """One row per text, in the order given."""
        ...


@dataclass(frozen=True)
class EncodedTexts:
    """Distinct texts in order of first appearance and their vectors: text t is row `row_of[t]` of `embeddings_ND`."""

    row_of: dict[str, int]
    embeddings_ND: NDArray[np.floating[Any]]
    seconds: float

    def rows(self, texts: Iterable[str]) -> NDArray[np.floating[Any]]:
        """The vectors (M, D) of the texts, in their order, repeats included."""
        return self.embeddings_ND[np.array([self.row_of[text] for text in texts], dtype=np.intp)]

    @property
    def dimensions(self) -> int:
        """D, the length of a vector."""
        return int(self.embeddings_ND.shape[1])

    @property
    def zero_vectors(self) -> int:
        """How many texts became the zero vector, which has no direction."""
        return int((~self.embeddings_ND.any(axis=1)).sum())


def encode_distinct(encode: Encode, texts: Iterable[str]) -> EncodedTexts:
    """Calls `encode` exactly once, with the distinct texts in order of first appearance.

    Raises `ValueError` when there is no text, or what `encode` returned is not one finite row of numbers per text.
    """
    distinct = list(dict.fromkeys(texts))
    if not distinct:
        raise ValueError("no texts to encode: at least one is needed.")
    started = time.perf_counter()
    embeddings_ND = np.asarray(encode(list(distinct)))
    seconds = time.perf_counter() - started
    _check(embeddings_ND, distinct)
    return EncodedTexts({text: row for row, text in enumerate(distinct)}, embeddings_ND, seconds)


def _check(embeddings_ND: NDArray[Any], texts: list[str]) -> None:
    if embeddings_ND.ndim != 2 or embeddings_ND.shape[0] != len(texts) or embeddings_ND.shape[1] == 0:
        raise ValueError(
            f"encode must return one row per text, shape ({len(texts)}, D), in the order given; it returned shape "
            f"{embeddings_ND.shape}."
        )
    if not np.issubdtype(embeddings_ND.dtype, np.floating):
        raise ValueError(f"encode must return floating-point rows; it returned {embeddings_ND.dtype}.")
    bad = np.flatnonzero(~np.isfinite(embeddings_ND).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(texts)} vectors hold NaN or infinity, the first for {texts[bad[0]]!r}. No figure is "
            "given for such an encoder; look for an overflow (float16?), a broken adapter, or a run that diverged."
        )
