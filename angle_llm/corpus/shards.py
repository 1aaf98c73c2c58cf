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
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow
from pyarrow import parquet

from angle_llm.corpus.vectors import SCALE, Array, joined
from angle_llm.io import sha256_of, sync, write_file, write_json

INDEX = "embeddings.json"
JOB = "job.json"
SKIPPED = ".skipped.jsonl"
FORMAT_VERSION = 1
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
                write_json(self.folder / JOB, self.job, writer=str(self.worker.rank))
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
            if block in entries and is_whole(self.folder, entries[block])
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
                write_file(beside, lambda file: file.writelines(path.read_bytes() for path in lists), writer="")
            else:
                beside.unlink(missing_ok=True)
            write_file(target, lambda file: _write_joined(file, arrays, rows), writer="")
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
            for number, shard in enumerate(read_object(self.folder / INDEX)["shards"]):
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
        write_file(path, fill, writer=str(self.worker.rank))
        with path.open("rb") as stream:
            return {"name": name, "size": path.stat().st_size, "sha256": sha256_of(stream)}


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


def _write_table(file: BinaryIO, sides: dict[str, Any], matrices: dict[str, Array]) -> None:
    columns = {name: pyarrow.array(values, _SIDE_TYPES[name]) for name, values in sides.items()}
    for name, values in matrices.items():
        flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
        columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
    # A table of values that hardly repeat; and a file must not depend on how many threads wrote it.
    parquet.write_table(pyarrow.table(columns), file, use_dictionary=False, compression="zstd")


_SIDE_TYPES = {"row": pyarrow.int64(), "id": pyarrow.string(), "text": pyarrow.string(), SCALE: pyarrow.float32()}


def _write_joined(file: BinaryIO, paths: list[Path], rows: int) -> None:
    """One .npy file of several, a part in memory at a time."""
    for path in paths:
        part = np.load(path, mmap_mode="r", allow_pickle=False)
        if path == paths[0]:
            shape = (rows, *part.shape[1:])
            header = {"descr": np.lib.format.dtype_to_descr(part.dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(part).data)


def is_whole(folder: Path, entry: dict[str, Any]) -> bool:
    """Whether the files of a shard are those that were listed, by size and hash."""
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


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ShardsError: if the file holds none.
    """
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
            return read_object(folder / name)
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
