"""Embeddings of the training texts from another encoder: a guide that filters false negatives, or a teacher.

The embeddings are computed once, before the model is loaded, and stored in the run directory:

vectors/NAME/keys.npy      (K,) hashes of the distinct texts
vectors/NAME/vectors.npy   (K, G) embeddings in float32, read by memory-mapping
vectors/NAME/source.json   the encoder, and a hash of the examples
vectors/NAME.parts/        finished parts during the computation, which resumes after a kill (`ResumableFolder`)

Shapes: K distinct texts, N texts of a part, n texts of a batch, G dimensions.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from angle_llm.data.batch import TextBatch
from angle_llm.data.formats import pairs_of
from angle_llm.data.mixture import Mixture
from angle_llm.io import (
    IDENTITY,
    ResumableFolder,
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
from angle_llm.model.source.resolve import ModelSource
from angle_llm.prompts import SIDES, Side
from angle_llm.train.distributed import Processes

TEXTS_AT_ONCE = 16_384
"""Number of texts that are embedded and written to disk together; a killed computation resumes after them."""
FOLDER = "vectors"
"""Name of the folder with the embeddings in a run directory."""


@dataclass(frozen=True)
class PrecomputedVectors:
    """Stored embeddings of the training texts from another encoder, with look-up by text."""

    folder: Path
    """Folder with the embeddings: `vectors/guide` or `vectors/teacher_vectors` in a run directory."""

    @cached_property
    def digest(self) -> str:
        """Hash of the texts and their embeddings; checkpoints with another hash are refused."""
        names = ("keys.npy", "vectors.npy")
        return hashlib.sha256("".join(sha256_of(self.folder / name) for name in names).encode()).hexdigest()[:16]

    def rows(self, batch: TextBatch) -> Tensor:
        """Return the embeddings of the texts in a batch, (n texts, G dimensions).

        First texts of pairs (`batch.left`) are queries, other texts are documents.

        Raises:
            KeyError: if there is no embedding of a text.
        """
        queries = set(batch.left.tolist())
        keys = [_key("query" if row in queries else "document", text) for row, text in enumerate(batch.texts)]
        key_n = np.frombuffer(b"".join(keys), dtype=np.uint64)
        sorted_K, order_K = self._sorted
        place_n = np.searchsorted(sorted_K, key_n).clip(max=len(sorted_K) - 1)
        if (missing := np.flatnonzero(sorted_K[place_n] != key_n)).size:
            raise KeyError(f"{self.folder} has no embedding of {batch.texts[missing[0]]!r}")
        return torch.from_numpy(self._vectors[order_K[place_n]])

    @cached_property
    def _sorted(self) -> tuple[Any, Any]:
        """Sorted hashes of the K texts, (K,), and the row number of each text in the embeddings, (K,)."""
        key_K = np.load(self.folder / "keys.npy")
        order_K = np.argsort(key_K)
        return key_K[order_K], order_K

    @cached_property
    def _vectors(self) -> Any:
        """Embeddings of the K texts, (K, G dimensions), memory-mapped."""
        return np.load(self.folder / "vectors.npy", mmap_mode="r")


def precompute_vectors(
    encoders: Mapping[str, ModelSource], data: Mixture, run_folder: Path, processes: Processes
) -> dict[str, PrecomputedVectors]:
    """Embed the training texts with a guide or teacher encoder, and return the stored embeddings.

    `encoders` and the result are keyed by field of `Relation`: `guide` and `teacher_vectors`. Rank 0 computes
    embeddings that are not stored yet in `run_folder`/vectors. The other ranks read these files, so all ranks must
    share the file system of the run directory.

    Raises:
        FileNotFoundError: on ranks that cannot read the files.
        RemoteRankError: on other ranks than 0, if rank 0 fails.
        ArtifactError, ValueError: if an encoder cannot be loaded.
    """
    found = {}
    for name, encoder in encoders.items():
        folder = run_folder / FOLDER / name
        processes.from_main(partial(_prepare, folder, encoder, data, processes))
        if not (folder / "vectors.npy").is_file():
            raise FileNotFoundError(f"no vectors in {folder}. Put --run-dir on a file system that all machines share.")
        found[name] = PrecomputedVectors(folder)
    return found


def _prepare(folder: Path, encoder: ModelSource, data: Mixture, processes: Processes) -> None:
    """Embed the training texts and store the embeddings in `folder`, unless stored for the same encoder and examples.

    If an earlier computation was killed, it is resumed.
    """
    source = {"encoder": [*_stamp(encoder.path), encoder.revision], "examples": data.digest}
    work = folder.with_name(f"{folder.name}.parts")
    if work.is_dir() and read_object(work / IDENTITY) != source:
        remove_folder(work)
    if not folder.is_dir() or read_object(folder / "source.json") != source:
        restore_folder(folder)
        with ResumableFolder(work, source, option="--run-dir") as parts:
            _compute(encoder, data, processes.device, parts)

            def fill(target: Path) -> None:
                _join([work / name for name in parts.names()], target)
                write_json(target / "source.json", source)

            write_folder(folder, fill)
    remove_folder(work)
    gc.collect()  # before the model is loaded
    torch.cuda.empty_cache()


def _compute(source: ModelSource, data: Mixture, device: torch.device, parts: ResumableFolder) -> None:
    """Embed all distinct texts of the data with the encoder `source`, and write text hashes and embeddings to `parts`.

    A part has `TEXTS_AT_ONCE` texts; parts that a previous run completed are skipped.
    """
    count = sum(1 for _ in distinct_texts(data))
    log(f"computing vectors of {count:,} texts with {source.path}")
    encoder: SentenceEncoder | None = None
    texts = distinct_texts(data)
    with progress_bar("vectors", count, "text") as bar:
        for first in range(0, count, TEXTS_AT_ONCE):
            part, name = list(islice(texts, TEXTS_AT_ONCE)), f"part-{first:012d}"
            if not parts.is_whole(name):
                encoder = encoder or SentenceEncoder.from_pretrained(source, device=device)
                parts.write(name, partial(_write_part, encoder, part))
            bar.update(len(part))


def _write_part(encoder: SentenceEncoder, texts: list[tuple[Side, str, bytes]], folder: Path) -> None:
    """Write hashes and embeddings of texts to keys.npy and vectors.npy in a folder.

    `texts` has (side, text, hash), where side is `query` or `document` and selects the prompt.
    """
    vectors_NG = np.empty((len(texts), encoder.dimensions), dtype=np.float32)
    for side in SIDES:
        if places := [place for place, (text_side, _, _) in enumerate(texts) if text_side == side]:
            vectors_NG[places] = encoder.for_side(side).encode([texts[place][1] for place in places])
    np.save(folder / "vectors.npy", vectors_NG)
    np.save(folder / "keys.npy", np.frombuffer(b"".join(key for _, _, key in texts), dtype=np.uint64))


def _join(parts: list[Path], target: Path) -> None:
    """Concatenate keys.npy (text hashes) and vectors.npy (embeddings) of the folders `parts` in the folder `target`."""
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
    """Yield (side, text, hash) of every distinct text of the data.

    The side is `query` for first texts of pairs and `document` for second texts. A text on both sides is yielded twice.
    """
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
    """Return a 64-bit hash of a text and its side, `query` or `document`.

    Among ten million texts, the probability of a collision is 3e-6.
    """
    return hashlib.blake2b(f"{side} {text}".encode(), digest_size=8).digest()


def _stamp(path: str) -> list[Any]:
    """Return the path of an encoder with names, sizes and times of its files, to detect a changed encoder."""
    files = sorted(Path(path).expanduser().rglob("*")) or [Path(path).expanduser()]
    return [path, [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]]
