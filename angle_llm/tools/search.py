"""Exact similarity search by cosine, and `angle-llm search`. Results do not depend on block sizes, to the last bit.

A sum of float products depends on the order of the sum, and so on the shape of a block and the position of a row in it.
Therefore unit vectors are rounded to a grid, the multiples of 2⁻²⁶, which are four times finer than float32 just below 1.
Products are multiples of 2⁻⁵², and no partial sum exceeds 2 (Cauchy-Schwarz), so float64 holds every sum exactly. Equal
vectors have equal cosines; the vector with the smaller index comes first.

Dimensions: N rows, Q queries, C candidates, D columns of a vector, K stored columns, R results per query.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from angle_llm.io import FolderError
from angle_llm.model.vectors import Array, Piece, VectorIndex, fingerprint, read_index, read_vectors
from angle_llm.prompts import Side
from angle_llm.settings.commands import SearchSettings
from angle_llm.settings.parsing import SettingsError

STEPS = 2.0**26
"""Number of steps between 0 and 1 to which the values of unit vectors are rounded."""
QUERIES_AT_ONCE = 256
"""Number of queries compared with a block of candidates at a time."""
CANDIDATES_AT_ONCE = 8192
"""Number of candidates whose vectors are in memory at a time."""
_TEXT_SHOWN = 200
"""Maximum number of printed characters of a text."""


def on_grid(rows_ND: Array) -> Array:
    """Normalize vectors (N, D) and round them to multiples of 2⁻²⁶; return the multiples as integers in float64.

    A zero vector stays 0. A vector that is not finite becomes NaN.
    """
    rows: Array = np.array(rows_ND, dtype=np.float64, order="C")
    length = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):
        rows /= np.where(length > 0, length, 1) / STEPS  # STEPS is a power of two, so this rounds once
    return np.rint(rows, out=rows)


def cosines(left_ND: Array, right_ND: Array) -> Array:
    """Return the cosines (N,) of corresponding rows of two matrices (N, D), which `on_grid` has normalized."""
    cosine_N: Array = (left_ND * right_ND).sum(axis=1) / STEPS**2
    return cosine_N


def cosine_matrix(queries_QD: Array, candidates_CD: Array) -> Array:
    """Return the cosines (Q, C) of all queries with all candidates, which `on_grid` has normalized."""
    cosine_QC: Array = (queries_QD / STEPS**2) @ candidates_CD.T  # a power of two, so the products stay exact
    return cosine_QC


def best(position_QC: Array, score_QC: Array, top: int) -> tuple[Array, Array]:
    """Return positions and scores (Q, R) of the `top` largest scores per row, largest first; ties in column order."""
    if score_QC.shape[1] > top:
        edge_Q1 = np.partition(score_QC, -top, axis=1)[:, -top, None]
        above, at_edge = score_QC > edge_Q1, score_QC == edge_Q1
        free_Q1 = top - above.sum(axis=1, keepdims=True)
        kept = above | (at_edge & (at_edge.cumsum(axis=1) <= free_Q1))
        score_QC = score_QC[kept].reshape(-1, top)
        position_QC = position_QC[kept].reshape(-1, top)
    order = np.argsort(-score_QC, axis=1, kind="stable")
    return np.take_along_axis(position_QC, order, axis=1), np.take_along_axis(score_QC, order, axis=1)


def nearest(queries_QD: Array, blocks: Iterable[Array], top: int) -> tuple[Array, Array]:
    """Return the `top` nearest candidates of each query, comparing with every candidate.

    `blocks` are the candidates in blocks (C, D); `on_grid` has normalized queries and candidates. Returns indices
    (Q, R) of candidates, counted over all blocks, and cosines (Q, R), best first; ties in order of the candidates. The
    result does not depend on the size of the blocks. Vectors must be finite. Memory is Q × R, and 256 × C
    for the cosines of a block.
    """
    starts = range(0, max(1, len(queries_QD)), QUERIES_AT_ONCE)  # one empty block without queries
    sizes = [len(queries_QD[start : start + QUERIES_AT_ONCE]) for start in starts]
    best_QR: list[tuple[Array, Array]] = [(np.empty((size, 0), dtype=np.int64), np.empty((size, 0))) for size in sizes]
    first = 0
    for grid_CD in blocks:
        for number, start in enumerate(starts):
            score_QC = cosine_matrix(queries_QD[start : start + QUERIES_AT_ONCE], grid_CD)
            position_QR, score_QR = best_QR[number]
            new_C = np.arange(len(grid_CD))
            if score_QR.shape[1] == top:  # only candidates above the worst of a query can be new; a tie loses
                new_C = np.flatnonzero((~(score_QC <= score_QR[:, -1:])).any(axis=0))
                score_QC = score_QC[:, new_C]
            position_QC = np.broadcast_to(first + new_C, score_QC.shape)
            best_QR[number] = best(
                np.concatenate([position_QR, position_QC], axis=1), np.concatenate([score_QR, score_QC], axis=1), top
            )
        first += len(grid_CD)
    positions, scores = zip(*best_QR, strict=True)
    return np.concatenate(positions), np.concatenate(scores)


def grid_blocks(vectors_ND: Array, rows: Array, size: int = CANDIDATES_AT_ONCE) -> Iterator[Array]:
    """Yield the given rows of vectors (N, D), which can be memory-mapped, in normalized blocks (C, D) for `nearest`."""
    for first in range(0, len(rows), size):
        yield on_grid(vectors_ND[rows[first : first + size]])


# --- angle-llm search -------------------------------------------------------------------------------------------------


class Hit(NamedTuple):
    """A row of the corpus: cosine with the query, index in the corpus from 0, and id and text if they are stored."""

    cosine: float
    row: int
    id: str | None
    text: str | None


class VectorSearch:
    """Search a folder that `angle-llm embed` wrote, with the encoder that made its vectors.

        search = VectorSearch("vectors")
        for hit in search(["the export fails with a timeout"], top=3)[0]:
            print(hit.cosine, hit.id, hit.text)

    The vectors are kept in memory, with 8 bytes per value. With `in_memory=False`, each call reads them from disk, one
    shard at a time.
    """

    def __init__(
        self, folder: Path | str, *, model: str | None = None, side: Side | None = None, in_memory: bool = True
    ) -> None:
        """Load the encoder and the vectors.

        `model` is the path of the encoder, if it was moved. `side` is query (the default) or document: the prompt for the
        texts to search for.

        Raises:
            FolderError: if the folder is unfinished or damaged, or was made by another encoder.
            SettingsError: if the folder holds vectors of queries and `side` is not set.
        """
        from angle_llm.model.encoder import SentenceEncoder

        self.folder = Path(folder).expanduser()
        self.index = read_index(self.folder)
        made_by = self.index.model
        if made_by.side == "query" and side is None:
            raise SettingsError(
                f"{self.folder} holds vectors of queries. To search documents, embed them (embed --as document). To search "
                "queries, set --as (in Python side=): document to find queries for a document, query to compare queries."
            )
        self.encoder = SentenceEncoder.from_pretrained(
            model or made_by.name,
            prompt=made_by.side_prompts,
            pooling=made_by.pooling,
            max_length=made_by.max_length,
            dtype=made_by.dtype,
            revision=None if model else made_by.revision,
            bits=made_by.bits,
            attention=made_by.attention,
        ).for_side(side or "query")
        if (weights := fingerprint(self.encoder)) != made_by.weights:
            raise FolderError(
                f"{self.folder} was made by {made_by.name} with weights {made_by.weights}, and this encoder has {weights}. "
                "Vectors of different models cannot be compared: set --model (in Python model=) to that encoder, or embed again."
            )
        self._pieces = list(pieces_on_grid(self.folder, self.index)) if in_memory else None

    def __call__(self, texts: Sequence[str], top: int = 5) -> list[list[Hit]]:
        """Return the `top` most similar rows for each text, best first; ties in order of the rows.

        If the folder does not store texts (`embed --store-text`), each call reads them from the file that was embedded.
        If that file has changed, the text of a hit is None.

        Raises:
            ValueError: for `top` below 1.
            FolderError: if the folder is damaged.
        """
        if top < 1:
            raise ValueError(f"top: expected 1 or more, got {top}.")
        hits_of_query = search_folder(self.folder, self.index, self.encoder.encode(texts), top, self._pieces)
        known = source_texts(self.index, {hit.row for hits in hits_of_query for hit in hits if hit.text is None})
        return [[hit._replace(text=known.get(hit.row, hit.text)) for hit in hits] for hits in hits_of_query]


def search_main(settings: SearchSettings) -> None:
    """Print the most similar rows of an embedded corpus for each query. Raises the errors of `VectorSearch`."""
    from angle_llm.data.corpus import corpus_texts

    queries = [*settings.queries, *([] if settings.file is None else corpus_texts(settings.file, settings.column))]
    search = VectorSearch(settings.folder, model=settings.model, side=settings.side, in_memory=False)
    for query, hits in zip(queries, search(queries, settings.top), strict=True):
        if settings.json:
            print(json.dumps({"query": query, "hits": [hit._asdict() for hit in hits]}, ensure_ascii=False))
            continue
        header = "id" if any(hit.id is not None for hit in hits) else "row"
        names = [str(hit.row if hit.id is None else hit.id) for hit in hits]
        width = max(map(len, [header, *names]))
        print(f"\n{query}\n  {'cosine':>7}  {header:{width}}  text")
        for hit, name in zip(hits, names, strict=True):
            text = hit.text or "(text not available; embed with --store-text)"
            line = " ".join(text.split())
            shown = line if len(line) <= _TEXT_SHOWN else f"{line[:_TEXT_SHOWN]}…"
            print(f"  {hit.cosine:7.4f}  {name:{width}}  {shown}")


def search_folder(
    folder: Path, index: VectorIndex, queries_QD: Array, top: int, pieces: Sequence[Piece] | None = None
) -> list[list[Hit]]:
    """Search a folder written by `angle-llm embed`: return the `top` rows with the largest cosines for each query.

    Rows are sorted best first; ties in row order. `queries_QD` are vectors of the encoder; they are cut to the stored
    dimensions. Vectors stored as int8 are compared as stored, binary vectors by their signs. `pieces` has the result of
    `pieces_on_grid`, to search in memory; without it, one shard is in memory at a time, and shards with hits are read twice.

    Raises:
        FolderError: if the folder is damaged, or a query vector is not finite.
    """
    queries_QK = on_grid(queries_QD[:, : index.vectors.kept])
    if not np.isfinite(queries_QK).all():
        raise FolderError(
            "the vector of a query is not finite. Load the model in bfloat16 or float32, or check its weights."
        )
    if pieces is None and len(index.parts) == 1:
        pieces = list(pieces_on_grid(folder, index))  # read once
    searched = pieces_on_grid(folder, index) if pieces is None else pieces
    position_QR, cosine_QR = nearest(queries_QK, (piece.vectors for piece in searched), top)
    # Row number, id and text of the hits, of each shard with hits.
    positions = np.unique(position_QR)
    firsts = np.cumsum([0, *(shard.values.rows for shard in index.parts)])
    used = np.unique(np.searchsorted(firsts, positions, side="right") - 1).tolist()
    with_hits = read_vectors(folder, index, [index.parts[number] for number in used])
    facts_of: dict[int, tuple[int, str | None, str | None]] = {}
    for number, piece in zip(used, with_hits if pieces is None else (pieces[number] for number in used), strict=True):
        for position in positions[(positions >= firsts[number]) & (positions < firsts[number + 1])].tolist():
            at = position - int(firsts[number])
            id, text = (column[at] if column else None for column in (piece.id, piece.text))
            facts_of[position] = (int(piece.row[at]), id, text)
    return [
        [Hit(cosine, *facts_of[position]) for position, cosine in zip(positions_R, cosines_R, strict=True)]
        for positions_R, cosines_R in zip(position_QR.tolist(), cosine_QR.tolist(), strict=True)
    ]


def pieces_on_grid(folder: Path, index: VectorIndex) -> Iterator[Piece]:
    """Yield the shards of a folder that `angle-llm embed` wrote, with normalized vectors (`on_grid`)."""
    for piece in read_vectors(folder, index):
        yield piece._replace(vectors=on_grid(piece.vectors))


def source_texts(index: VectorIndex, rows: set[int]) -> dict[int, str]:
    """Return the texts of corpus rows, read again from the embedded files; empty if the files were removed or changed.

    The result is index in the corpus → text.
    """
    from angle_llm.data.corpus import Corpus
    from angle_llm.data.formats import DataError

    source = index.source
    if source.path is None or not rows:
        return {}
    try:
        corpus = Corpus.open(source.path, source.column, source.id_column)
        return corpus.texts(rows) if corpus.source.stamps() == source.stamps else {}
    except (OSError, DataError):
        return {}
