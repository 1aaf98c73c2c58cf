"""A folder of vectors, filled shard by shard, by one process or several that need not hear of each other.

    OUT/
        shard-000000.parquet         row, id, text, scale, embedding of the rows of block 0; columns as asked for
        shard-000000.npy             with `npy`: the vectors, the Parquet file beside it has the rest
        shard-000000.skipped.jsonl   rows of block 0 that were left out, where there are any: number, place, reason
        embeddings.json              the index, written last: what the vectors are, and every shard with sizes and SHA-256

While the work goes on there is no index, but

        job.json                     what the index will say of input, model and vectors; nothing else may be written here
        .done-00000.jsonl            of process 0, and so on: a line for every shard it has put on disk

A file is filled under a hidden name, put on disk, and renamed; its line in `done` comes after. So whatever moment a process
is killed at, a shard is listed and whole, or it is written again, to the same bytes. The names of finished files tell
nothing of the processes that wrote them: one makes the same folder as many.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import pyarrow
from pyarrow import parquet

from angle_llm.artifact import sync
from angle_llm.corpus.reading import sha256_of
from angle_llm.corpus.vectors import SCALE, Array, Precision, VectorForm

INDEX = "embeddings.json"
JOB = "job.json"
SKIPPED = ".skipped.jsonl"
FORMAT_VERSION = 1
_ROWS_AT_ONCE = 8192
_POLL_SECONDS = 1.0
_TOLD_EVERY_SECONDS = 60

Format = Literal["parquet", "npy", "bare npy"]
"""How vectors lie in a shard; `bare npy` has nothing beside them."""
Job = dict[str, Any]


class ShardsError(ValueError):
    """A folder of vectors that cannot be written to or read, with what to do."""


@dataclass(frozen=True)
class Worker:
    """A process among those that share the work."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether it is the one that speaks, and writes what there is one of."""
        return self.rank == 0

    def owns(self, block: int) -> bool:
        """Whether a block is its to do: they are dealt round robin."""
        return block % self.count == self.rank


class Shards:
    """A folder while it is being filled. As a context manager it holds the right to write, which a killed process loses.

    Raises:
        ShardsError: on entering, if the folder holds other things or another job's vectors, or someone is writing it.
    """

    def __init__(self, folder: Path, format: Format, job: Job, worker: Worker) -> None:
        self.folder = folder
        self.format = format
        self.job = job
        self.worker = worker
        self._done: BinaryIO | None = None

    def __enter__(self) -> Shards:
        check_free(self.folder)
        self._check_job()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._done = _sole_writer(self.folder / f".done-{self.worker.rank:05d}.jsonl")
        try:
            if _job_in(self.folder) is None:  # several processes may find so at once, and write the same
                write_json(self.folder / JOB, self.job, by=f".{self.worker.rank}")
            self._check_job()
        except BaseException:
            self._done.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._done is not None:
            self._done.close()

    def kept(self, blocks: int) -> set[int]:
        """Of the worker's blocks, those whose shard is on disk as it was written."""
        entries = self._entries()
        return {
            block
            for block in range(self.worker.rank, blocks, self.worker.count)
            if block in entries and _is_whole(self.folder, entries[block])
        }

    def write(
        self,
        block: int,
        first: int,
        sides: dict[str, Any],
        vectors: dict[str, Array],
        skipped: list[dict[str, Any]],
    ) -> None:
        """Puts a shard on disk, then lists it. `sides` are columns (N,) beside the vectors: row, id, text."""
        assert self._done is not None, "entered first"
        name = f"shard-{block:06d}"
        sides = sides | {column: values for column, values in vectors.items() if values.ndim == 1}
        matrices = {column: values for column, values in vectors.items() if values.ndim == 2}
        files = []
        if self.format != "parquet":
            matrix = joined(matrices)
            files.append(self._put(f"{name}.npy", lambda file: np.save(file, matrix, allow_pickle=False)))
            matrices = {}
        if self.format != "bare npy":
            files.append(self._put(f"{name}.parquet", lambda file: _write_table(file, sides, matrices)))
        if skipped:
            lines = [json.dumps(row).encode() + b"\n" for row in skipped]
            files.append(self._put(name + SKIPPED, lambda file: file.writelines(lines)))
        entry = {"block": block, "first": first, "rows": len(sides["row"]), "skipped": len(skipped), "files": files}
        self._done.write(json.dumps(entry).encode() + b"\n")
        self._done.flush()
        sync(Path(self._done.name))

    def finish(self, blocks: int, describe: Callable[[int], Job], target: Path | None = None) -> int:
        """Once all shards are there, writes the index and removes what only the work needed; the main process does, and
        waits for the others. `describe` makes the index from the number of vectors, which is returned. With `target`,
        all becomes this one .npy file, and the folder goes.
        """
        entries = self._wait_for(blocks)
        self._check_job()
        rows: int = sum(entry["rows"] for entry in entries)
        if target is not None:
            names = [file["name"] for entry in entries for file in entry["files"]]
            arrays = [self.folder / name for name in names if name.endswith(".npy")]
            lists = [self.folder / name for name in names if name.endswith(SKIPPED)]
            beside = target.with_name(target.stem + SKIPPED)
            if lists:
                put(beside, lambda file: file.writelines(path.read_bytes() for path in lists))
            else:
                beside.unlink(missing_ok=True)
            put(target, lambda file: _write_joined(file, arrays, rows))
            retired = self.folder.with_name(f".{self.folder.name}.old")  # out of sight at once: half a folder is none
            shutil.rmtree(retired, ignore_errors=True)
            self.folder.replace(retired)
            shutil.rmtree(retired)
            return rows
        shards = [{key: entry[key] for key in ("first", "rows", "skipped", "files")} for entry in entries]
        write_json(self.folder / INDEX, describe(rows) | {"shards": shards})
        for pattern in (".done-*.jsonl", JOB, ".*.tmp"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        sync(self.folder)
        return rows

    def _check_job(self) -> None:
        written = _job_in(self.folder)
        if written is not None and (difference := _difference(written, self.job)):
            raise ShardsError(
                f"{self.folder} was begun with {difference}. The same input, model and settings go on with it; for others, "
                "choose another --output, or remove it."
            )

    def _entries(self) -> dict[int, dict[str, Any]]:
        """What is listed of shards, by block; the last word counts."""
        found: dict[int, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            for number, shard in enumerate(_read_json(self.folder / INDEX)["shards"]):
                found[number] = shard | {"block": number}
        for path in sorted(self.folder.glob(".done-*.jsonl")):
            for entry in _lines(path):
                found[entry["block"]] = entry
        return found

    def _wait_for(self, blocks: int) -> list[dict[str, Any]]:
        told = time.monotonic()
        while missing := set(range(blocks)) - set(entries := self._entries()):
            if time.monotonic() - told > _TOLD_EVERY_SECONDS:
                told = time.monotonic()
                print(f"waiting for {len(missing)} shards of the other processes", file=sys.stderr)
            time.sleep(_POLL_SECONDS)
        return [entries[block] for block in range(blocks)]

    def _put(self, name: str, fill: Callable[[BinaryIO], object]) -> dict[str, Any]:
        path = self.folder / name
        put(path, fill, by=f".{self.worker.rank}")
        with path.open("rb") as stream:
            return {"name": name, "size": path.stat().st_size, "sha256": sha256_of(stream)}


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
        index = _read_json(folder / INDEX)
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
    if any(path.parent != folder or path.is_symlink() for path in paths.values()) or not _is_whole(folder, shard):
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
                stored = _parted(matrix[first : first + len(batch)])
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


_MENDS = "Run the same `angle-llm embed` again: it mends this."


def check_free(folder: Path) -> None:
    """Refuses a place where there is something else than vectors; asked before anything is read.

    Raises:
        ShardsError: if there is.
    """
    if folder.exists() and not folder.is_dir():
        raise ShardsError(f"--output {folder} is a file. It must end in .npy, or name a folder that is new or empty.")
    if folder.is_dir() and _job_in(folder) is None and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise ShardsError(
            f"--output must end in .npy, or name a folder that is new, empty, or of this command; {folder} holds other things."
        )


def put(path: Path, fill: Callable[[BinaryIO], object], by: str = "") -> None:
    """Writes a file whole or not at all. `by` tells writers apart that may write one file at one time."""
    temporary = path.with_name(f".{path.name}{by}.tmp")
    with temporary.open("wb") as file:
        fill(file)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, values: Job, by: str = "") -> None:
    """Writes a JSON file whole or not at all."""
    put(path, lambda file: file.write(json.dumps(values, indent=1, ensure_ascii=False).encode() + b"\n"), by)


def joined(matrices: dict[str, Array]) -> Array:
    """The one matrix of a .npy file: (N, K), or (N, K/2) complex."""
    if "real" in matrices:
        return (matrices["real"] + 1j * matrices["imaginary"]).astype(np.complex64)
    return matrices["embedding"]


def _parted(matrix: Array) -> dict[str, Array]:
    if np.iscomplexobj(matrix):
        return {"real": matrix.real, "imaginary": matrix.imag}
    return {"embedding": np.asarray(matrix)}


def _write_table(file: BinaryIO, sides: dict[str, Any], matrices: dict[str, Array]) -> None:
    columns = {name: pyarrow.array(values, _SIDE_TYPES[name]) for name, values in sides.items()}
    for name, values in matrices.items():
        flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
        columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
    # A table of values that hardly repeat; and a file must not depend on how many threads wrote it.
    parquet.write_table(pyarrow.table(columns), file, use_dictionary=False, compression="zstd")


_SIDE_TYPES = {"row": pyarrow.int64(), "id": pyarrow.string(), "text": pyarrow.string(), SCALE: pyarrow.float32()}


def _is_matrix(values: Any) -> bool:
    return bool(pyarrow.types.is_fixed_size_list(values.type))


def _matrix(values: Any) -> Array:
    matrix: Array = values.flatten().to_numpy().reshape(len(values), values.type.list_size)
    return matrix


def _write_joined(file: BinaryIO, paths: list[Path], rows: int) -> None:
    """One .npy file of several, a part in memory at a time."""
    for path in paths:
        part = np.load(path, mmap_mode="r", allow_pickle=False)
        if path == paths[0]:
            shape = (rows, *part.shape[1:])
            header = {"descr": np.lib.format.dtype_to_descr(part.dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(part).data)


def _is_whole(folder: Path, entry: dict[str, Any]) -> bool:
    for file in entry["files"]:
        path = folder / file["name"]
        if not path.is_file() or path.stat().st_size != file["size"]:
            return False
        with path.open("rb") as stream:
            if sha256_of(stream) != file["sha256"]:
                return False
    return True


def _sole_writer(path: Path) -> BinaryIO:
    """A file of lines opened to add to it, without what a killed process wrote of a line."""
    file = path.open("ab")
    try:
        import fcntl  # not on Windows, where nobody looks

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ShardsError(
            f"another process is writing {path.parent}: another command, or what is left of a launcher that was killed. Wait for "
            "it, or end it."
        ) from None
    except (ImportError, OSError):
        pass  # some network file systems have no locks
    content = path.read_bytes()
    file.truncate(content.rfind(b"\n") + 1)
    return file


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that a process may be adding to; none if there is no file."""
    with suppress(FileNotFoundError), path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise ShardsError(f"{path} is damaged ({error}). Remove its folder, and embed again.") from None
    return values


def _job_in(folder: Path) -> Job | None:
    """What a folder is for, None if nobody said so yet. An index is there before the job goes."""
    for name in (JOB, INDEX):
        with suppress(FileNotFoundError):
            return _read_json(folder / name)
    return None


def _difference(written: Job, job: Job, above: str = "") -> str:
    """The first thing that two jobs differ in, in words; of an index, only what a job says counts."""
    for key, here in job.items():
        there = written.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            if found := _difference(there, here, f"{above}{key} "):
                return found
        elif here != there:
            return f"{above}{key} {_shown(there)}, not {_shown(here)}"
    return ""


def _shown(value: object) -> str:
    words = json.dumps(value, ensure_ascii=False)
    return words if len(words) < 200 else f"{words[:200]}…"
