"""Vectors on disk: their stored form, the shards of a folder, and reading them for search.

    OUT/
        shard-000000.parquet         row, id, text, scale, embedding of a block of rows; columns as requested
        shard-000000.npy             with `npy`: the vectors; the Parquet file holds the other columns
        shard-000000.skipped.jsonl   rows of the block that were skipped: number, place, reason
        embeddings.json              the index: encoder, form of the vectors, source, every shard with size and SHA-256

While `angle-llm embed` works there is no index, see `resumable`. Legend: N rows, D dimensions of the encoder, K stored
ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from angle_llm.io import FolderError, check_files
from angle_llm.prompts import Side, SidePrompts
from angle_llm.resumable import IDENTITY
from angle_llm.settings_io import SettingsError

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

Array = np.ndarray[Any, np.dtype[Any]]
Precision = Literal["float32", "float16", "int8", "binary"]

FORMAT_VERSION = 1
INDEX, SKIPPED, SCALE = "embeddings.json", ".skipped.jsonl", "scale"
_INT8 = 127
_REPAIR = "Run the same `angle-llm embed` again to repair it."
_STRICT = ConfigDict(strict=True)


def unit_rows(rows_ND: Array) -> Array:
    """Return rows (N, D) of length 1 in float64; zero rows stay zero, rows that are not finite become NaN."""
    rows = rows_ND.astype(np.float64)
    length_N1 = np.linalg.norm(rows, axis=1, keepdims=True)
    unit_ND: Array = rows / np.where(length_N1 == 0, 1, length_N1)
    return unit_ND


@dataclass(frozen=True)
class VectorForm:
    """How vectors are stored.

    * float32, float16: the values, rounded.
    * int8: value ≈ int8 · scale, where scale is the row's largest magnitude / 127. A scale per row, not per dimension,
      needs no other rows, so that shards are independent, and does not change a cosine.
    * binary: the signs, one bit per dimension, 1 for values above 0; eight per byte, the first in the highest bit, the
      last byte padded with 0 (as `numpy.packbits` does).
    """

    dimensions: int
    """D."""
    dim: int | None = None
    """K, None for all. Rows are cut before they are scaled to length 1."""
    normalize: bool = False
    """Scale rows to length 1."""
    precision: Precision = "float32"
    complex: bool = False
    """Store the first half of a vector as real and the second as imaginary parts."""

    @property
    def kept(self) -> int:
        """K."""
        return self.dim or self.dimensions

    def stored(self, rows_ND: Array) -> dict[str, Array]:
        """Return columns by name: `embedding` (N, K), or `real` and `imaginary` (N, K/2); for int8 also `scale` (N,).

        Raises:
            SettingsError: if a value is too large for float16.
        """
        rows = np.array(rows_ND[:, : self.kept], dtype=np.float32)
        if self.normalize:
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        if self.precision == "binary":
            return {"embedding": np.packbits(rows > 0, axis=1)}
        if self.precision == "int8":
            scale = np.abs(rows).max(axis=1, initial=0) / np.float32(_INT8)
            unit = np.where(scale > 0, scale, 1)[:, None]
            return {"embedding": np.rint(rows / unit).clip(-_INT8, _INT8).astype(np.int8), SCALE: scale}
        if self.precision == "float16":
            if (largest := float(np.abs(rows).max(initial=0))) > float(np.finfo(np.float16).max):
                raise SettingsError(
                    f"--precision float16 holds values up to 65504, and a vector has {largest:.4g}. Use --normalize, or "
                    "--precision float32."
                )
            rows = rows.astype(np.float16)
        if self.complex:
            return dict(zip(("real", "imaginary"), np.split(rows, 2, axis=1), strict=True))
        return {"embedding": rows}

    def restored(self, columns: Mapping[str, Array]) -> Array:
        """Return vectors (N, K) float32 from the columns of `stored`; for binary, +1 and -1."""
        if self.complex:
            return np.concatenate([columns["real"], columns["imaginary"]], axis=1).astype(np.float32)
        rows: Array = columns["embedding"]
        if self.precision == "binary":
            return np.unpackbits(rows, axis=1, count=self.kept).astype(np.float32) * 2 - 1
        if self.precision == "int8":
            return rows.astype(np.float32) * columns[SCALE][:, None]
        return rows.astype(np.float32)


@dataclass(frozen=True)
class ShardOptions:
    """Content of the shards, beside the form of the vectors."""

    format: Literal["parquet", "npy", "bare npy"]
    """Files of a shard; `bare npy` has vectors only."""
    rows: int
    """Rows of a block; a shard has fewer if some are skipped."""
    store_text: bool = False
    skip_bad: bool = False


def write_shard(
    folder: Path,
    name: str,
    options: ShardOptions,
    columns: Mapping[str, Array],
    sides: Mapping[str, Any],
    skipped: Sequence[Mapping[str, Any]],
) -> None:
    """Write the files of a shard: vectors (`columns`, from `VectorForm.stored`) and `sides` (row, id, text)."""
    import pyarrow
    from pyarrow import parquet

    types = {"row": pyarrow.int64(), "id": pyarrow.string(), "text": pyarrow.string()}
    table = {column: pyarrow.array(values, types[column]) for column, values in sides.items()}
    if SCALE in columns:
        table[SCALE] = pyarrow.array(columns[SCALE])
    if options.format == "parquet":
        for column, values in columns.items():
            if values.ndim == 2:
                flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
                table[column] = pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
    else:
        is_complex = "real" in columns
        one = (columns["real"] + 1j * columns["imaginary"]).astype(np.complex64) if is_complex else columns["embedding"]
        np.save(folder / f"{name}.npy", one, allow_pickle=False)
    if options.format != "bare npy":
        # Values hardly repeat, so no dictionary. Bytes do not depend on the number of threads.
        parquet.write_table(pyarrow.table(table), folder / f"{name}.parquet", use_dictionary=False, compression="zstd")
    if skipped:
        text = "".join(json.dumps(row) + "\n" for row in skipped)
        (folder / f"{name}{SKIPPED}").write_text(text, encoding="utf-8")


# --- the encoder ------------------------------------------------------------------------------------------------------


def encoder_identity(encoder: SentenceEncoder) -> dict[str, Any]:
    """Return what the vectors of an encoder depend on, except the texts and their batches, as JSON values."""
    return {
        "weights": fingerprint(encoder),
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "bits": encoder.bits,
        "prompt": (encoder.prompts if encoder.side is None else encoder.prompt).to_dict(),
        "pooling": encoder.pooling,
        "max_length": encoder.max_length,
        "dimensions": encoder.dimensions,
        **({"normalize": True} if encoder.normalize else {}),
    }


def fingerprint(encoder: SentenceEncoder) -> str:
    """Return a short hash of an encoder: weights of the base, adapter and its scale, number of layers, tokenizer."""
    import torch

    from angle_llm.model.backbone import weights_fingerprint

    backbone = encoder.model.backbone
    digest = hashlib.sha256(weights_fingerprint(backbone).encode())
    for name, parameter in sorted(backbone.named_parameters()):
        if "lora_" in name:  # `weights_fingerprint` samples the base only
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().to("cpu", torch.float32).numpy().tobytes())
    for name, module in backbone.named_modules():
        if isinstance(scale := getattr(module, "scaling", None), dict):  # LoRA's alpha / rank is not a parameter
            digest.update(f"{name}{sorted(scale.items())}".encode())
    tokenizer: Any = encoder.tokenizer
    state: dict[str, Any] = {"vocabulary": tokenizer.get_vocab(), "special": str(tokenizer.special_tokens_map)}
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        state = json.loads(fast.to_str()) | {"truncation": None, "padding": None}  # these depend on the last call
    digest.update(json.dumps(state, sort_keys=True).encode())
    if encoder.model.cut_to is not None:  # the fingerprint of the base covers all its layers
        digest.update(f"layers {encoder.model.cut_to}".encode())
    return digest.hexdigest()[:16]


# --- reading ----------------------------------------------------------------------------------------------------------


@checked_dataclass(frozen=True, config=_STRICT)
class StoredEncoder:
    """The encoder that made the vectors: where it is loaded from, and how it reads texts."""

    name: str
    weights: str
    prompt: dict[str, Any]
    pooling: str
    max_length: int
    bits: int | None
    dimensions: int
    dtype: str = "auto"
    revision: str | None = None
    side: Side | None = None
    """Side of the texts; None if queries and documents have one prompt."""
    prompts: dict[str, Any] | None = None
    """Both prompts, with `side`; `prompt` is the one of the texts."""

    @property
    def side_prompts(self) -> SidePrompts:
        """The prompts of queries and documents. Raises `PromptError` for a damaged index."""
        return SidePrompts.from_dict(self.prompts or self.prompt, where=INDEX)


@checked_dataclass(frozen=True, config=_STRICT)
class StoredSource:
    """The rows that were embedded: the input (None for standard input), and size and time of its files."""

    path: str | None
    column: str | None
    id_column: str | None
    delimiter: str | None
    encoding: str
    stamps: list[tuple[int, int]]


@checked_dataclass(frozen=True, config=_STRICT)
class ShardRows:
    """Index of a shard's first row in the corpus; its vectors; its skipped rows."""

    first: int
    rows: int
    skipped: int


@checked_dataclass(frozen=True, config=_STRICT)
class Shard:
    """A shard in the index, and its files with size and SHA-256."""

    name: str
    values: ShardRows
    files: list[dict[str, str | int]]


@checked_dataclass(frozen=True, config=_STRICT)
class VectorIndex:
    """`embeddings.json`."""

    format_version: Literal[1]
    rows: int
    model: StoredEncoder
    vectors: VectorForm
    source: StoredSource
    parts: list[Shard]


class Piece(NamedTuple):
    """Some rows of a finished folder: their numbers (N,) in the source, vectors (N, K) float32, ids and texts."""

    row: Array
    vectors: Array
    id: list[str] | None
    text: list[str] | None


def read_index(folder: Path) -> VectorIndex:
    """Return the index of a finished folder.

    Raises:
        FolderError: if there is none, or it is damaged or of another version.
    """
    path, hint = folder / INDEX, "Name a folder that `angle-llm embed --output FOLDER` wrote."
    if not folder.is_dir():
        raise FolderError(f"{folder} {'is a file' if folder.exists() else 'does not exist'}. {hint}")
    if not path.is_file():  # opening a pipe would block
        if (folder / IDENTITY).is_file():
            hint = "Embedding was not finished: run the same `angle-llm embed` again."
        raise FolderError(f"{folder} has no {INDEX}. {hint}")
    try:
        return TypeAdapter(VectorIndex).validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"])) or "the file"
        raise FolderError(
            f"{path} is damaged, or of another version (this one reads format_version {FORMAT_VERSION}): {field}: "
            f"{problem['msg']}. Embed again."
        ) from None


def read_vectors(folder: Path, index: VectorIndex, shards: Sequence[Shard] | None = None) -> Iterator[Piece]:
    """Yield the rows of a finished folder in order, or of some shards, a shard at a time.

    Raises:
        FolderError: if a file is missing or differs from what was written, or holds other than K finite numbers a row.
    """
    for shard in index.parts if shards is None else shards:
        try:
            check_files(folder, shard.files)
            piece = _read_shard(folder, shard, index.vectors)
            if piece.vectors.shape != (shard.values.rows, index.vectors.kept) or not np.isfinite(piece.vectors).all():
                raise ValueError(f"expected {shard.values.rows} rows of {index.vectors.kept} finite numbers")
        except FolderError as error:
            raise FolderError(f"{error}. {_REPAIR}") from None
        except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:  # from pyarrow and numpy
            raise FolderError(f"{shard.name} of {folder} is damaged: {error}. {_REPAIR}") from error
        yield piece


def _read_shard(folder: Path, shard: Shard, form: VectorForm) -> Piece:
    import pyarrow
    from pyarrow import parquet

    paths = {Path(str(file["name"])).suffix: folder / str(file["name"]) for file in shard.files}
    table = parquet.read_table(paths[".parquet"], use_threads=False)
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    ids, texts = (columns.pop(name).to_pylist() if name in columns else None for name in ("id", "text"))
    arrays: dict[str, Array] = {
        name: values.flatten().to_numpy().reshape(len(values), values.type.list_size)
        if pyarrow.types.is_fixed_size_list(values.type)
        else values.to_numpy()
        for name, values in columns.items()
    }
    if ".npy" in paths:
        matrix = np.load(paths[".npy"], allow_pickle=False)
        arrays |= {"real": matrix.real, "imaginary": matrix.imag} if np.iscomplexobj(matrix) else {"embedding": matrix}
    return Piece(arrays["row"], form.restored(arrays), ids, texts)
