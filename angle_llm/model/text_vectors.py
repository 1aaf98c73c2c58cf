"""Vectors of texts by an encoder, computed once and stored: for a guide, a teacher, mining and scoring.

    FOLDER/vectors.npy    (K, D) vectors in float32, read by memory-mapping
    FOLDER/keys.npy       (K,) hashes of the texts with their sides
    FOLDER/source.json    the encoder and the texts
    FOLDER.parts/         finished parts during the computation, which resumes after a kill (`ResumableFolder`)

Shapes: K stored texts, n texts of a batch, T texts of a `MiningData`, N texts to look up, D dimensions.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from angle_llm.data.formats import DataError, pairs_of
from angle_llm.data.positives import MiningData
from angle_llm.device import release_cached_memory
from angle_llm.io import (
    log,
    progress_bar,
    read_object,
    remove_folder,
    restore_folder,
    sha256_of,
    sha256_of_json,
    write_folder,
    write_json,
)
from angle_llm.model.vectors import Array, encoder_identity, join_arrays, save_array, untokenizable
from angle_llm.prompts import SIDES, InstructedText, Side, split_instructions, usable_instructions
from angle_llm.resumable_folder import IDENTITY, ResumableFolder

if TYPE_CHECKING:
    import torch

    from angle_llm.data.batch import TextBatch
    from angle_llm.data.mixture import Mixture
    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.model.source.resolve import ModelSource

TEXTS_AT_ONCE = 16_384
"""Number of texts that are embedded and written to disk together; a killed computation resumes after them. Another number
can change the last digits of the vectors."""
_CHECKED_AT_ONCE = 1024
"""Number of texts that are tokenized together before they are embedded."""
_CHECKED_CHARACTERS = 200
"""Number of characters of a text that are tokenized first; a text without tokens there is tokenized whole."""
_VERSION = 2
"""Version of stored vectors; 2: all vectors are finite and not 0."""
FOLDER = "vectors"
"""Name of the folder with the vectors of a guide and a teacher in a run directory."""


class SidedText(NamedTuple):
    """A text, and the side whose prompt it gets."""

    text: InstructedText
    side: Side | None = None
    """None: queries and documents have the same prompt."""

    def shown(self) -> str:
        """Return the first 80 characters for messages; invisible characters are escaped."""
        return json.dumps(self.text[:80])

    @property
    def key(self) -> bytes:
        """64-bit hash of text and side. Among ten million texts, the probability of a collision is 3e-6."""
        return hashlib.blake2b(f"{self.side} {self.text}".encode(), digest_size=8).digest()


# --- the store --------------------------------------------------------------------------------------------------------


def store_vectors(
    folder: Path,
    identity: Mapping[str, Any],
    texts: Callable[[], Iterable[SidedText]],
    load_encoder: Callable[[], SentenceEncoder],
    *,
    option: str,
) -> None:
    """Embed texts and store the vectors in `folder`, unless stored with the same `identity`; resume after a kill.

    Args:
        identity: JSON object that determines encoder and texts.
        texts: function that returns the texts in the order of the stored rows; called if vectors are missing.
        load_encoder: function that returns the encoder; called if vectors are missing.
        option: flag that names the folder, for error messages.

    Raises:
        DataError: for a text without tokens, before any text is embedded; for a vector that is 0.
        FloatingPointError: for a vector that is not finite.
        FolderError: if another process computes the same vectors.
    """
    identity = {**identity, "version": _VERSION}
    unfinished = folder.with_name(f"{folder.name}.parts")
    if unfinished.is_dir() and read_object(unfinished / IDENTITY) != identity:
        remove_folder(unfinished)
    if not folder.is_dir() or read_object(folder / "source.json") != identity:
        with ResumableFolder(unfinished, identity, option=option) as parts:
            restore_folder(folder)
            part_folders = _write_parts(parts, texts, load_encoder)

            def fill(target: Path) -> None:
                for name in ("vectors.npy", "keys.npy"):
                    with (target / name).open("wb") as file:
                        join_arrays([part / name for part in part_folders], file)
                write_json(target / "source.json", identity)

            write_folder(folder, fill)
    remove_folder(unfinished)


def _write_parts(
    parts: ResumableFolder, texts: Callable[[], Iterable[SidedText]], load_encoder: Callable[[], SentenceEncoder]
) -> list[Path]:
    """Embed the texts in parts of `TEXTS_AT_ONCE`, except finished parts; return the folders of all parts in order."""
    encoder: SentenceEncoder | None = None
    folders = []
    count = sum(1 for _ in texts())
    remaining = iter(texts())
    with progress_bar("vectors", count, "text") as bar:
        for first in range(0, count, TEXTS_AT_ONCE):
            part = list(islice(remaining, TEXTS_AT_ONCE))
            name = f"part-{first:012d}"
            if not parts.is_whole(name):
                if encoder is None:
                    encoder = load_encoder()
                    _check_tokens(encoder, texts())  # such a text would stop the work in the middle
                parts.write(name, partial(_write_part, encoder, part))
            folders.append(parts.path / name)
            bar.update(len(part))
    return folders


def _write_part(encoder: SentenceEncoder, texts: Sequence[SidedText], folder: Path) -> None:
    """Write the vectors and hashes of texts to vectors.npy and keys.npy in a folder."""
    vectors_ND = np.empty((len(texts), encoder.dimensions), dtype=np.float32)
    for side in {text.side for text in texts}:
        rows = [row for row, text in enumerate(texts) if text.side == side]
        of_side = encoder if side is None else encoder.for_side(side)
        plain, instructions = split_instructions(texts[row].text for row in rows)
        usable = usable_instructions(of_side.prompt, instructions)
        vectors_ND[rows] = of_side.encode(plain, instruction=usable, show_progress=True)
    for row in np.flatnonzero(~vectors_ND.any(axis=1)).tolist():
        raise DataError(f"text {texts[row].shown()}: its vector is 0, so it has no cosine. Remove the row")
    save_array(folder / "vectors.npy", vectors_ND)
    save_array(folder / "keys.npy", np.frombuffer(b"".join(text.key for text in texts), dtype=np.uint64))


# --- vectors of a guide or teacher, looked up by text -----------------------------------------------------------------


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

    def rows(self, batch: TextBatch) -> torch.Tensor:
        """Return the embeddings of the texts in a batch, (n texts, D dimensions).

        First texts of pairs (`batch.left`) are queries, other texts are documents.

        Raises:
            KeyError: if there is no embedding of a text.
        """
        import torch

        queries = set(batch.left.tolist())
        texts = [SidedText(text, "query" if row in queries else "document") for row, text in enumerate(batch.texts)]
        key_n = np.frombuffer(b"".join(text.key for text in texts), dtype=np.uint64)
        sorted_K, order_K = self._sorted
        position_n = np.searchsorted(sorted_K, key_n).clip(max=len(sorted_K) - 1)  # a key above all is missing
        if (missing := np.flatnonzero(sorted_K[position_n] != key_n)).size:
            raise KeyError(f"{self.folder} has no embedding of {batch.texts[missing[0]]!r}")
        return torch.from_numpy(self._vectors[order_K[position_n]])

    @cached_property
    def _sorted(self) -> tuple[Any, Any]:
        """Sorted hashes of the K texts, (K,), and the row number of each text in the embeddings, (K,)."""
        key_K = np.load(self.folder / "keys.npy")
        order_K = np.argsort(key_K)
        return key_K[order_K], order_K

    @cached_property
    def _vectors(self) -> Any:
        """Embeddings of the K texts, (K, D), memory-mapped."""
        return np.load(self.folder / "vectors.npy", mmap_mode="r")


def precompute_vectors(
    encoders: Mapping[str, ModelSource],
    data: Mixture,
    run_folder: Path,
    device: torch.device,
    from_main: Callable[[Callable[[], None]], None],
    *,
    resumes: bool = False,
) -> dict[str, PrecomputedVectors]:
    """Embed the training texts with a guide or teacher encoder, and return the stored embeddings.

    `encoders` and the result are keyed by field of `Relation`: `guide` and `teacher_vectors`. `from_main` calls a
    function on rank 0, which computes embeddings that are not stored yet in `run_folder`/vectors. All other ranks read
    these files, so all ranks must share the file system of the run directory. `resumes`: use the stored embeddings without
    a comparison of encoder and texts; `Checkpoints` compares their digest.

    Raises:
        FileNotFoundError: on ranks that cannot read the files.
        RemoteRankError: on other ranks than 0, if rank 0 fails.
        ArtifactError, ValueError: if an encoder cannot be loaded, or cannot encode a text.
    """
    vectors = {}
    for name, source in encoders.items():
        folder = run_folder / FOLDER / name
        from_main(partial(_store_training_texts, folder, source, data, device, resumes=resumes))
        if not (folder / "vectors.npy").is_file():
            raise FileNotFoundError(f"no vectors in {folder}. Put --run-dir on a file system that all machines share.")
        vectors[name] = PrecomputedVectors(folder)
    return vectors


def _store_training_texts(
    folder: Path, source: ModelSource, data: Mixture, device: torch.device, *, resumes: bool
) -> None:
    """Store the vectors of all distinct training texts by the encoder `source`, and free its memory."""
    from angle_llm.model.encoder import SentenceEncoder

    if resumes and (folder / "vectors.npy").is_file():
        return
    identity = {"encoder": [*_stamp(source.path), source.revision], "examples": data.digest}

    def load() -> SentenceEncoder:
        log(f"computing vectors of the training texts with {source.path}")
        return SentenceEncoder.from_pretrained(source, device=device)

    store_vectors(folder, identity, lambda: distinct_texts(data), load, option="--run-dir")
    gc.collect()  # before the model to train is loaded
    release_cached_memory()


def distinct_texts(data: Mixture) -> Iterator[SidedText]:
    """Yield every distinct text of the data, as a query if it is the first text of a pair, and as a document otherwise.

    A text on both sides is yielded twice.
    """
    seen: set[bytes] = set()
    for index in range(len(data)):
        for left, right, _ in pairs_of(data[index]):
            for text in (SidedText(left, "query"), SidedText(right, "document")):
                key = text.key
                if key not in seen:
                    seen.add(key)
                    yield text


def _stamp(path: str) -> list[Any]:
    """Return the path of an encoder with names, sizes and times of its files, to detect a changed encoder."""
    files = sorted(Path(path).expanduser().rglob("*")) or [Path(path).expanduser()]
    return [path, [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]]


# --- vectors for mining and scoring, looked up by index ---------------------------------------------------------------


@dataclass(frozen=True)
class TextVectors:
    """Vectors of the texts of a `MiningData`, looked up by index in `MiningData.texts`."""

    vectors_KD: Array
    """(K, D) stored vectors, in memory or memory-mapped."""
    query_row_T: Array
    """(T,) row of each text encoded as a query; -1 for a text that is not a query."""
    document_row_T: Array
    """(T,) row of each text encoded as a document; -1 for a text that is only a query."""

    def queries(self, texts: Sequence[int] | Array) -> Array:
        """Return the query vectors (N, D) of N texts, given as indices into `MiningData.texts`."""
        query_ND: Array = self.vectors_KD[self.query_row_T[texts]]
        return query_ND

    def documents(self, texts: Sequence[int] | Array) -> Array:
        """Return the document vectors (N, D) of N texts, given as indices into `MiningData.texts`."""
        document_ND: Array = self.vectors_KD[self.document_row_T[texts]]
        return document_ND


def vectors_of(material: MiningData, encoder: SentenceEncoder, folder: Path) -> TextVectors:
    """Return the vectors of all texts, memory-mapped from FOLDER/vectors-DIGEST; embed texts if they are not stored.

    If queries and documents have different prompts, the queries are encoded as queries, and their positives, negatives
    and candidates as documents.

    Raises:
        DataError: for a text without tokens, before any text is embedded; for a vector that is 0.
        FloatingPointError: for a vector that is not finite.
        FolderError: if another process computes the same vectors.
    """
    # The stored rows: a row per text, or with two prompts a row per query and a row per document.
    query_row_T = document_row_T = np.arange(len(material.texts))
    texts = [SidedText(text) for text in material.texts]
    if encoder.prompts.differ:
        queries = sorted({query.text for query in material.queries})
        documents = material.documents()
        query_row_T, document_row_T = np.full((2, len(material.texts)), -1)
        query_row_T[queries] = np.arange(len(queries))
        document_row_T[documents] = len(queries) + np.arange(len(documents))
        texts = [SidedText(material.texts[index], "query") for index in queries]
        texts += [SidedText(material.texts[index], "document") for index in documents]

    # The vectors, from an earlier command if it had the same encoder and texts.
    identity = {"encoder": encoder_identity(encoder), "texts": sha256_of_json(texts), "texts_at_once": TEXTS_AT_ONCE}
    store = folder / f"{FOLDER}-{sha256_of_json(identity)[:16]}"
    store_vectors(store, identity, lambda: texts, lambda: encoder, option="--vectors")
    vectors_KD: Array = np.load(store / "vectors.npy", mmap_mode="r", allow_pickle=False)
    return TextVectors(vectors_KD, query_row_T, document_row_T)


def _check_tokens(encoder: SentenceEncoder, texts: Iterable[SidedText]) -> None:
    """Raise `DataError` for the first text without tokens, or whose instruction is too long for `max_length`."""
    encoder_of_side: dict[Side | None, SentenceEncoder] = {None: encoder}
    encoder_of_side |= {side: encoder.for_side(side) for side in SIDES}
    remaining = iter(texts)
    while block := list(islice(remaining, _CHECKED_AT_ONCE)):
        try:
            for side in {text.side for text in block}:
                plain, instructions = split_instructions(text.text for text in block if text.side == side)
                of_side = encoder_of_side[side]
                starts = [text[:_CHECKED_CHARACTERS] for text in plain]
                of_side.tokenize(starts, 0, instructions if of_side.prompt.takes_instruction else ())
        except ValueError:  # rare, so the texts are checked one by one only now
            for text in block:
                (plain_text,), instructions = split_instructions([text.text])
                of_side = encoder_of_side[text.side]
                if reason := untokenizable(
                    of_side, plain_text, instructions if of_side.prompt.takes_instruction else ()
                ):
                    raise DataError(f"text {text.shown()}: {reason}. Fix it, or remove its row") from None
