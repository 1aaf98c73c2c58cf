"""Write embeddings to a folder of shards, and read them again for search.

    OUT/
        shard-000000.parquet         a block of rows with the columns row, id, text, scale and embedding, as requested
        shard-000000.npy             with `--format npy`: the vectors; the Parquet file holds all other columns
        shard-000000.skipped.jsonl   skipped rows of the block: number, place and reason
        embeddings.json              the index: encoder, form of the vectors, source, and the files with size and SHA-256

`angle-llm embed` writes the index last, when all shards are complete. Dimensions: N rows, D columns of a vector of the
encoder, K stored columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from angle_llm.io import FolderError, check_files
from angle_llm.model.layers.quantized_layers import Bits
from angle_llm.model.unit_vectors import unit_rows
from angle_llm.prompts import Side, SidePrompts
from angle_llm.settings.parsing import SettingsError

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.model.source.tokenizer import Instructions

Array = np.ndarray[Any, np.dtype[Any]]
Precision = Literal["float32", "float16", "int8", "binary"]

FORMAT_VERSION = 1
INDEX, SKIPPED, SCALE = "embeddings.json", ".skipped.jsonl", "scale"
_INT8 = 127
_REPAIR = "Run the same `angle-llm embed` again to repair it."
_STRICT = ConfigDict(strict=True)


def cosine_differences(rows_ND: Array, others_ND: Array) -> Array:
    """Return 1 - cos (N,) between corresponding rows of two matrices (N, D).

    The value is computed as half the squared distance of the unit vectors, which is accurate far below the rounding
    error of a cosine.
    """
    differences_N: Array = ((unit_rows(rows_ND) - unit_rows(others_ND)) ** 2).sum(axis=1) / 2
    return differences_N


@dataclass(frozen=True)
class VectorForm:
    """How vectors are stored: number of dimensions, normalization, and type of the values (`precision`).

    * float32, float16: the values, rounded.
    * int8: value ≈ int8 · scale, where scale is the largest magnitude of the row / 127. A scale per row, instead of per
      dimension, keeps shards independent and does not change a cosine.
    * binary: the signs, one bit per dimension, 1 for values above 0. A byte contains eight bits, the first dimension in
      the highest bit; the last byte is padded with 0 (as `numpy.packbits` does).
    """

    dimensions: int
    """Number of dimensions of the encoder's vectors, D."""
    dim: int | None = None
    """Number of first dimensions that are stored, K. None: all. Vectors are truncated before they are normalized."""
    normalize: bool = False
    """Whether vectors are scaled to length 1."""
    precision: Precision = "float32"

    @property
    def kept(self) -> int:
        """Number of dimensions that are stored, K."""
        return self.dim or self.dimensions

    def stored(self, rows_ND: Array) -> dict[str, Array]:
        """Convert vectors (N, D) to the columns to store: `embedding` (N, K).

        K is the number of stored dimensions. Binary has 8 dimensions per byte, (N, K/8), rounded up. int8 also has the
        column `scale` (N,).

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
            divisor_N1 = np.where(scale > 0, scale, 1)[:, None]
            return {"embedding": np.rint(rows / divisor_N1).clip(-_INT8, _INT8).astype(np.int8), SCALE: scale}
        if self.precision == "float16":
            if (largest := float(np.abs(rows).max(initial=0))) > float(np.finfo(np.float16).max):
                raise SettingsError(
                    f"--precision float16: expected values up to 65504, got {largest:.4g}. Use --normalize, or "
                    "--precision float32."
                )
            rows = rows.astype(np.float16)
        return {"embedding": rows}

    def restored(self, columns: Mapping[str, Array]) -> Array:
        """Convert stored columns, as returned by `stored`, to vectors (N, K) in float32. Binary values become +1 and -1."""
        rows: Array = columns["embedding"]
        if self.precision == "binary":
            return np.unpackbits(rows, axis=1, count=self.kept).astype(np.float32) * 2 - 1
        if self.precision == "int8":
            return rows.astype(np.float32) * columns[SCALE][:, None]
        return rows.astype(np.float32)


def write_shard(
    folder: Path,
    name: str,
    format: str,
    columns: Mapping[str, Array],
    text_columns: Mapping[str, Any],
    skipped: Sequence[Mapping[str, Any]],
) -> None:
    """Write the files of a shard: vectors with row numbers, ids and texts, and a list of skipped rows.

    Args:
        folder: existing folder.
        name: name of the files, without suffix.
        format: parquet: vectors and other columns in a Parquet file. npy: vectors in a .npy file, other columns in a
            Parquet file. bare npy: only the vectors, in a .npy file.
        columns: columns of the vectors, from `VectorForm.stored`.
        text_columns: the columns `row`, `id` and `text`, as requested.
        skipped: the skipped rows as JSON objects; written only if there are any.
    """
    import pyarrow
    from pyarrow import parquet

    types = {"row": pyarrow.int64(), "id": pyarrow.string(), "text": pyarrow.string()}
    table = {column: pyarrow.array(values, types[column]) for column, values in text_columns.items()}
    if SCALE in columns:
        table[SCALE] = pyarrow.array(columns[SCALE])
    if format == "parquet":
        flat = pyarrow.array(np.ascontiguousarray(columns["embedding"]).reshape(-1))
        table["embedding"] = pyarrow.FixedSizeListArray.from_arrays(flat, columns["embedding"].shape[1])
    else:
        save_array(folder / f"{name}.npy", columns["embedding"])
    if format != "bare npy":
        # Without a dictionary, because values rarely repeat. The bytes do not depend on the number of threads.
        parquet.write_table(pyarrow.table(table), folder / f"{name}.parquet", use_dictionary=False, compression="zstd")
    if skipped:
        text = "".join(json.dumps(row) + "\n" for row in skipped)
        (folder / f"{name}{SKIPPED}").write_text(text, encoding="utf-8")


def save_array(path: Path, values: Array) -> None:
    """Write a .npy file; unlike `np.save`, the error of a full disk has its reason."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(values))
        )
        file.write(np.ascontiguousarray(values).data)


def join_arrays(paths: Sequence[Path], file: BinaryIO) -> None:
    """Concatenate the rows of .npy files into one open .npy file; a few of the files are open at a time."""
    # All files at once could exceed the number of open files that the system allows.
    read = partial(np.load, mmap_mode="r", allow_pickle=False)
    first = read(paths[0])
    header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False}
    shape = (sum(len(read(path)) for path in paths), *first.shape[1:])
    np.lib.format.write_array_header_1_0(file, {**header, "shape": shape})
    for path in paths:
        file.write(np.ascontiguousarray(read(path)).data)


# --- identity of the encoder ------------------------------------------------------------------------------------------


def encoder_identity(encoder: SentenceEncoder) -> dict[str, Any]:
    """Return the properties of an encoder that affect embeddings, such as weights and prompt, as JSON values."""
    return {
        "weights": fingerprint(encoder),
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "bits": encoder.bits,
        "prompt": (encoder.prompts if encoder.side is None else encoder.prompt).to_dict(),
        "pooling": encoder.pooling,
        "max_length": encoder.max_length,
        "dimensions": encoder.dimensions,
        "normalize": encoder.normalize,
        "attention": encoder.attention,
    }


def fingerprint(encoder: SentenceEncoder) -> str:
    """Return a short hash of an encoder: base weights, adapter and Dense weights, scaling, number of layers, tokenizer."""
    import torch

    from angle_llm.model.layers.fingerprint import weights_fingerprint
    from angle_llm.model.source.dense import dense_fingerprint

    backbone = encoder.model.backbone
    digest = hashlib.sha256(weights_fingerprint(backbone).encode())
    for name, parameter in sorted(backbone.named_parameters()):
        if "lora_" in name:  # `weights_fingerprint` covers only the base
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().to("cpu", torch.float32).numpy().tobytes())
    for name, module in backbone.named_modules():
        # The scale of LoRA, alpha / rank, is not a parameter.
        if isinstance(scale := getattr(module, "scaling", None), dict):
            digest.update(f"{name}{sorted(scale.items())}".encode())
    digest.update(tokenizer_state(encoder.tokenizer).encode())
    digest.update(dense_fingerprint(encoder.model.dense))
    cut_to = encoder.model.options.cut_to
    if cut_to is not None:  # `weights_fingerprint` covers all layers of the base
        digest.update(f"layers {cut_to}".encode())
    return digest.hexdigest()[:16]


def tokenizer_state(tokenizer: Any) -> str:
    """Return the vocabulary and rules of a tokenizer as JSON text, without the padding and truncation of its last call."""
    state: dict[str, Any] = {"vocabulary": tokenizer.get_vocab(), "special": str(tokenizer.special_tokens_map)}
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        state = json.loads(fast.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(state, sort_keys=True)


def untokenizable(encoder: SentenceEncoder, text: str, instructions: Instructions = ()) -> str:
    """Return why a text, with its instruction if one is given, has no token ids; empty if it has token ids."""
    try:
        encoder.tokenize([text], instructions=instructions) if instructions else encoder.tokenize([text])
    except ValueError as error:
        return str(error).removeprefix("text 0: ").removeprefix("text 0 ").removesuffix(".")
    return ""


def with_one_prompt(encoder: SentenceEncoder, side: Side | None) -> SentenceEncoder:
    """Return the encoder of a side; without a side the encoder itself, if it has one prompt.

    Raises:
        SettingsError: without a side, if queries and documents have different prompts.
    """
    if side is None and encoder.prompts.differ:
        raise SettingsError(
            f"--as: expected query or document, because this encoder has {encoder.prompts}. A query is a text to search "
            "for, a document a text to find."
        )
    return encoder if side is None else encoder.for_side(side)


# --- reading ----------------------------------------------------------------------------------------------------------


@checked_dataclass(frozen=True, config=_STRICT)
class StoredEncoder:
    """Record of the encoder that made the stored vectors: path or hub id, hash of the weights, prompt and other settings."""

    name: str
    """Path or hub id of the encoder."""
    weights: str
    """Hash of the encoder (see `fingerprint`)."""
    prompt: dict[str, Any]
    """Prompt that the texts were encoded with."""
    pooling: str
    max_length: int
    bits: Bits | None
    dimensions: int
    dtype: str = "auto"
    revision: str | None = None
    side: Side | None = None
    """Whether the texts were encoded as queries or as documents. None: queries and documents have the same prompt."""
    prompts: dict[str, Any] | None = None
    """Prompts of queries and documents if they differ, else None."""
    attention: Literal["bidirectional"] | None = None
    """Attention of a decoder-only model; None: the attention of the architecture."""

    @property
    def side_prompts(self) -> SidePrompts:
        """Prompt of queries and prompt of documents. Raises `SettingsError` if the stored prompts are damaged."""
        return SidePrompts.from_dict(self.prompts or self.prompt, where=INDEX)


@checked_dataclass(frozen=True, config=_STRICT)
class StoredSource:
    """Record of the input that was embedded: path, columns, and state of the files."""

    path: str | None
    """Path of the input; None: standard input."""
    column: str | None
    """Name of the column with the texts."""
    id_column: str | None
    """Name of the column with the ids of the rows; None: no ids are stored."""
    stamps: list[tuple[int, int]]
    """Size and modification time of each input file."""


@checked_dataclass(frozen=True, config=_STRICT)
class ShardRows:
    """Input rows of a shard: number of the first row, and counts of embedded and skipped rows."""

    first: int
    """Number of the first row in the input, from 0."""
    rows: int
    """Number of vectors in the shard."""
    skipped: int
    """Number of skipped rows."""


@checked_dataclass(frozen=True, config=_STRICT)
class Shard:
    """Entry of a shard in `embeddings.json`: rows, and files with size and SHA-256."""

    name: str
    values: ShardRows
    files: list[dict[str, str | int]]


@checked_dataclass(frozen=True, config=_STRICT)
class VectorIndex:
    """Contents of `embeddings.json`, the index of a folder of embeddings."""

    format_version: Literal[1]
    rows: int
    model: StoredEncoder
    vectors: VectorForm
    source: StoredSource
    parts: list[Shard]


class Piece(NamedTuple):
    """N rows read from a shard: row numbers, vectors, and ids and texts if they are stored."""

    row: Array
    """Numbers of the rows in the input, (N,)."""
    vectors: Array
    """Vectors with K stored dimensions, (N, K), float32."""
    id: list[str] | None
    text: list[str] | None


def read_index(folder: Path) -> VectorIndex:
    """Read `embeddings.json`, the index of a finished folder of embeddings.

    Raises:
        FolderError: if the index is missing, damaged, or of another format version.
    """
    path = folder / INDEX
    if not path.is_file():
        raise FolderError(
            f"{folder} has no {INDEX}. Name a folder that `angle-llm embed --output FOLDER` wrote; if it was interrupted, run "
            "it again."
        )
    try:
        return TypeAdapter(VectorIndex).validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise FolderError(
            f"{path} is damaged, or of another version than {FORMAT_VERSION}: {field}: {problem['msg']}. Embed again."
        ) from None


def read_vectors(folder: Path, index: VectorIndex, shards: Sequence[Shard] | None = None) -> Iterator[Piece]:
    """Yield the embeddings in a finished folder in order, a shard at a time, and check the files.

    `index` is the result of `read_index`. `shards` are the shards to read; None: all.

    Raises:
        FolderError: if a file is missing or has changed, or vectors have a wrong shape or are not finite.
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
    """Read the rows of a shard, without checks; `form` is the form in which the vectors are stored."""
    import pyarrow
    from pyarrow import parquet

    paths = {Path(str(file["name"])).suffix: folder / str(file["name"]) for file in shard.files}
    table = parquet.read_table(paths[".parquet"], use_threads=False)
    columns = {name: table.column(name) for name in table.column_names}
    ids = columns.pop("id").to_pylist() if "id" in columns else None
    texts = columns.pop("text").to_pylist() if "text" in columns else None  # in chunks if longer than 2 GiB
    arrays: dict[str, Array] = {
        name: values.flatten().to_numpy().reshape(len(values), values.type.list_size)
        if pyarrow.types.is_fixed_size_list(values.type)
        else values.to_numpy()
        for name, values in ((name, column.combine_chunks()) for name, column in columns.items())
    }
    if ".npy" in paths:
        arrays["embedding"] = np.load(paths[".npy"], allow_pickle=False)
    return Piece(arrays["row"], form.restored(arrays), ids, texts)
