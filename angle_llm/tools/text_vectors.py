"""Embed the texts of mining and scoring once, store the vectors as .npy files, and memory-map them.

Dimensions: E texts of a `MiningData` encoded as documents, Q texts encoded as queries, D columns of a vector. A text
number is the index of a text in `MiningData.texts`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from angle_llm.data.corpus import Corpus, CorpusText, Survey, TextBlock
from angle_llm.data.formats import DataError
from angle_llm.data.positives import MiningData
from angle_llm.data.readers import RowSource
from angle_llm.model.vectors import Array, ShardOptions, VectorForm, encoder_identity
from angle_llm.tools.embed import embed_corpus, untokenizable

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

SHARD_ROWS = 8192
"""Number of texts embedded at a time; after a kill, at most this many are embedded again. Another number can change the
last digits of the vectors."""
_BLOCK_TEXTS = 8192
"""Number of texts whose tokens or vectors are checked at a time."""


@dataclass(frozen=True)
class TextVectors:
    """Vectors of the texts of a `MiningData`, in memory or memory-mapped, looked up by the index of a text."""

    document_ED: Array
    """(E, D) vectors of texts encoded as documents."""
    query_QD: Array | None = None
    """(Q, D) vectors of texts encoded as queries. None: queries and documents have the same prompt, and `document_ED`
    contains all texts."""
    document_texts: Array | None = None
    """(E,) indices into `MiningData.texts` of the rows of `document_ED`, ascending. None: row i is text i."""
    query_texts: Array | None = None
    """(Q,) indices into `MiningData.texts` of the rows of `query_QD`, ascending."""

    def document_rows(self, texts: Sequence[int] | Array) -> Array:
        """Return the row indices in `document_ED` of texts, given as indices into `MiningData.texts`."""
        return np.asarray(texts) if self.document_texts is None else np.searchsorted(self.document_texts, texts)

    def documents(self, texts: Sequence[int] | Array) -> Array:
        """Return the document vectors (N, D) of N texts, given as indices into `MiningData.texts`."""
        found: Array = self.document_ED[self.document_rows(texts)]
        return found

    def queries(self, texts: Sequence[int] | Array) -> Array:
        """Return the query vectors (N, D) of N texts, given as indices into `MiningData.texts`."""
        if self.query_QD is None or self.query_texts is None:
            return self.documents(texts)
        found: Array = self.query_QD[np.searchsorted(self.query_texts, texts)]
        return found


def vectors_of(material: MiningData, encoder: SentenceEncoder, name: str, folder: Path) -> TextVectors:
    """Return the vectors of all texts, memory-mapped from FOLDER/vectors-DIGEST.npy; embed texts if a file is missing.

    If queries and documents have different prompts, the queries are encoded as queries, and their positives, negatives
    and candidates as documents. `name` is the name or path that the encoder was loaded from. `SHARD_ROWS`
    texts are embedded at a time.

    Raises:
        DataError: for a text without tokens, before any text is embedded; for a vector that is 0 or not finite.
        FolderError: if another process is making the files.
    """
    if not encoder.prompts.differ:
        return TextVectors(_embedded(material, range(len(material.texts)), encoder, name, folder))
    queries, documents = sorted({query.text for query in material.queries}), material.documents()
    query_QD = _embedded(material, queries, encoder.for_side("query"), name, folder)
    document_ED = _embedded(material, documents, encoder.for_side("document"), name, folder)
    return TextVectors(document_ED, query_QD, np.array(documents), np.array(queries))


@dataclass(frozen=True)
class _Texts(Corpus):
    """Texts of a `MiningData` as a corpus for `embed_corpus`. Errors name the place of a text in the user's data."""

    material: MiningData | None = None
    numbers: Sequence[int] = ()

    def blocks(self, size: int, wanted: Callable[[int], bool]) -> Iterator[TextBlock]:
        """Yield blocks of `size` texts, only those for which `wanted(block number)` is True."""
        assert self.material is not None
        texts, place = self.material.texts, self.material.place
        for number, first in enumerate(range(0, len(self.numbers), size)):
            if wanted(number):
                some = self.numbers[first : first + size]
                yield TextBlock(number, first, [CorpusText(texts[text], None, place(text)) for text in some])


def _embedded(material: MiningData, numbers: Sequence[int], encoder: SentenceEncoder, name: str, folder: Path) -> Array:
    """Return the vectors (N, D) of N texts, memory-mapped from a file; if the file is missing, embed the texts first.

    `numbers` are indices into `MiningData.texts`.

    Raises:
        DataError: for a text without tokens, or a vector that is 0 or not finite.
    """
    texts = [material.texts[number] for number in numbers]
    made_from = json.dumps([encoder_identity(encoder), SHARD_ROWS, texts])
    digest = hashlib.sha256(made_from.encode()).hexdigest()
    target = folder / f"vectors-{digest[:16]}.npy"
    blocks = range(0, len(numbers), _BLOCK_TEXTS)
    if not target.is_file():
        for first in blocks:  # takes a hundredth of the time of embedding
            _check_tokens(material, encoder, numbers[first : first + _BLOCK_TEXTS])
        corpus = _Texts(RowSource("texts", []), "text", material=material, numbers=numbers)
        survey = Survey(len(numbers), 0, [{"sha256": digest}], [])
        form, options = VectorForm(encoder.dimensions, encoder.dimensions), ShardOptions("bare npy", SHARD_ROWS)
        embed_corpus(corpus, survey, encoder, name, form, options, target.with_suffix(".parts"), target=target)
    found: Array = np.load(target, mmap_mode="r", allow_pickle=False)
    for first in blocks:
        some = found[first : first + _BLOCK_TEXTS]
        bad = ~(np.isfinite(some).all(axis=1) & some.any(axis=1))
        if bad.any():
            raise DataError(
                f"{material.place(numbers[first + int(bad.argmax())])}: its vector is 0 or not finite, so it has no cosine. "
                "Load the model in bfloat16 or float32, check its weights, or remove the row"
            )
    return found


def _check_tokens(material: MiningData, encoder: SentenceEncoder, some: Sequence[int]) -> None:
    """Raise `DataError` for the first text without tokens; `some` are indices into `MiningData.texts`."""
    try:
        encoder.tokenize([material.texts[number] for number in some])
    except ValueError:
        for number in some:
            if reason := untokenizable(encoder, material.texts[number]):
                raise DataError(f"{material.place(number)}: {reason}. Fix it, or remove its row") from None
        raise
