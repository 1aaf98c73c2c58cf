"""The nearest rows of a finished folder: exact, by reading all of it, some thousands of rows at a time.

Legend: Q queries, N rows of a piece, K dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.corpus.reading import Corpus, File
from angle_llm.corpus.shards import ShardsError, read_pieces
from angle_llm.corpus.vectors import Array, VectorForm


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
        ShardsError: if the folder is damaged, or the queries have other dimensions.
    """
    form = form_of(index)
    if queries_QD.shape[1] != form.dimensions:
        raise ShardsError(
            f"{folder} was made by a model of {form.dimensions} dimensions, and this one has {queries_QD.shape[1]}. Use the "
            f"model it was made by, {index['model']['name']}."
        )
    queries_QK = _to_length_1(queries_QD[:, : form.kept].astype(np.float32))
    best: list[list[Hit]] = [[] for _ in queries_QK]
    for piece in read_pieces(folder, index, form):
        scores_QN = queries_QK @ _to_length_1(piece.vectors).T
        for query, scores in enumerate(scores_QN):
            worst = best[query][-1].score if len(best[query]) == top else -np.inf
            # Sorted by score; equal ones by row, for the sort is stable and rows ascend.
            found = [place for place in np.argsort(-scores, kind="stable")[:top] if scores[place] > worst]
            hits = [
                Hit(
                    float(scores[place]),
                    int(piece.row[place]),
                    piece.id[place] if piece.id is not None else None,
                    piece.text[place] if piece.text is not None else None,
                )
                for place in found
            ]
            best[query] = sorted(best[query] + hits, key=lambda hit: (-hit.score, hit.row))[:top]
    return best


def texts_of_source(index: dict[str, Any], rows: set[int]) -> dict[int, str]:
    """The texts of some rows from the files they were read from; none if those are gone or were written to since."""
    source, read = index["source"], index["input"]
    if None in source["places"]:
        return {}
    files = [File.at(Path(place)) for place in source["places"]]
    corpus = Corpus(files, read["column"], read["id_column"], [])
    try:
        if [list(stamp) for stamp in corpus.stamps()] != source["stamps"]:
            return {}
        return corpus.texts(rows)
    except OSError:
        return {}


def _to_length_1(rows: Array) -> Array:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Array = rows / np.where(length > 0, length, 1)
    return scaled
