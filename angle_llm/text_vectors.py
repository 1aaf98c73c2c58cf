"""Vectors of the texts of mining and scoring: embedded once, stored as .npy files, and mapped from disk.

Legend: E texts of a `Material` that are encoded as documents, Q distinct texts of its queries, D dimensions.
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
from angle_llm.data.positives import Material
from angle_llm.data.readers import RowSource
from angle_llm.embed import embed_corpus, untokenizable
from angle_llm.vectors import Array, ShardOptions, VectorForm, encoder_identity

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

_TOGETHER = 8192


@dataclass(frozen=True)
class TextVectors:
    """Vectors of the texts of a material, in memory or mapped from disk."""

    document_ED: Array
    """(E, D) as documents."""
    query_QD: Array | None = None
    """(Q, D) as queries; None if queries and documents have one prompt: `document_ED` has all texts."""
    document_texts: Array | None = None
    """(E,) ascending text numbers of `document_ED`; None: all."""
    query_texts: Array | None = None
    """(Q,) ascending text numbers of `query_QD`; None: all."""

    def document_rows(self, texts: Sequence[int] | Array) -> Array:
        """Return the rows of `document_ED` of some texts."""
        return np.asarray(texts) if self.document_texts is None else np.searchsorted(self.document_texts, texts)

    def documents(self, texts: Sequence[int] | Array) -> Array:
        """Return the vectors of some texts as documents."""
        found: Array = self.document_ED[self.document_rows(texts)]
        return found

    def queries(self, texts: Sequence[int] | Array) -> Array:
        """Return the vectors of some texts as queries."""
        if self.query_QD is None or self.query_texts is None:
            return self.documents(texts)
        found: Array = self.query_QD[np.searchsorted(self.query_texts, texts)]
        return found


def vectors_of(material: Material, encoder: SentenceEncoder, name: str, folder: Path, shard_rows: int) -> TextVectors:
    """Return the vectors of all texts, mapped from files FOLDER/vectors-DIGEST.npy, which are made if they are not there.

    With two prompts, queries are encoded as queries, and the other texts and candidates as documents.

    `name` is the name that the encoder was loaded by.

    Raises:
        DataError: for a text without tokens, before any is embedded; for a vector that is 0 or not finite.
        FolderError: if another process is making them.
    """
    if not encoder.prompts.differ:
        return TextVectors(_embedded(material, range(len(material.texts)), encoder, name, folder, shard_rows))
    queries, documents = sorted({query.text for query in material.queries}), material.documents()
    query_QD = _embedded(material, queries, encoder.for_side("query"), name, folder, shard_rows)
    document_ED = _embedded(material, documents, encoder.for_side("document"), name, folder, shard_rows)
    return TextVectors(document_ED, query_QD, np.array(documents), np.array(queries))


@dataclass(frozen=True)
class _Texts(Corpus):
    """Texts of a material as a corpus; their places are those of the user's data."""

    material: Material | None = None
    numbers: Sequence[int] = ()

    def blocks(self, size: int, wanted: Callable[[int], bool]) -> Iterator[TextBlock]:
        assert self.material is not None
        texts, place = self.material.texts, self.material.place
        for number, first in enumerate(range(0, len(self.numbers), size)):
            if wanted(number):
                some = self.numbers[first : first + size]
                yield TextBlock(number, first, [CorpusText(texts[text], None, place(text)) for text in some])


def _embedded(
    material: Material, numbers: Sequence[int], encoder: SentenceEncoder, name: str, folder: Path, shard_rows: int
) -> Array:
    """Return the vectors of some texts, in the order of their numbers."""
    texts = [material.texts[number] for number in numbers]
    made_from = json.dumps([encoder_identity(encoder), shard_rows, texts])
    digest = hashlib.sha256(made_from.encode()).hexdigest()
    target = folder / f"vectors-{digest[:16]}.npy"
    blocks = range(0, len(numbers), _TOGETHER)
    if not target.is_file():
        for first in blocks:  # takes a hundredth of the time of embedding
            _check_tokens(material, encoder, numbers[first : first + _TOGETHER])
        corpus = _Texts(RowSource("texts", []), "text", material=material, numbers=numbers)
        survey = Survey(len(numbers), 0, [{"sha256": digest}], [])
        form, options = VectorForm(encoder.dimensions, encoder.dimensions), ShardOptions("bare npy", shard_rows)
        embed_corpus(corpus, survey, encoder, name, form, options, target.with_suffix(".parts"), target=target)
    found: Array = np.load(target, mmap_mode="r", allow_pickle=False)
    for first in blocks:
        some = found[first : first + _TOGETHER]
        bad = ~(np.isfinite(some).all(axis=1) & some.any(axis=1))
        if bad.any():
            raise DataError(
                f"{material.place(numbers[first + int(bad.argmax())])}: its vector is 0 or not finite, so it has no cosine. "
                "Load the model in bfloat16 or float32, check its weights, or remove the row"
            )
    return found


def _check_tokens(material: Material, encoder: SentenceEncoder, some: Sequence[int]) -> None:
    try:
        encoder.tokenize([material.texts[number] for number in some])
    except ValueError:
        for number in some:
            if reason := untokenizable(encoder, material.texts[number]):
                raise DataError(f"{material.place(number)}: {reason}. Fix it, or remove its row") from None
        raise
