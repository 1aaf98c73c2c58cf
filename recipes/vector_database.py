"""The vectors of documents in a database: a LanceDB table, a faiss index, or the folder of `angle-llm embed` itself.

FOLDER/vectors is what `angle-llm embed --store-text` wrote, FOLDER/database what is made from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from angle_llm.io import sha256_of, write_text
from angle_llm.search import STEPS, on_grid, search_folder
from angle_llm.vectors import INDEX, Piece, read_index, read_vectors

Kind = Literal["lancedb", "faiss", "none"]
TABLE, FAISS = "documents", "vectors.faiss"


def fill_database(kind: Kind, folder: Path) -> None:
    """Write the vectors of FOLDER/vectors into FOLDER/database, unless it was made from them already."""
    place, made_from = folder / "database", folder / "database" / "made_from.sha256"
    digest = f"{kind} {sha256_of(folder / 'vectors' / INDEX)}"
    if made_from.exists() and made_from.read_text(encoding="utf-8") == digest:
        return
    made_from.unlink(missing_ok=True)
    place.mkdir(exist_ok=True)
    index = read_index(folder / "vectors")
    pieces = read_vectors(folder / "vectors", index)
    if kind == "lancedb":
        fill_lancedb(place, pieces)
    else:
        fill_faiss(place, pieces, index.vectors.kept)
    write_text(made_from, digest)


def fill_lancedb(place: Path, pieces: Iterable[Piece]) -> None:
    """Write vectors and texts into a LanceDB table, a shard at a time."""
    import lancedb
    import pyarrow

    database = lancedb.connect(str(place))
    database.drop_table(TABLE, ignore_missing=True)
    table = None
    for piece in pieces:
        flat = pyarrow.array(np.ascontiguousarray(piece.vectors).reshape(-1))
        vectors = pyarrow.FixedSizeListArray.from_arrays(flat, piece.vectors.shape[1])
        part = pyarrow.table({"row": piece.row, "text": piece.text, "vector": vectors})
        if table is None:
            table = database.create_table(TABLE, part)
        else:
            table.add(part)


def fill_faiss(place: Path, pieces: Iterable[Piece], columns: int) -> None:
    """Write the vectors, scaled to length 1, into a faiss index file; inner products are cosines."""
    import faiss

    made = faiss.IndexFlatIP(columns)
    for piece in pieces:
        made.add((on_grid(piece.vectors) / STEPS).astype(np.float32))
    faiss.write_index(made, str(place / FAISS))


def nearest_texts(
    kind: Kind, folder: Path, queries_QD: np.ndarray[Any, Any], top: int
) -> list[list[tuple[float, str]]]:
    """Return cosine and text of the `top` nearest documents of each query, best first."""
    vectors, place, found = folder / "vectors", folder / "database", list[list[tuple[float, str]]]()
    if kind == "lancedb":
        import lancedb

        table = lancedb.connect(str(place)).open_table(TABLE)
        for row in queries_QD:
            best = table.search(row).distance_type("cosine").limit(top).to_list()
            found.append([(1 - hit["_distance"], hit["text"]) for hit in best])
    elif kind == "faiss":
        import faiss

        unit_QD = (on_grid(queries_QD) / STEPS).astype(np.float32)
        cosines, rows = faiss.read_index(str(place / FAISS)).search(unit_QD, top)
        texts = [text for piece in read_vectors(vectors, read_index(vectors)) for text in piece.text or ()]
        for one, positions in zip(cosines.tolist(), rows.tolist(), strict=True):
            found.append([(cosine, texts[at]) for cosine, at in zip(one, positions, strict=True) if at >= 0])
    else:
        for hits in search_folder(vectors, read_index(vectors), queries_QD, top):
            found.append([(hit.cosine, hit.text or "") for hit in hits])
    return found
