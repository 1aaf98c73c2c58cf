"""Embed more documents than one machine can: Ray Data reads Parquet, one encoder per worker, and writes Parquet.

    python recipes/embed_ray.py --model DIR --input DATA --output VECTORS --workers 8 --gpus-per-worker 1
    python recipes/embed_ray.py --model DIR --input s3://BUCKET/DATA --output s3://BUCKET/VECTORS --address auto

Needs `pip install 'angle_llm[ray]'` on every machine. Ray distributes blocks of rows over the workers, restarts workers
that die and repeats their blocks. OUTPUT is complete when it has `_embedding.json`, which is written last; a command
that was stopped starts again in an empty folder. On one machine `angle-llm embed` does the same, resumes after a kill,
and makes an index for `angle-llm search`.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from angle_llm.cli import guarded
from angle_llm.data import DataError
from angle_llm.data.formats import RowError, read_text
from angle_llm.embed import untokenizable
from angle_llm.model.encoder_settings import EncoderOptions
from angle_llm.prompts import Side
from angle_llm.settings_io import NonNegativeFloat, Positive, SettingsError, need_library, parse_flags, settings_class

if TYPE_CHECKING:
    import pyarrow

    from angle_llm.model.encoder import SentenceEncoder

VECTOR = "embedding"
INDEX = "_embedding.json"


@dataclass(frozen=True)
class RayFiles:
    """Encoder, input and output."""

    model: str
    """The encoder: a saved directory that all machines can read, a hub id, or package:NAME/path/inside."""
    input: str
    """A Parquet file or a folder of them: a path that all machines can read, or an address such as s3://BUCKET/DATA."""
    output: str
    """A new or empty folder for Parquet files with the columns of the input and `embedding`; a path or an address."""
    column: str = "text"
    """Column with the texts."""


@settings_class
class RaySettings(EncoderOptions, RayFiles):
    """Files, encoder, rows and workers."""

    side: Annotated[Side | None, tyro.conf.arg(name="as")] = None
    """Embed the texts as queries or as documents. Required if the encoder has two prompts."""
    keep: tuple[str, ...] = ()
    """Columns of the input to write, such as an id. Empty: all, the text too."""
    normalize: bool = False
    """Scale every row to length 1."""
    on_bad_row: Literal["error", "null"] = "error"
    """For a text that is null, empty or without tokens. error: stop. null: write the row with null as its vector."""
    workers: Positive = 2
    """Encoders, each in a process of its own."""
    cpus_per_worker: NonNegativeFloat = 1
    """CPU cores that Ray reserves for a worker; also its number of threads."""
    gpus_per_worker: NonNegativeFloat = 0
    """GPUs that Ray reserves for a worker."""
    block_rows: Positive = 4096
    """Rows encoded at a time, and repeated when a worker dies."""
    file_rows: Positive = 65_536
    """Rows of an output file, at least, except for the last one; in memory while it is written."""
    address: str | None = None
    """Address of a Ray cluster; auto: the one of this machine. None: start Ray on this machine."""


def main(settings: RaySettings) -> None:
    """Embed the rows of the input, and check that each was written once.

    Raises:
        SettingsError: for an output with files, or a cluster that is too small.
        DataError: for an input without the columns, and for a bad row.
    """
    need_library("ray", "recipes/embed_ray.py", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics
    import ray
    import ray.data

    check_empty(settings.output)
    workers = {"num_cpus": settings.cpus_per_worker, "num_gpus": settings.gpus_per_worker}
    # One core beside the workers: without it no block is read, and Ray waits forever.
    needed = {
        "CPU": settings.workers * settings.cpus_per_worker + 1,
        "GPU": settings.workers * settings.gpus_per_worker,
    }
    if settings.address is None:
        cores = max(os.cpu_count() or 1, math.ceil(needed["CPU"]))  # Ray only counts them
        ray.init(num_cpus=cores, include_dashboard=False)
    else:
        ray.init(address=settings.address)
    resources = ray.cluster_resources()
    if short := {kind: n for kind, n in needed.items() if n > resources.get(kind, 0)}:
        have = ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in short)
        want = ", ".join(f"{n:g} {kind}" for kind, n in short.items())
        raise SettingsError(
            f"--workers {settings.workers} needs {want} (one CPU reads and writes), and the cluster has {have}."
        )

    rows = ray.data.read_parquet(settings.input, columns=columns_of(settings))
    # Opens the model once before any row is read, so that a wrong path ends the command.
    identity = ray.get(ray.remote(**workers)(describe).remote(settings))
    embedded = rows.repartition(target_num_rows_per_block=settings.block_rows).map_batches(
        Worker,
        fn_constructor_args=(settings,),
        batch_format="pyarrow",
        batch_size=settings.block_rows,
        compute=ray.data.ActorPoolStrategy(size=settings.workers),
        **workers,
    )
    try:
        embedded.write_parquet(settings.output, min_rows_per_file=settings.file_rows)
    except ray.exceptions.RayError as error:  # has the traceback of the worker as its text
        if found := re.search(r"DataError: (.+)", str(error)):
            raise DataError(found[1]) from None
        raise
    vectors = ray.data.read_parquet(settings.output, columns=[VECTOR])
    count, written = rows.count(), vectors.count()
    if written != count:
        raise RuntimeError(
            f"{settings.output} has {written:,} rows, and {settings.input} has {count:,}. Remove it and start again."
        )
    bad = vectors.map_batches(count_nulls, batch_format="pyarrow").sum("bad") if settings.on_bad_row == "null" else 0
    write_index(settings.output, {"rows": written, "bad_rows": bad, "model": identity})
    print(f"{written:,} rows in {settings.output}" + (f", {bad:,} of them without a vector" if bad else ""))


def count_nulls(table: pyarrow.Table) -> pyarrow.Table:
    """Return the number of rows without a vector."""
    import pyarrow

    return pyarrow.table({"bad": [table[VECTOR].null_count]})


def open_encoder(settings: RaySettings) -> SentenceEncoder:
    """Return the encoder of the side.

    Raises:
        DataError: if it has two prompts and no side is set.
    """
    from angle_llm.model.encoder import SentenceEncoder

    encoder = SentenceEncoder.from_pretrained(settings.model, **settings.options())
    if encoder.prompts.differ and settings.side is None:
        raise DataError(f"{settings.model} has {encoder.prompts}: set --as document, or --as query")
    return encoder if settings.side is None else encoder.for_side(settings.side)


class Worker:
    """An encoder, opened once per process, which adds the column of vectors to tables."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings, self._encoder = settings, open_encoder(settings)

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Return the rows with their vectors.

        Raises:
            DataError: for a bad row, unless its vector is to be null, and for a vector that is not finite.
        """
        import numpy as np
        import pyarrow

        column, keep = self._settings.column, self._settings.keep
        texts = table[column].to_pylist()
        reasons = {row: reason for row, text in enumerate(texts) if (reason := self._problem(text))}
        if reasons and self._settings.on_bad_row == "error":
            raise bad_row(table, column, min(reasons), f"{reasons[min(reasons)]}. Fix it, or set --on-bad-row null")
        good = [row for row in range(len(texts)) if row not in reasons]
        rows_ND = self._encoder.encode([texts[row] for row in good])
        finite_N = np.isfinite(rows_ND).all(axis=1)
        if not finite_N.all():
            raise bad_row(table, column, good[int(finite_N.argmin())], "its vector is not finite. Check the weights")
        if self._settings.normalize:
            length_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
            rows_ND = np.divide(rows_ND, np.where(length_N1 > 0, length_N1, 1), dtype=np.float32)
        flat = pyarrow.array(np.ascontiguousarray(rows_ND).reshape(-1))
        vectors = pyarrow.FixedSizeListArray.from_arrays(flat, self._encoder.dimensions)
        if reasons:
            place_of = {row: place for place, row in enumerate(good)}
            vectors = vectors.take(pyarrow.array([place_of.get(row) for row in range(len(texts))], pyarrow.int64()))
        if keep and column not in keep:
            table = table.drop_columns([column])
        return table.append_column(VECTOR, vectors)

    def _problem(self, text: object) -> str:
        try:
            return untokenizable(self._encoder, read_text({self._settings.column: text}, self._settings.column))
        except RowError as error:
            return str(error)


def bad_row(table: pyarrow.Table, column: str, row: int, reason: str) -> DataError:
    """Return the error for a row, with its other columns."""
    others = {name: table[name][row].as_py() for name in table.column_names if name != column}
    return DataError(f"row with {others!r:.200}: {reason}")


def describe(settings: RaySettings) -> dict[str, Any]:
    """Return what the vectors depend on: weights, prompt, pooling, length."""
    from angle_llm.vectors import encoder_identity

    return {"name": settings.model, **encoder_identity(open_encoder(settings))}


def columns_of(settings: RaySettings) -> list[str] | None:
    """Return the columns to read, None for all; refuse names that the input does not have."""
    import pyarrow.dataset

    filesystem, path = located(settings.input)
    names = pyarrow.dataset.dataset(path, filesystem=filesystem, format="parquet").schema.names
    wanted = [*settings.keep, settings.column]
    if missing := [name for name in wanted if name not in names]:
        raise DataError(
            f"{settings.input} has no column {missing[0]!r}; columns: {', '.join(names)}. Set --column, --keep."
        )
    if VECTOR in names:
        raise DataError(f"{settings.input} has a column {VECTOR!r} already. Rename it.")
    return list(dict.fromkeys(wanted)) if settings.keep else None


def located(place: str) -> tuple[Any, str]:
    """Return the file system of a path or address, and the path on it."""
    from pyarrow.fs import FileSystem

    found: tuple[Any, str] = FileSystem.from_uri(place if "://" in place else str(Path(place).expanduser().absolute()))
    return found


def check_empty(output: str) -> None:
    """Raise `SettingsError` if the output has files."""
    from pyarrow.fs import FileSelector

    filesystem, path = located(output)
    if files := filesystem.get_file_info(FileSelector(path, allow_not_found=True)):
        complete = any(file.base_name == INDEX for file in files)
        state = "is complete" if complete else f"has {len(files)} files, of a command that was stopped or of others"
        raise SettingsError(f"--output {output} {state}. Give a new folder, or remove it.")


def write_index(output: str, values: dict[str, Any]) -> None:
    """Write the file that marks the output as complete."""
    filesystem, path = located(output)
    with filesystem.open_output_stream(f"{path}/{INDEX}") as file:
        file.write(json.dumps(values, indent=1).encode())


if __name__ == "__main__":
    guarded(lambda: main(parse_flags(RaySettings, sys.argv[1:], description=__doc__)))
