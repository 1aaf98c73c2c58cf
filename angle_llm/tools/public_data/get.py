"""`angle-llm data get`: download public evaluation sets and training data from the Hugging Face hub.

`data_sets.yaml` lists the sets: files, commits on the hub, numbers of rows, and fingerprints of gold scores.
A source is downloaded into the cache of huggingface_hub and converted; the result is checked, then written to the data
directory. So each file there is complete.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from angle_llm.data.formats import DataError
from angle_llm.data.keys import is_distinctive, normalized
from angle_llm.data.sources import resolve_source
from angle_llm.evaluate.sts_tasks import data_file, read_pairs, read_task
from angle_llm.io import log, write_file, write_json_lines
from angle_llm.settings.commands import GetSettings
from angle_llm.settings.parsing import SettingsError, unknown_name

TABLE = Path(__file__).with_name("data_sets.yaml")


class PublicFile(NamedTuple):
    """A file of a data directory (`path`): its source on the hub, and its expected rows and fingerprint of gold values.

    `part` is an STS task, or a range of rows in the source.
    """

    path: str
    repo: str
    commit: str
    source: str
    part: str
    rows: int
    gold: str = ""


class PublicSet(NamedTuple):
    """A data set that `data get` downloads.

    `reader`: `senteval` (a task in SentEval's archive), `pairs` (scored pairs), `triples` (training data, to which the
    column `sts_overlap` is added), `copy` (the file is not changed).
    """

    content: str
    size: str
    license: str
    files: tuple[PublicFile, ...]
    reader: str = "copy"
    columns: tuple[str, ...] = ()
    group: str = ""


def read_table() -> dict[str, PublicSet]:
    """Return data set name → data set, from `data_sets.yaml`."""
    sets = {}
    for name, values in yaml.safe_load(TABLE.read_text(encoding="utf-8"))["sets"].items():
        repo, source = values.pop("repo", ()), values.pop("source", "")
        files = [(path, *repo, source.format(part), part, *rest) for path, part, *rest in values.pop("files", ())]
        for task, commit, *counts in values.pop("tasks", ()):
            for part, rows in zip(("corpus", "queries", "qrels"), counts, strict=True):
                path, source = (f"{part}/{split}-00000-of-00001.parquet" for split in ("test", "train"))
                files.append((f"retrieval/{task}/{path}", f"zeta-alpha-ai/{task}", commit, source, part, rows))
        sets[name] = PublicSet(files=tuple(PublicFile(*file) for file in files), **values)
    return sets


def select_sets(names: Sequence[str]) -> dict[str, PublicSet]:
    """Return data set name → data set, for names of sets and groups. Training data select the STS sets too."""
    sets = read_table()
    known = {*sets, *(entry.group for entry in sets.values() if entry.group)}
    if unknown := [name for name in names if name not in known]:
        raise SettingsError(unknown_name("data set", unknown[0], known))
    wanted = {*names, *("sts" for name in names if name in sets and sets[name].reader == "triples")}
    return {name: entry for name, entry in sets.items() if wanted & {name, entry.group}}


def get_main(settings: GetSettings) -> None:
    """List the public data sets; or download the named sets, and print what was written."""
    sets = select_sets(settings.names) if settings.names else read_table()
    if settings.to is None:
        for name, entry in sets.items():
            print(f"{name:13} {entry.size:14} {entry.content}. License: {entry.license}")
        print(
            "Shared: one download for these sets. Group of all STS sets: sts. Download: angle-llm data get NAME … --to DATA"
        )
        return
    root = settings.to.expanduser()
    # `sets` has the STS sets first, as data_sets.yaml, so their files exist when training data call `sts_texts`.
    paths = [file.path for entry in select_sets(["sts"]).values() for file in entry.files if "train" not in file.path]
    sts_texts = cache(lambda: evaluation_texts(data_file(root / path) for path in paths))
    missing = _missing_files(sets, root)
    log(f"{len(missing)} files are missing")

    # Download, convert, check, write.
    with tempfile.TemporaryDirectory() as temporary:
        for entry, file in missing:
            source = _download(file)
            converted = Path(temporary, Path(file.path).name)
            _convert(source, converted, file, entry, sts_texts)
            check_file(converted, file, f"{source.resolve()}, read as {file.path}")
            with converted.open("rb") as stream:
                write_file(root / file.path, partial(shutil.copyfileobj, stream))
            log(f"{root / file.path}: {file.rows:,} rows")


def _missing_files(sets: dict[str, PublicSet], root: Path) -> list[tuple[PublicSet, PublicFile]]:
    """Return the files that the data directory `root` lacks, with their sets. Raises `DataError` for a wrong file there."""
    missing = []
    for name, entry in sets.items():
        log(f"{name}: {entry.content}. Download: {entry.size}. License: {entry.license}")
        for file in entry.files:
            path = data_file(root / file.path)
            if path.is_file():
                check_file(path, file, str(path))
            else:
                missing.append((entry, file))
    return missing


def _download(file: PublicFile) -> Path:
    """Download the source of a file into the cache of huggingface_hub and return its path."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(file.repo, file.source, repo_type="dataset", revision=file.commit))
    except Exception as error:  # a lost connection: each HTTP library has its own errors
        if isinstance(error, OSError) and not isinstance(error, LocalEntryNotFoundError):
            raise  # refused by the hub, or an error of this machine
        raise ConnectionError(f"{file.repo}/{file.source}: run the same command again; {error}") from error


def _convert(source: Path, target: Path, file: PublicFile, entry: PublicSet, sts_texts: Callable[[], set[str]]) -> None:
    """Write a file of a data directory from the downloaded source. `sts_texts` returns the texts of evaluation sets."""
    rows: Iterable[Sequence[Any]]
    if entry.reader == "copy":
        shutil.copyfile(source, target)
        return
    if entry.reader == "pairs":
        rows = read_pairs(source).pairs
        if ":" in file.part:
            start, stop = (int(bound) if bound else None for bound in file.part.split(":"))
            rows = rows[start:stop]
    elif entry.reader == "triples":
        triples = ([str(value) for value in row.values.values()] for row in resolve_source(source).good_rows())
        rows = ([*triple, sts_overlap(triple, sts_texts())] for triple in triples)
    else:
        folder = target.with_name("senteval")
        if not folder.exists():
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")  # paths and links that leave the folder are errors
        folder = next(folder.rglob("STS"), folder / "STS").parent  # the folder with STS/
        rows = read_task(folder, file.part, "senteval").pairs
    write_json_lines(target, (dict(zip(entry.columns, row, strict=False)) for row in rows))


def check_file(path: Path, file: PublicFile, name: str) -> None:
    """Raise `DataError` if the rows or the scores of a file differ from what is expected; `name` is for messages."""
    rows = resolve_source(path).good_rows(["score"] if file.gold else ())
    values = [f"{row.number('score'):.6f}" if file.gold else "" for row in rows]
    digest = file.gold and hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]
    if (len(values), digest) != (file.rows, file.gold):
        expected, got = (f" with the fingerprint {value} of score" if value else "" for value in (file.gold, digest))
        raise DataError(
            f"{name}: expected {file.rows:,} rows{expected}, got {len(values):,} rows{got}. It is another version or "
            "damaged. Remove it, and run the command again"
        )


def evaluation_texts(paths: Iterable[Path]) -> set[str]:
    """Return the sentences of four words or more in files of scored pairs, normalized."""
    texts = {normalized(text) for path in paths for pair in read_pairs(path).pairs for text in pair[:2]}
    return set(filter(is_distinctive, texts))


def sts_overlap(texts: Iterable[str], evaluated: Collection[str]) -> int:
    """Return 1 if a text, normalized, is one of the texts of evaluation sets, else 0."""
    return int(any(normalized(text) in evaluated for text in texts))
