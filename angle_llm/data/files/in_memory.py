"""Rows of a Python object: a list of dictionaries, or a dataset of the library `datasets`, from disk or from the hub."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from angle_llm.data.files.reader import FileReader, label_names_in
from angle_llm.data.formats import DataError
from angle_llm.settings.parsing import similar_paths, unknown_name


def json_value(value: Any) -> Any:
    """Return a value of a row as a value of JSON, equal in all processes.

    Arrays become lists, and decimal numbers floats. Other objects become a dictionary, which no field accepts.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Decimal):
        return float(value)
    shown = sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
    return {type(value).__name__: re.sub(" at 0x[0-9A-Fa-f]+", "", str(shown))}  # without the address in memory


class RowsInMemory(FileReader):
    """Reader of the rows of a Python object: a list of dictionaries, or a `datasets.Dataset`.

    Args:
        rows: The rows, column → value; their number is the row number from 1.
        name: Name of the rows in messages.
    """

    unit = "row"

    def __init__(self, rows: Iterable[Mapping[str, Any]], *, name: str = "rows") -> None:
        super().__init__(Path(f"memory:{name}"), name=name)
        features: Any = getattr(rows, "features", None)
        self.label_names = {} if features is None else label_names_in(features.to_dict())
        self._rows = rows

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the rows and label names."""
        digest = sha256(json.dumps(self.label_names).encode())
        for row in self._rows:
            digest.update(json.dumps(row, default=json_value).encode())
        return digest.hexdigest()

    @cached_property
    def columns(self) -> list[str]:
        names = getattr(self._rows, "column_names", None)
        return list(names or dict.fromkeys(column for row in self._rows for column in row))

    def _records(self) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(map(dict, self._rows), 1))


class DatasetReader(RowsInMemory):
    """Reader of a dataset split that the library `datasets` loads from a local folder or from the Hugging Face hub.

    Args:
        name: Path of the local folder, or hub id.
        configuration: Name of the dataset configuration; None: the default configuration.
        split: Name of the split.

    Raises:
        DataError: if the split cannot be loaded, or the disk has too little space for the dataset.
    """

    def __init__(self, name: str, configuration: str | None, split: str) -> None:
        import datasets

        try:
            builder = datasets.load_dataset_builder(name, configuration)
            known = [str(part) for part in builder.info.splits or builder.config.data_files or ()]
            if known and re.fullmatch(r"\w+", split) and split not in (*known, "all"):
                raise DataError(f"{name}: {unknown_name('split', split, known)}")
            _check_space(name, builder)
            builder.download_and_prepare()
            dataset = builder.as_dataset(split)
        except DataError:
            raise
        except Exception as error:  # many types: no network, unknown dataset, configuration or split, broken files
            of_configuration = f" of configuration {configuration!r}" if configuration else ""
            hint = "" if Path(name).exists() else f" It is not a local path. {similar_paths(Path(name))}"
            problem = f"`datasets` could not load split {split!r}{of_configuration}: {error}"
            raise DataError(f"{name}: {problem}. Check split and names.{hint}") from error
        super().__init__(dataset, name=name)
        self.identity = str(dataset._fingerprint)


def _check_space(name: str, builder: Any) -> None:
    """Raise `DataError` if a dataset, which `datasets` downloads and copies to a table, is larger than the free disk space.

    Without sizes in the dataset card, the table is assumed to be as large as the files. Files in the cache of the hub, such
    as those of an interrupted download, need no more space.
    """
    from datasets.utils.file_utils import xgetsize
    from huggingface_hub import try_to_load_from_cache

    table = Path(builder.cache_dir)
    if table.exists():  # from an earlier run
        return
    urls = [url for urls_of_split in (builder.config.data_files or {}).values() for url in urls_of_split]
    download_size = builder.info.download_size or sum(map(xgetsize, urls))
    cached_size = 0
    for url in urls:
        if match := re.fullmatch("hf://datasets/([^@]+)@([^/]+)/(.+)", url):
            cached = try_to_load_from_cache(match[1], match[3], revision=match[2], repo_type="dataset")
            cached_size += Path(cached).stat().st_size if isinstance(cached, str) else 0
    missing = max(download_size - cached_size, 0) if any("://" in url for url in urls) else 0
    needed = missing + (builder.info.dataset_size or download_size)
    folder = next(parent for parent in table.parents if parent.exists())
    if needed > (free := shutil.disk_usage(folder).free):
        raise DataError(
            f"{name}: expected {needed / 1e9:,.2f} GB of free space for its files and their table in {folder}, got "
            f"{free / 1e9:,.2f} GB. Set HF_HOME to a folder on a larger disk, or stream a part (docs/data.md, Large datasets)"
        )
