"""The nearest rows of a finished folder: exact, by reading all of it, some thousands of rows at a time.

Legend: Q queries, N rows of a piece, D dimensions of the model, K that are kept, R rows that are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.corpus.exact import best, cosines_of_all, on_grid
from angle_llm.corpus.finished import read_pieces
from angle_llm.corpus.shards import ShardsError
from angle_llm.corpus.vectors import Array, VectorForm
from angle_llm.data.corpus import Corpus
from angle_llm.data.formats import DataError


@dataclass(frozen=True)
class Hit:
    """A row that was found."""

    score: float
    """Cosine with the query."""
    row: int
    """Its number in the corpus, from 0."""
    id: str | None
    text: str | None


def form_of(index: dict[str, Any]) -> VectorForm:
    """How the vectors of a folder are stored, by its index."""
    kept = index["vectors"]
    return VectorForm(
        dimensions=index["model"]["dimensions"],
        dim=kept["dimensions"],
        normalize=kept["normalize"],
        precision=kept["precision"],
        complex=kept["complex"],
    )


def search(folder: Path, index: dict[str, Any], queries_QD: Array, top: int) -> list[list[Hit]]:
    """For each query the `top` rows of largest cosine, best first; of equals the earlier row.

    `queries_QD` are whole vectors of the model; they are cut as the rows were. Rows of int8 are compared as they are stored,
    of binary by their signs: the order is then that of the stored vectors, not of the model's.

    Raises:
        ShardsError: if the folder is damaged, or the queries have other dimensions or are not finite.
    """
    form = form_of(index)
    if queries_QD.shape[1] != form.dimensions:
        raise ShardsError(
            f"{folder} was made by a model of {form.dimensions} dimensions, and this one has {queries_QD.shape[1]}. Use the "
            f"model it was made by, {index['model']['name']}."
        )
    queries_QK = on_grid(queries_QD[:, : form.kept])
    if not np.isfinite(queries_QK).all():
        raise ShardsError(
            "the vector of a query is not finite, so it has no cosine. Load the model in bfloat16 or float32, or mend "
            "its weights."
        )
    nearest: list[list[Hit]] = [[] for _ in queries_QK]
    for piece in read_pieces(folder, index, form):
        scores_QN = cosines_of_all(queries_QK, on_grid(piece.vectors))
        if not np.isfinite(scores_QN).all():
            raise ShardsError(
                f"a vector in {folder}, or of a query, is not finite, so it has no cosine. Embed it anew."
            )
        places_QR, scores_QR = best(np.broadcast_to(np.arange(len(piece.row)), scores_QN.shape), scores_QN, top)
        for query, (places, scores) in enumerate(zip(places_QR, scores_QR, strict=True)):
            hits = [
                Hit(
                    float(score),
                    int(piece.row[place]),
                    piece.id[place] if piece.id is not None else None,
                    piece.text[place] if piece.text is not None else None,
                )
                for place, score in zip(places, scores, strict=True)
            ]
            nearest[query] = sorted(nearest[query] + hits, key=lambda hit: (-hit.score, hit.row))[:top]
    return nearest


def texts_of_source(index: dict[str, Any], rows: set[int]) -> dict[int, str]:
    """The texts of some rows from the files they were read from; none if those are gone or were written to since."""
    source, read = index["source"], index["input"]
    if None in source["places"]:
        return {}
    try:
        corpus = Corpus.of_files(source["places"], read["column"], read["id_column"])
        if [list(stamp) for stamp in corpus.source.stamps()] != source["stamps"]:
            return {}
        return corpus.texts(rows)
    except (OSError, DataError):
        return {}
