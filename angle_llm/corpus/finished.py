"""A finished folder of vectors: what its index says, and its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow
from pyarrow import parquet

from angle_llm.corpus.shards import FORMAT_VERSION, INDEX, JOB, ShardsError, is_whole, read_object
from angle_llm.corpus.vectors import SCALE, Array, Precision, VectorForm, parted

_ROWS_AT_ONCE = 8192
_MENDS = "Run the same `angle-llm embed` again: it mends this."


@dataclass(frozen=True)
class Piece:
    """Some rows of a finished folder."""

    row: Array
    """(N,) number of each in the corpus."""
    vectors: Array
    """(N, K) float32."""
    id: list[str] | None
    text: list[str] | None


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a finished folder.

    Raises:
        ShardsError: if there is none, or one of another version.
    """
    try:
        if not (folder / INDEX).is_file():  # a pipe would be waited for
            raise FileNotFoundError
        index = read_object(folder / INDEX)
    except (FileNotFoundError, NotADirectoryError):
        begun = (folder / JOB).exists()
        raise ShardsError(
            f"{folder} holds no {INDEX}. "
            + ("The work was begun and not ended: run the same `angle-llm embed` again." if begun else "")
            + ("" if begun else "Name a folder that `angle-llm embed --output FOLDER` wrote.")
        ) from None
    if index.get("format_version") != FORMAT_VERSION:
        raise ShardsError(f"{folder / INDEX}: this version reads format_version {FORMAT_VERSION}. Embed again with it.")
    problem = _unlike(index, _INDEX)
    if not problem and index["vectors"]["precision"] not in get_args(Precision):
        problem = f"precision is none of {', '.join(get_args(Precision))}"
    if problem:
        raise ShardsError(f"{folder / INDEX} is damaged: {problem}. Embed again.")
    return index


_COUNT, _WORDS = (int,), (str,)
_INDEX: dict[str, Any] = {
    "rows": _COUNT,
    "model": {
        "name": _WORDS, "dimensions": _COUNT, "weights": _WORDS, "prompt": (dict,), "pooling": _WORDS, "max_length": _COUNT,
        "bits": (int, type(None)),
    },
    "vectors": {"dimensions": _COUNT, "normalize": (bool,), "precision": _WORDS, "complex": (bool,)},
    "source": {"places": [(str, type(None))], "stamps": (list,)},
    "input": {"column": (str, type(None)), "id_column": (str, type(None))},
    "shards": [{"first": _COUNT, "rows": _COUNT, "files": [{"name": _WORDS, "size": _COUNT, "sha256": _WORDS}]}],
}  # fmt: skip
"""What is read of an index, and of which types."""


def _unlike(value: Any, pattern: Any, where: str = "it") -> str:
    """What a JSON value lacks of a pattern, in words; nothing if it has all of it."""
    if isinstance(pattern, tuple):
        kinds = " or ".join("null" if kind is type(None) else kind.__name__ for kind in pattern)
        return "" if type(value) in pattern else f"{where} is no {kinds}"  # not isinstance: true is no number
    if type(value) is not type(pattern):
        return f"{where} is no {type(pattern).__name__}"
    if isinstance(value, list):
        parts = [(item, pattern[0], f"{where} {number}") for number, item in enumerate(value)]
    else:
        parts = [(value.get(key), part, key) for key, part in pattern.items()]
    return next((problem for part in parts if (problem := _unlike(*part))), "")


def read_pieces(folder: Path, index: dict[str, Any], form: VectorForm) -> Iterator[Piece]:
    """All rows in order, some thousands at a time.

    Raises:
        ShardsError: if a shard is missing, or not as it was written.
    """
    for shard in index["shards"]:
        try:
            yield from _read_shard(folder, shard, form)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            NotImplementedError,
        ) as error:  # what pyarrow and numpy raise
            if isinstance(error, ShardsError):
                raise
            raise ShardsError(f"shard {shard['first']} of {folder} is damaged ({error}). {_MENDS}") from error


def _read_shard(folder: Path, shard: dict[str, Any], form: VectorForm) -> Iterator[Piece]:
    paths = {Path(file["name"]).suffix: folder / file["name"] for file in shard["files"]}
    # A name of its own and no link: an index could name any file of the machine.
    if any(path.parent != folder or path.is_symlink() for path in paths.values()) or not is_whole(folder, shard):
        raise ShardsError(f"{paths.get('.parquet', folder)} is missing or damaged. {_MENDS}")
    matrix = np.load(paths[".npy"], mmap_mode="r", allow_pickle=False) if ".npy" in paths else None
    first = 0
    with parquet.ParquetFile(paths[".parquet"]) as table:
        for batch in table.iter_batches(_ROWS_AT_ONCE, use_threads=False):
            columns = {name: batch.column(name) for name in batch.schema.names}
            sides = {name: values for name, values in columns.items() if not _is_matrix(values)}
            if matrix is None:
                stored = {name: _matrix(values) for name, values in columns.items() if _is_matrix(values)}
            else:
                stored = parted(matrix[first : first + len(batch)])
            if SCALE in sides:
                stored[SCALE] = sides[SCALE].to_numpy()
            first += len(batch)
            vectors = form.restored(stored)
            if vectors.shape != (len(batch), form.kept) or not np.isfinite(vectors).all():
                raise ShardsError(f"{folder} holds rows that are no {form.kept} finite numbers. {_MENDS}")
            yield Piece(
                sides["row"].to_numpy(),
                vectors,
                sides["id"].to_pylist() if "id" in sides else None,
                sides["text"].to_pylist() if "text" in sides else None,
            )


def _is_matrix(values: Any) -> bool:
    return bool(pyarrow.types.is_fixed_size_list(values.type))


def _matrix(values: Any) -> Array:
    matrix: Array = values.flatten().to_numpy().reshape(len(values), values.type.list_size)
    return matrix
