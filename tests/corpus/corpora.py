"""Small corpora, and `embed_corpus` on them in this process or in a fork that is killed."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet

from angle_llm.corpus.embed import Keeping, embed_corpus
from angle_llm.corpus.shards import Worker
from angle_llm.corpus.vectors import VectorForm
from angle_llm.data.corpus import Corpus
from angle_llm.model.encoder import SentenceEncoder

KEEPING = Keeping(format="parquet", shard_rows=4)
TEXTS = [f"A {who} {does}." for who in ("man", "dog", "cat", "child") for does in ("runs", "eats", "sleeps")] + ["End"]
"""13: three blocks of four, and one of one."""


def write_lines(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def work(
    encoder: SentenceEncoder,
    input: Path,
    folder: Path,
    keeping: Keeping = KEEPING,
    *,
    target: Path | None = None,
    worker: Worker | None = None,
    id_column: str | None = None,
    **form: Any,
) -> int:
    """What the command does once the encoder is loaded."""
    corpus = Corpus.open(input, id_column=id_column)
    survey = corpus.survey(skip_bad=keeping.skip_bad)
    if target is not None:
        keeping = replace(keeping, format="bare npy")
    form_ = VectorForm(encoder.dimensions, **form)
    return embed_corpus(corpus, survey, encoder, "tiny", form_, keeping, folder, target=target, worker=worker)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def table(folder: Path) -> dict[str, list[Any]]:
    """The columns of all Parquet shards, in order."""
    index = json.loads((folder / "embeddings.json").read_text())
    names = [file["name"] for shard in index["shards"] for file in shard["files"] if file["name"].endswith(".parquet")]
    tables = [parquet.read_table(folder / name).to_pydict() for name in names]
    return {column: [value for one in tables for value in one[column]] for column in tables[0]}


def vectors(folder: Path) -> np.ndarray:
    return np.array(table(folder)["embedding"], dtype=np.float32)


def in_a_fork(body: Callable[[], object], log: Path) -> int:
    """Exit code of the body in a process of its own; negative for a signal."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with log.open("a") as file:
                os.dup2(file.fileno(), 2)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_before(number: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """(how many calls were made, arm): armed, a process kills itself before the call with this number, from 1, of those
    that put bytes on disk, name them or remove them."""
    calls = 0

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(owner, name, watched)

    def arm() -> None:
        for owner, name in [(os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "replace"), (Path, "unlink")]:
            watch(owner, name)

    return lambda: calls, arm
