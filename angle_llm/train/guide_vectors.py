"""Vectors of the training texts by another encoder: a guide of the negatives, or a teacher.

They are computed once, before the model is loaded, and kept in the run directory:

vectors/NAME/keys.npy      (K,) hash of each distinct text
vectors/NAME/vectors.npy   (K, G) float32, memory-mapped
vectors/NAME/source.json   the encoder and the examples
vectors/NAME.parts/        while they are computed; see `resumable`

Legend: K distinct texts, n texts of a batch, G dimensions.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from angle_llm.config import TrainSettings
from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import pairs_of
from angle_llm.data.mixture import Mixture
from angle_llm.io import (
    log,
    progress_bar,
    read_object,
    remove_folder,
    restore_folder,
    sha256_of,
    write_folder,
    write_json,
)
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.prompts import SIDES, Side
from angle_llm.resumable import IDENTITY, ResumableFolder
from angle_llm.train.distributed import Processes

TEXTS_AT_ONCE = 16_384
"""Texts that are encoded between two writes."""
FOLDER = "vectors"


@dataclass(frozen=True)
class GuideVectors:
    """The vectors of a folder, and which of them belong to a text."""

    folder: Path

    @cached_property
    def digest(self) -> str:
        """Hash of texts and vectors: runs with equal vectors compute the same."""
        names = ("keys.npy", "vectors.npy")
        return hashlib.sha256("".join(sha256_of(self.folder / name) for name in names).encode()).hexdigest()[:16]

    @property
    def width(self) -> int:
        """G, the length of a vector."""
        width: int = self._vectors.shape[1]
        return width

    def rows(self, batch: TextBatch) -> Tensor:
        """Return the vectors of the texts of a batch, (n, G). A text on the left of a pair is a query."""
        queries = set(batch.left.tolist())
        keys = [_key("query" if row in queries else "document", text) for row, text in enumerate(batch.texts)]
        key_n = np.frombuffer(b"".join(keys), dtype=np.uint64)
        sorted_K, order_K = self._sorted
        place_n = np.searchsorted(sorted_K, key_n).clip(max=len(sorted_K) - 1)
        if (missing := np.flatnonzero(sorted_K[place_n] != key_n)).size:
            raise KeyError(f"{self.folder} has no vector of {batch.texts[missing[0]]!r}")
        return torch.from_numpy(self._vectors[order_K[place_n]])

    @cached_property
    def _sorted(self) -> tuple[Any, Any]:
        key_K = np.load(self.folder / "keys.npy")
        order_K = np.argsort(key_K)
        return key_K[order_K], order_K

    @cached_property
    def _vectors(self) -> Any:
        return np.load(self.folder / "vectors.npy", mmap_mode="r")


def guide_vectors(
    settings: TrainSettings, data: Mixture, run_folder: Path, processes: Processes
) -> dict[str, GuideVectors]:
    """Return the vectors that the losses need, by field of `Relation`. Rank 0 computes those that are not stored yet.

    The other ranks read the files of rank 0, so the run directory must be on a file system that they share.

    Raises:
        FileNotFoundError: on a rank without the files.
        RemoteRankError: on the other ranks, if rank 0 failed.
        ArtifactError, ValueError: for an encoder that cannot be loaded.
    """
    found = {}
    for name, path in encoders_of(settings).items():
        folder = run_folder / FOLDER / name
        processes.from_main(partial(_prepare, folder, path, data, processes))
        if not (folder / "vectors.npy").is_file():
            raise FileNotFoundError(f"no vectors in {folder}. Put --run-dir on a file system that all machines share.")
        found[name] = GuideVectors(folder)
    return found


def encoders_of(settings: TrainSettings) -> dict[str, str]:
    """Return the paths of the encoders whose vectors the losses need, by field of `Relation`."""
    objective = settings.objective
    paths = {"guide": objective.false_negatives.guide, "teacher_vectors": objective.teacher}
    return {name: path for name, path in paths.items() if path is not None}


def _prepare(folder: Path, path: str, data: Mixture, processes: Processes) -> None:
    """Compute the vectors, unless the folder has those of this encoder and these examples. A killed computation
    is resumed."""
    source = {"encoder": _stamp(path), "examples": data.digest}
    work = folder.with_name(f"{folder.name}.parts")
    if work.is_dir() and read_object(work / IDENTITY) != source:
        remove_folder(work)
    if not folder.is_dir() or read_object(folder / "source.json") != source:
        restore_folder(folder)
        with ResumableFolder(work, source, option="--run-dir") as parts:
            _compute(path, data, processes.load_device(None), parts)

            def fill(target: Path) -> None:
                _join([work / name for name in parts.names()], target)
                write_json(target / "source.json", source)

            write_folder(folder, fill)
    remove_folder(work)
    gc.collect()  # before the model is loaded
    if processes.device.type == "cuda":
        torch.cuda.empty_cache()


def _compute(path: str, data: Mixture, device: torch.device, parts: ResumableFolder) -> None:
    """Write the keys and vectors of all texts, those of `TEXTS_AT_ONCE` in a part."""
    count = sum(1 for _ in distinct_texts(data))
    log(f"computing vectors of {count:,} texts with {path}")
    encoder: SentenceEncoder | None = None
    texts = distinct_texts(data)
    with progress_bar("vectors", count, "text") as bar:
        for first in range(0, count, TEXTS_AT_ONCE):
            some, name = list(islice(texts, TEXTS_AT_ONCE)), f"part-{first:012d}"
            if not parts.is_whole(name):
                encoder = encoder or SentenceEncoder.from_pretrained(path, device=device)
                parts.write(name, partial(_write_part, encoder, some))
            bar.update(len(some))


def _write_part(encoder: SentenceEncoder, some: list[tuple[Side, str, bytes]], folder: Path) -> None:
    vectors_NG = np.empty((len(some), encoder.dimensions), dtype=np.float32)
    for side in SIDES:
        if places := [place for place, (of, _, _) in enumerate(some) if of == side]:
            vectors_NG[places] = encoder.for_side(side).encode([some[place][1] for place in places])
    np.save(folder / "vectors.npy", vectors_NG)
    np.save(folder / "keys.npy", np.frombuffer(b"".join(key for _, _, key in some), dtype=np.uint64))


def _join(parts: list[Path], target: Path) -> None:
    """Write the keys and vectors of all parts to one file each."""
    key_K = np.concatenate([np.load(part / "keys.npy") for part in parts])
    width = np.load(parts[0] / "vectors.npy", mmap_mode="r").shape[1]
    shape, first = (len(key_K), width), 0
    vectors_KG = np.lib.format.open_memmap(target / "vectors.npy", mode="w+", dtype=np.float32, shape=shape)
    for part in parts:
        rows_NG = np.load(part / "vectors.npy")
        vectors_KG[first : first + len(rows_NG)] = rows_NG
        first += len(rows_NG)
    vectors_KG.flush()
    np.save(target / "keys.npy", key_K)


def distinct_texts(data: Mixture) -> Iterator[tuple[Side, str, bytes]]:
    """Yield the side, text and key of each distinct text: the first texts of pairs are queries, the others documents."""
    seen: set[bytes] = set()
    for index in range(len(data)):
        for left, right, _ in pairs_of(data[index]):
            sides: tuple[tuple[Side, str], ...] = (("query", left), ("document", right))
            for side, text in sides:
                key = _key(side, text)
                if key not in seen:
                    seen.add(key)
                    yield side, text, key


def _key(side: Side, text: str) -> bytes:
    """Return a hash of 64 bits: two of ten million texts have the same one with a probability of 3e-6."""
    return hashlib.blake2b(f"{side} {text}".encode(), digest_size=8).digest()


def _stamp(path: str) -> list[Any]:
    """Return the path of an encoder, with sizes and times of its files: another encoder at the same path is noticed."""
    files = sorted(Path(path).expanduser().rglob("*")) or [Path(path).expanduser()]
    return [path, [[str(one), one.stat().st_size, one.stat().st_mtime_ns] for one in files if one.is_file()]]
