"""Where the rows of a source are: what its path names."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from angle_llm.config import DataSource
from angle_llm.data.formats import DataError, nearest

DATA_VARIABLE = "ANGLE_LLM_DATA"
"""The environment variable that names a folder of data sets."""

KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""The kinds of files that can be read, by extension."""

EXTENSIONS = (*KINDS, *(f"{kind}.gz" for kind in KINDS if kind != ".parquet"))
"""How the names of files end that can be read."""


def locate(source: DataSource) -> Path | DataSource:
    """The file that holds a source's rows, or what `datasets` is to load: a folder or a hub id, with its split.

    Raises `DataError` if it is neither, or a file of an unknown kind.
    """
    if source.path.startswith("starter:"):
        from angle_llm.data.starter import starter_path

        try:
            return _one_file(starter_path(source.path.removeprefix("starter:")), source)
        except ValueError as error:
            raise DataError(f"{source.path}: {error}") from None
    if not source.path:
        raise DataError("the path of the data source is empty; give a file, a folder, a hub id or starter:<file>")
    path = below_data(source.path)
    name, at, part = source.path.rpartition("@")
    if at and name and not path.exists() and not set(part) & set("/\\"):
        return _part(source, name, part)
    if path.is_dir():
        return replace(source, path=str(path))
    if path.exists():
        return _one_file(path, source)
    if _looks_like_hub_id(source.path):
        return source
    weight = " A weight is a plain number behind a colon, such as :0.5." if ":" in source.path else ""
    raise DataError(f"{source.path}: no such file or folder, and not a hub id (org/name). {neighbours(path)}{weight}")


def below_data(path: str) -> Path:
    """A relative path that is not in the working directory may be below the folder that `ANGLE_LLM_DATA` names."""
    here, data = Path(path).expanduser(), os.environ.get(DATA_VARIABLE)
    if data and not here.exists() and not here.is_absolute() and (Path(data).expanduser() / here).exists():
        return Path(data).expanduser() / here
    return here


def _part(source: DataSource, name: str, part: str) -> Path | DataSource:
    """`FOLDER@NAME`: the file FOLDER/NAME with one of the known extensions; else a split of a data set."""
    folder = below_data(name)
    if source.split != "train":
        raise DataError(
            f"{source.path} names the split {part}, and `split` the split {source.split}; leave one of them away"
        )
    if not folder.is_dir():
        if _looks_like_hub_id(name):
            return replace(source, path=name, split=part)
        raise DataError(f"{source.path}: {name} is no folder and no hub id (org/name). {neighbours(folder)}")
    found = [folder / f"{part}{extension}" for extension in EXTENSIONS if (folder / f"{part}{extension}").is_file()]
    if len(found) > 1:
        raise DataError(f"{source.path} may be {' or '.join(path.name for path in found)}; name the file")
    if found:
        return _one_file(found[0], source)
    names = sorted(entry.name for entry in folder.iterdir())
    files = [name for name in names if name.endswith(EXTENSIONS)]
    if files and not any(name.startswith((f"{part}-", f"{part}.")) for name in files):  # those of a data set's split
        raise DataError(f"{source.path}: no file {part}.* in {folder}; there: {', '.join(names)}")
    return replace(source, path=str(folder), split=part)


def _one_file(path: Path, source: DataSource) -> Path:
    if source.name is not None or source.split != "train" or source.revision is not None:
        raise DataError(
            f"{source.path}: `split`, `name` and `revision` choose within a folder or hub dataset; this is one file"
        )
    kind_of(path)
    return path


def kind_of(path: Path) -> str:
    """One of `KINDS`, as the file's name tells.

    Raises `DataError` for a name that tells none.
    """
    for kind in KINDS:
        if path.name.endswith(kind) or (path.name.endswith(kind + ".gz") and kind != ".parquet"):
            return kind
    raise DataError(f"{path}: the extension says the kind of file; known: {', '.join(KINDS)}, text ones also .gz")


def _looks_like_hub_id(path: str) -> bool:
    is_file_name = path.removesuffix(".gz").endswith(KINDS)
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None and not is_file_name


def neighbours(path: Path) -> str:
    """What there is beside a path that is not there."""
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either"
    names = sorted(entry.name for entry in path.parent.iterdir())
    return f"In the folder {path.parent} there are {len(names)} entries" + nearest(path.name, names)
