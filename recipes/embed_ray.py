"""Embed a corpus on several machines with Ray Data: read Parquet, encode with one encoder per worker, write Parquet.

    python recipes/embed_ray.py --model DIR --input DATA --output VECTORS --workers 8 --gpus-per-worker 1
    python recipes/embed_ray.py --model DIR --input s3://BUCKET/DATA --output s3://BUCKET/VECTORS --address auto

Needs `pip install 'angle_llm[ray]'` on every machine. Ray distributes blocks of rows to the workers, restarts a worker
that dies, and repeats its block. OUTPUT is complete when it contains `_embedding.json`, which is written last. A stopped
command cannot resume: start again with an empty folder. On one machine use `angle-llm embed`, which resumes after a kill
and makes an index for `angle-llm search`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from angle_llm.cli import run_cli
from angle_llm.data import DataError
from angle_llm.data.formats import RowError, read_text
from angle_llm.model.source.backbone import absolute_name
from angle_llm.model.vectors import untokenizable, with_one_prompt
from angle_llm.prompts import Side
from angle_llm.settings.encoder import EncoderOptions
from angle_llm.settings.parsing import (
    NonNegativeFloat,
    Positive,
    SettingsError,
    need_library,
    parse_settings,
    settings_class,
)

if TYPE_CHECKING:
    import pyarrow

    from angle_llm.model.encoder import SentenceEncoder

VECTOR = "embedding"
"""Column of the vectors in the output."""
INDEX = "_embedding.json"
"""File that marks an output as complete."""
FILE_ROWS = 65_536
"""Minimum number of rows in an output file, except for the last file; a file is in memory while it is written."""


@dataclass(frozen=True)
class RayFiles:
    """Encoder, input and output of the program."""

    model: str
    """The encoder: a saved directory that all machines can read, a hub id, or package:NAME/path/inside."""
    input: str
    """A Parquet file or a folder of them: a path that all machines can read, or an address such as s3://BUCKET/DATA."""
    output: str
    """A new or empty folder for Parquet files with the columns of the input and `embedding`; a path or an address."""
    column: str = "text"
    """Column of the input with the texts."""


@settings_class
class RaySettings(EncoderOptions, RayFiles):
    """Files, encoder, columns and workers of the program."""

    side: Annotated[Side | None, tyro.conf.arg(name="as")] = None
    """Whether the texts are queries or documents. Required if queries and documents have different prompts."""
    keep: tuple[str, ...] = ()
    """Columns of the input to write to the output, such as an id. Empty: all columns."""
    on_bad_row: Literal["error", "null"] = "error"
    """What to do with a text that is null, empty or without tokens. error: stop. null: write null as its vector."""
    workers: Positive = 2
    """Number of workers; a worker is a process with an encoder. On a CPU it has one thread."""
    gpus_per_worker: NonNegativeFloat = 0
    """Number of GPUs that Ray reserves for a worker."""
    block_rows: Positive = 4096
    """Number of rows that a worker encodes at a time, and that are repeated when the worker dies."""
    address: str | None = None
    """Address of a Ray cluster. auto: the cluster that this machine belongs to. None: start Ray on this machine."""


def main(settings: RaySettings) -> None:
    """Embed all rows of the input, check that every row was written, and mark the output as complete.

    Raises:
        SettingsError: if the output contains files, or the cluster is too small.
        DataError: if a column is missing in the input, or a row is bad.
    """
    need_library("ray", "recipes/embed_ray.py", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics
    import ray
    import ray.data

    # Workers of a cluster run in another folder.
    settings = replace(
        settings,
        model=absolute_name(settings.model),
        input=absolute(settings.input),
        output=absolute(settings.output),
    )
    check_empty(settings.output)
    # A worker needs a CPU. Another CPU must read and write blocks; without it, Ray waits forever.
    needed = {"CPU": settings.workers + 1, "GPU": settings.workers * settings.gpus_per_worker}
    start_ray(settings.address, needed, f"--workers {settings.workers} (one CPU reads and writes)")

    # 1. The rows to read.
    rows = ray.data.read_parquet(settings.input, columns=columns_of(settings))

    # 2. Open the encoder once on a worker, so that a wrong path stops the command before rows are read.
    resources = {"num_cpus": 1, "num_gpus": settings.gpus_per_worker}
    try:
        identity = ray.get(ray.remote(**resources)(describe).remote(settings))
    except ray.exceptions.RayTaskError as error:  # its text is the traceback of the worker
        raise error.cause from None

    # 3. Encode and write.
    embedded = rows.repartition(target_num_rows_per_block=settings.block_rows).map_batches(
        Worker,
        fn_constructor_args=(settings,),
        batch_format="pyarrow",
        batch_size=settings.block_rows,
        compute=ray.data.ActorPoolStrategy(size=settings.workers),
        **resources,
    )
    try:
        embedded.write_parquet(settings.output, min_rows_per_file=FILE_ROWS)
    except ray.exceptions.RayError as error:  # its text contains the traceback of the worker
        if found := re.search(r"DataError: (.+)", str(error)):
            raise DataError(found[1]) from None
        raise

    # 4. Check the number of rows, and mark the output as complete.
    vectors = ray.data.read_parquet(settings.output, columns=[VECTOR])
    count, written = rows.count(), vectors.count()
    if written != count:
        raise RuntimeError(
            f"{settings.output}: expected {count:,} rows as in {settings.input}, got {written:,}. Remove it and start again."
        )
    bad = vectors.map_batches(count_nulls, batch_format="pyarrow").sum("bad") if settings.on_bad_row == "null" else 0
    write_index(settings.output, {"rows": written, "bad_rows": bad, "model": identity})
    print(f"{written:,} rows in {settings.output}" + (f", {bad:,} of them without a vector" if bad else ""))


def start_ray(address: str | None, needed: Mapping[str, float], what: str) -> None:
    """Connect to the Ray cluster at an address, or start Ray on this machine.

    Raises:
        SettingsError: if the cluster has too few CPUs or GPUs for the `needed` ones; the message starts with `what`.
    """
    import ray

    if address is None:
        ray.init(address="local", num_cpus=max(os.cpu_count() or 1, int(needed["CPU"])), include_dashboard=False)
    else:
        ray.init(address=address)
    resources = ray.cluster_resources()
    if short := {kind: n for kind, n in needed.items() if n > resources.get(kind, 0)}:
        have = ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in short)
        want = ", ".join(f"{n:g} {kind}" for kind, n in short.items())
        raise SettingsError(f"{what} needs {want}, and the cluster has {have}.")


def count_nulls(table: pyarrow.Table) -> pyarrow.Table:
    """Return a table with the number of rows without a vector, in the column `bad`."""
    import pyarrow

    return pyarrow.table({"bad": [table[VECTOR].null_count]})


def open_encoder(settings: RaySettings) -> SentenceEncoder:
    """Open the encoder for queries or documents, as `--as` states.

    Raises:
        SettingsError: if queries and documents have different prompts, and `--as` is not set.
    """
    from angle_llm.model.encoder import SentenceEncoder

    return with_one_prompt(SentenceEncoder.from_pretrained(settings.model, **settings.options()), settings.side)


class Worker:
    """Adds vectors to tables. Ray opens the encoder once per process."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings, self._encoder = settings, open_encoder(settings)

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Return the rows of a table with the column of vectors.

        Raises:
            DataError: if a row is bad and `--on-bad-row` is error, or a vector is not finite.
        """
        import numpy as np
        import pyarrow

        column, keep = self._settings.column, self._settings.keep
        texts = table[column].to_pylist()
        reasons = {row: reason for row, text in enumerate(texts) if (reason := self._unreadable(text))}
        self._refuse(table, reasons)
        try:
            try:
                rows_ND = self._encoder.encode([text for row, text in enumerate(texts) if row not in reasons])
            except ValueError:  # a text without tokens is rare, so the texts are checked one by one only after an error
                usable = [row for row in range(len(texts)) if row not in reasons]
                problems = {row: reason for row in usable if (reason := untokenizable(self._encoder, texts[row]))}
                if not problems:
                    raise
                self._refuse(table, problems)
                reasons |= problems
                rows_ND = self._encoder.encode([text for row, text in enumerate(texts) if row not in reasons])
        except FloatingPointError as error:
            raise DataError(str(error)) from None
        flat = pyarrow.array(np.ascontiguousarray(rows_ND).reshape(-1))
        vectors = pyarrow.FixedSizeListArray.from_arrays(flat, self._encoder.dimensions)
        if reasons:
            good = (row for row in range(len(texts)) if row not in reasons)
            place_of = {row: place for place, row in enumerate(good)}
            vectors = vectors.take(pyarrow.array([place_of.get(row) for row in range(len(texts))], pyarrow.int64()))
        if keep and column not in keep:
            table = table.drop_columns([column])
        return table.append_column(VECTOR, vectors)

    def _refuse(self, table: pyarrow.Table, reasons: Mapping[int, str]) -> None:
        """Raise `DataError` for the first bad row, if `--on-bad-row` is error; `reasons` has the reason of each."""
        if reasons and self._settings.on_bad_row == "error":
            row = min(reasons)
            raise bad_row(table, self._settings.column, row, f"{reasons[row]}. Fix it, or set --on-bad-row null")

    def _unreadable(self, text: object) -> str:
        """Return the reason why a value is not a text; an empty string if it is a text."""
        try:
            read_text({self._settings.column: text}, self._settings.column)
        except RowError as error:
            return str(error)
        return ""


def bad_row(table: pyarrow.Table, column: str, row: int, reason: str) -> DataError:
    """Return the error for a bad row; its message shows the other columns, such as an id."""
    others = {name: table[name][row].as_py() for name in table.column_names if name != column}
    return DataError(f"row with {others!r:.200}: {reason}")


def describe(settings: RaySettings) -> dict[str, Any]:
    """Return the name of the encoder and the properties that change its vectors: weights, prompt, pooling, length."""
    from angle_llm.model.vectors import encoder_identity

    return {"name": settings.model, **encoder_identity(open_encoder(settings))}


def columns_of(settings: RaySettings) -> list[str] | None:
    """Return the columns to read, None for all. Raises `DataError` if the input lacks a column."""
    import pyarrow.dataset
    from pyarrow.fs import FileSelector, FileType

    filesystem, path = located(settings.input)
    files: Any = path
    if filesystem.get_file_info(path).type == FileType.Directory:  # which can have other files, as a README
        inside = filesystem.get_file_info(FileSelector(path, recursive=True))
        names = (file.path for file in inside if file.path.endswith(".parquet"))
        files = sorted(name for name in names if not re.search(r"/[._]", name.removeprefix(path)))
        if not files:
            raise DataError(f"{settings.input} has no file *.parquet")
    names = pyarrow.dataset.dataset(files, filesystem=filesystem, format="parquet").schema.names
    wanted = [*settings.keep, settings.column]
    if missing := [name for name in wanted if name not in names]:
        raise DataError(
            f"{settings.input} has no column {missing[0]!r}; columns: {', '.join(names)}. Set --column or --keep."
        )
    if VECTOR in names:
        raise DataError(f"{settings.input} already has a column {VECTOR!r}. Rename the column.")
    return list(dict.fromkeys(wanted)) if settings.keep else None


def located(place: str) -> tuple[Any, str]:
    """Return the pyarrow file system of a path or address, and the path in this file system."""
    from pyarrow.fs import FileSystem

    found: tuple[Any, str] = FileSystem.from_uri(absolute(place))
    return found


def absolute(place: str) -> str:
    """Return an absolute path; an address is returned unchanged."""
    return place if "://" in place else str(Path(place).expanduser().absolute())


def check_empty(output: str) -> None:
    """Raise `SettingsError` if the output folder contains files."""
    from pyarrow.fs import FileSelector

    filesystem, path = located(output)
    if files := filesystem.get_file_info(FileSelector(path, allow_not_found=True)):
        complete = any(file.base_name == INDEX for file in files)
        state = "is complete" if complete else f"has {len(files)} files, of a stopped command or another program"
        raise SettingsError(f"--output {output} {state}. Give a new folder, or remove it.")


def write_index(output: str, values: dict[str, Any]) -> None:
    """Write `values` to `_embedding.json`, the file that marks the output as complete."""
    filesystem, path = located(output)
    with filesystem.open_output_stream(f"{path}/{INDEX}") as file:
        file.write(json.dumps(values, indent=1).encode())


if __name__ == "__main__":
    run_cli(lambda: main(parse_settings(RaySettings, description=__doc__ or "")))
