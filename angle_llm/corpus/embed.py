"""A corpus of any size into vectors on disk: blocks of rows are read, encoded and written, one after another.

A block is as many rows as a shard holds, and what comes of it depends on nothing else: so any process may do it, at any
time, and a run that was killed goes on at the first block whose shard is not there. Memory is that of one block.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from angle_llm.corpus.shards import FORMAT_VERSION, Format, Job, Shards, Worker
from angle_llm.corpus.vectors import Array, VectorForm
from angle_llm.data.corpus import Corpus, CorpusText, Survey, TextBlock, bad_row
from angle_llm.data.formats import DataError
from angle_llm.data.readers import BadRow
from angle_llm.io import has_terminal, progress_bar
from angle_llm.model.backbone import absolute_name, weights_fingerprint
from angle_llm.model.encoder import SentenceEncoder

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass(frozen=True)
class Keeping:
    """What becomes of the rows, beside the form of the vectors."""

    format: Format
    shard_rows: int
    """Rows of a block; a shard has fewer if some were bad."""
    store_text: bool = False
    skip_bad: bool = False

    @property
    def columns(self) -> list[str]:
        """What a shard has beside vectors, `id` not counted."""
        return ["row", *(["text"] if self.store_text else [])]


def embed_corpus(
    corpus: Corpus,
    survey: Survey,
    encoder: SentenceEncoder,
    model: str,
    form: VectorForm,
    keeping: Keeping,
    folder: Path,
    target: Path | None = None,
    worker: Worker | None = None,
) -> int:
    """Embeds the worker's share of a corpus into `folder`, or goes on with it; the main process ends with the index, or
    with the one file `target`. Returns the number of vectors of the whole corpus, 0 in other processes.

    `model` is the name the encoder was loaded by.

    Raises:
        ShardsError: if the folder holds other things, or was begun with other input, model or settings.
        DataError: for a row that cannot be embedded, unless such rows are skipped; if the input changes meanwhile.
    """
    worker = worker or Worker()
    blocks = -(-survey.rows // keeping.shard_rows)
    if not worker.is_main and worker.rank >= blocks:
        return 0
    job = _job(corpus, survey, encoder, form, keeping)
    with Shards(folder, keeping.format, job, worker) as shards:
        kept = shards.kept(blocks)
        with _progress(survey.rows, keeping.shard_rows, kept, worker) as progress:
            for block in corpus.blocks(keeping.shard_rows, lambda number: worker.owns(number) and number not in kept):
                items, vectors, skipped = _encoded(block, encoder, keeping.skip_bad, worker.is_main and has_terminal())
                sides: dict[str, Any] = {"row": np.array([item.number for item in items], dtype=np.int64)}
                if corpus.id_column is not None:
                    sides["id"] = [item.row.id for item in items]
                if keeping.store_text:
                    sides["text"] = [item.row.text for item in items]
                shards.write(block.number, block.first, sides, form.stored(vectors), skipped)
                progress.update(len(block.rows))
        corpus.check_unchanged(survey)
        if not worker.is_main:
            return 0
        places = [None if file.path is None else str(file.path.absolute()) for file in corpus.source.files]
        source = {"places": places, "stamps": survey.stamps}
        described = {"model": {"name": absolute_name(model)} | job["model"], "source": source}
        return shards.finish(blocks, lambda rows: job | described | {"rows": rows}, target)


def fingerprint(encoder: SentenceEncoder) -> str:
    """A short hash that tells two encoders apart by what was loaded: the base's weights, the adapter's and its scale, the
    tokenizer."""
    backbone = encoder.model.backbone
    digest = hashlib.sha256(weights_fingerprint(backbone).encode())
    for name, parameter in sorted(backbone.named_parameters()):
        if "lora_" in name:  # all of it: of a quantized base, the fingerprint is that of what it was made from
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().to("cpu", torch.float32).numpy().tobytes())
    for name, module in backbone.named_modules():
        if isinstance(scale := getattr(module, "scaling", None), dict):  # LoRA's alpha / rank: no parameter
            digest.update(f"{name}{sorted(scale.items())}".encode())
    digest.update(_tokenizer_told(encoder.tokenizer).encode())
    if encoder.model.cut_to is not None:  # the base's fingerprint is that of all its layers
        digest.update(f"layers {encoder.model.cut_to}".encode())
    return digest.hexdigest()[:16]


def _tokenizer_told(tokenizer: Any) -> str:
    """All that ids follow from; how many were asked for last is not."""
    told: dict[str, Any] = {"vocabulary": tokenizer.get_vocab(), "special": str(tokenizer.special_tokens_map)}
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        told = json.loads(fast.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(told, sort_keys=True)


def _job(corpus: Corpus, survey: Survey, encoder: SentenceEncoder, form: VectorForm, keeping: Keeping) -> Job:
    """All that the bytes of the shards follow from; where things lie and how many processes there are do not count."""
    return {
        "format_version": FORMAT_VERSION,
        "input": {
            "files": survey.files,
            "rows": survey.rows,
            "column": corpus.column,
            "id_column": corpus.id_column,
            "bad_rows": "skipped" if keeping.skip_bad else "refused",
        },
        "model": {
            "weights": fingerprint(encoder),
            "dtype": str(encoder.dtype).removeprefix("torch."),
            "bits": encoder.bits,
            "prompt": encoder.prompt.to_dict(),
            "pooling": encoder.pooling,
            "max_length": encoder.max_length,
            "dimensions": form.dimensions,
        },
        "vectors": {
            "dimensions": form.kept,
            "normalize": form.normalize,
            "precision": form.precision,
            "complex": form.complex,
        },
        "layout": {"format": keeping.format, "rows": keeping.shard_rows, "columns": keeping.columns},
    }


@dataclass(frozen=True)
class _Item:
    """A row that can be embedded, with its index in the corpus."""

    number: int
    row: CorpusText


def _encoded(
    block: TextBlock, encoder: SentenceEncoder, skip_bad: bool, show_progress: bool
) -> tuple[list[_Item], Array, list[dict[str, Any]]]:
    """The good rows of a block, their vectors (N, D), and what is to be told of the others."""
    items: list[_Item] = []
    skipped: list[dict[str, Any]] = []

    def leave_out(number: int, place: str, reason: str) -> None:
        if not skip_bad:
            raise bad_row(place, reason)
        skipped.append({"row": number, "place": place, "reason": reason})

    for number, row in enumerate(block.rows, block.first):
        if isinstance(row, BadRow):
            leave_out(number, row.place, row.reason)
        else:
            items.append(_Item(number, row))

    def encode() -> Array:
        return encoder.encode([item.row.text for item in items], show_progress=show_progress)

    try:
        vectors = encode()
    except ValueError:  # a text of which the tokenizer leaves nothing; rare, so it is looked for when it is there
        reasons = [_unreadable(encoder, item.row.text) for item in items]
        if not any(reasons):
            raise
        for item, reason in zip(items, reasons, strict=True):
            if reason:
                leave_out(item.number, item.row.place, reason)
        items = [item for item, reason in zip(items, reasons, strict=True) if not reason]
        skipped.sort(key=lambda row: int(row["row"]))
        vectors = encode()
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        place = items[int(np.argmin(finite))].row.place
        raise DataError(
            f"{place}: its vector is not finite. Load the model in bfloat16 or float32, or mend its weights"
        )
    return items, vectors, skipped


def _unreadable(encoder: SentenceEncoder, text: str) -> str:
    """Why a text cannot be tokenised, empty if it can."""
    try:
        encoder.tokenize([text])
    except ValueError as error:
        return str(error).removeprefix("text 0: ").removesuffix(".")
    return ""


def _progress(rows: int, block_rows: int, kept: set[int], worker: Worker) -> tqdm[Any]:
    """Rows done of the worker's share; the main process speaks for all."""

    def held(blocks: Iterable[int]) -> int:
        return sum(min(block_rows, rows - block * block_rows) for block in blocks)

    total, there = held(range(worker.rank, -(-rows // block_rows), worker.count)), held(kept)
    if there and worker.is_main:
        print(f"{there} of {total} rows are there already", file=sys.stderr)
    name = "embed" if worker.count == 1 else f"embed (process {worker.rank} of {worker.count})"
    return progress_bar(name, total, "row", done=there, enabled=worker.is_main)
