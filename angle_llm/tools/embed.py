"""`angle-llm embed`: embed a corpus of any size and write the vectors to disk.

Rows are read, encoded and written in blocks, with three blocks in memory at a time: the next block is tokenized and the
block before is written while the model computes. The shard of a block depends on no other block, so any process can compute
it at any time. A killed command resumes with the missing shards.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from angle_llm.data.corpus import SKIP, Corpus, CorpusText, Survey, TextBlock, bad_row
from angle_llm.data.formats import DataError
from angle_llm.data.sources import EXTENSIONS, STANDARD_INPUT, BadRow, find_path
from angle_llm.io import log, progress_bar, remove_folder, write_file
from angle_llm.model.vectors import (
    FORMAT_VERSION,
    INDEX,
    SKIPPED,
    Array,
    VectorForm,
    encoder_identity,
    join_arrays,
    untokenizable,
    with_one_prompt,
    write_shard,
)
from angle_llm.resumable_folder import ResumableFolder, check_resumable
from angle_llm.settings.commands import EmbedSettings
from angle_llm.settings.parsing import SettingsError

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.model.source.resolve import ModelSource

_POLL_SECONDS = 1.0
"""Seconds between two checks whether other processes have written their shards."""


def embed_main(settings: EmbedSettings) -> None:
    """Embed a corpus, or resume embedding, and print where the vectors are.

    Under torchrun or accelerate launch, the processes share the work.

    Raises:
        SettingsError, FolderError, DataError: if the input cannot be read or the output cannot be written; before the
            model is loaded where possible.
    """
    # Input and output, before libraries and a model are loaded.
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and str(settings.input) == STANDARD_INPUT:
        raise SettingsError("--input - works in one process only. For several processes, set --input to a file.")
    output = settings.output.expanduser()
    folder = output.with_name(output.name + ".parts") if settings.one_file else output
    _check_output(output, find_path(str(settings.input)))
    check_resumable(folder, "--output", INDEX)
    corpus = Corpus.open(settings.input, settings.column, settings.id_column)
    if corpus.source.ignored and rank == 0:
        print(f"skipped, of other types or .json: {', '.join(corpus.source.ignored[:5])}", file=sys.stderr)
    survey = corpus.survey(skip_bad=settings.on_bad_row == "skip")

    # Encoder, and form of the vectors.
    source, encoder = _load_encoder(settings, world_size)
    form = _vector_form(settings, encoder)
    rows = embed_corpus(EmbedJob(settings, corpus, survey, source, encoder, form, folder, rank, world_size))
    if rank == 0:
        skipped = f"; skipped {survey.rows - rows} bad rows, see *.skipped.jsonl" if rows < survey.rows else ""
        print(f"{rows} rows of {form.kept} dimensions in {settings.output}{skipped}")


def _load_encoder(settings: EmbedSettings, world_size: int) -> tuple[ModelSource, SentenceEncoder]:
    """Find the model and load the encoder for the side of the texts; with several processes, on the GPU of this process."""
    import torch

    from angle_llm.model.encoder import SentenceEncoder
    from angle_llm.model.source.resolve import resolve_model

    if settings.device is None and world_size > 1 and torch.cuda.is_available():
        settings = replace(settings, device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    source = resolve_model(settings.model, attention=settings.attention)
    return source, with_one_prompt(SentenceEncoder.from_pretrained(source, **settings.options()), settings.side)


def _vector_form(settings: EmbedSettings, encoder: SentenceEncoder) -> VectorForm:
    """Return how the vectors are stored. Raises `SettingsError` for settings that do not fit the encoder."""
    size = encoder.dimensions
    if settings.dim is not None and settings.dim > size:
        raise SettingsError(f"--dim must be at most {size}, the dimensions of {settings.model}, got {settings.dim}.")
    # Cut rows are no longer of length 1.
    normalize = settings.normalize or (encoder.normalize and settings.dim is not None)
    return VectorForm(size, settings.dim or size, normalize, settings.precision)


def _check_output(path: Path, input: Path) -> None:
    """Check that the output can be written. Raises `SettingsError` if it cannot."""
    if path.name.lower().endswith(EXTENSIONS):
        raise SettingsError(f"--output must end in .npy, or name a folder; got {path}.")
    if path.suffix == ".npy" and path.is_dir():
        raise SettingsError(f"--output must name the .npy file to write; {path} is a folder. Name a file in it.")
    existing = path if path.is_dir() else next(folder for folder in path.absolute().parents if folder.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise SettingsError(f"--output {path}: expected a writable folder, got {existing}. Choose another path.")
    if input.is_dir() and path.resolve().is_relative_to(input.resolve()):
        raise SettingsError(
            f"--output {path} is inside --input {input}, so it would be read as input. Choose another path."
        )


# --- embedding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbedJob:
    """Input, encoder and output of an embedding run; a process writes every `world_size`-th shard."""

    settings: EmbedSettings
    corpus: Corpus
    survey: Survey
    source: ModelSource
    """Path or hub id of the model, and its commit."""
    encoder: SentenceEncoder
    form: VectorForm
    folder: Path
    """Folder of the shards; removed at the end if the output is one file."""
    rank: int = 0
    world_size: int = 1

    @property
    def format(self) -> str:
        """Format of the files of a shard, for `write_shard`."""
        return "bare npy" if self.settings.one_file else self.settings.format

    @cached_property
    def names(self) -> list[str]:
        """Names of all shards, those of other processes included."""
        return [f"shard-{block:06d}" for block in range(-(-self.survey.rows // self.settings.shard_rows))]


def embed_corpus(job: EmbedJob) -> int:
    """Write the vectors of a corpus, or resume; return the number of vectors of the whole corpus.

    Rank 0 waits for all other processes, and writes the index or the target. Other ranks return 0.

    Raises:
        FolderError: if the folder contains other files, or was started with other input, model or settings.
        DataError: if a row cannot be embedded and bad rows are not skipped, or the input changes meanwhile.
    """
    names, settings = job.names, job.settings
    if job.rank >= len(names):
        return 0
    with ResumableFolder(job.folder, _identity(job), option="--output", index=INDEX, rank=job.rank) as parts:
        _write_shards(job, parts)
        job.corpus.check_unchanged(job.survey)
        if job.rank != 0:
            return 0
        # Shards of other processes.
        missing = [name for block, name in enumerate(names) if block % job.world_size != 0]
        while missing := parts.unwritten(missing):
            time.sleep(_POLL_SECONDS)
        # The index or the target.
        manifests = [parts.manifest(name) for name in names]
        if settings.on_bad_row == "error" and any(manifest["values"]["skipped"] for manifest in manifests):
            raise DataError(
                "an earlier command skipped rows, expected none; fix the rows in *.skipped.jsonl, or set --on-bad-row skip"
            )
        rows: int = sum(manifest["values"]["rows"] for manifest in manifests)
        if settings.one_file:
            paths = [job.folder / file["name"] for manifest in manifests for file in manifest["files"]]
            _finish_file(paths, settings.output.expanduser())
            remove_folder(job.folder)
        else:
            _finish_folder(job, parts, rows)
        return rows


def _identity(job: EmbedJob) -> dict[str, Any]:
    """Return all inputs that change the vectors; paths and the number of processes do not change them."""
    corpus, survey, settings = job.corpus, job.survey, job.settings
    return {
        "format_version": FORMAT_VERSION,
        "input": {"files": survey.files, "rows": survey.rows, "column": corpus.column, "id_column": corpus.id_column},
        "model": encoder_identity(job.encoder),
        "vectors": asdict(job.form),
        "layout": {"format": job.format, "rows": settings.shard_rows, "store_text": settings.store_text},
    }


class _ShardTexts(NamedTuple):
    """The texts of a shard, and place and reason of its bad rows, by index in the corpus."""

    block: TextBlock
    texts: dict[int, CorpusText]
    bad: dict[int, tuple[str, str]]


def _write_shards(job: EmbedJob, parts: ResumableFolder) -> None:
    """Write the shards of this process that are missing or damaged; rank 0 shows progress and the rates of the stages.

    Reading and tokenizing, the model, and writing overlap (`encode_blocks`).
    """
    from angle_llm.model.pipeline import encode_blocks

    assigned = range(job.rank, len(job.names), job.world_size)
    missing = {block for block in assigned if not parts.is_whole(job.names[block])}
    size = job.settings.shard_rows
    rows_of = {block: min(size, job.survey.rows - block * size) for block in assigned}
    done = sum(rows_of[block] for block in assigned if block not in missing)
    blocks = (_tokenized(job, block) for block in job.corpus.blocks(size, missing.__contains__))
    with progress_bar("embed", sum(rows_of.values()), "row", done=done, enabled=job.rank == 0) as progress:

        def finish(shard: _ShardTexts, vectors: Array) -> None:
            _write_shard(job, parts, shard, vectors)
            progress.update(len(shard.bad))  # `encode_blocks` counts the texts

        encoder = job.encoder
        rates = encode_blocks(
            encoder.model, encoder.plan_ids, blocks, finish, progress=progress.update, restores_budget=True
        )
    if job.rank == 0 and rates.texts:
        log(str(rates))


def _tokenized(job: EmbedJob, block: TextBlock) -> tuple[_ShardTexts, list[list[int]]]:
    """Return the texts and bad rows of a block, and the token ids of the texts.

    Raises `DataError` for a bad row, unless bad rows are skipped.
    """
    encoder = job.encoder
    rows = dict(enumerate(block.rows, block.first))
    texts = {number: row for number, row in rows.items() if isinstance(row, CorpusText)}
    bad = {number: (row.place, row.reason) for number, row in rows.items() if isinstance(row, BadRow)}
    try:
        ids = encoder.tokenize([row.text for row in texts.values()])
    except ValueError:  # a text without tokens is rare, so the texts are checked one by one only after an error
        reasons = {number: reason for number, row in texts.items() if (reason := untokenizable(encoder, row.text))}
        if not reasons:
            raise
        for number, reason in reasons.items():
            bad[number] = (texts.pop(number).place, reason)
        ids = encoder.tokenize([row.text for row in texts.values()])
    if bad and job.settings.on_bad_row == "error":
        raise bad_row(*bad[min(bad)], SKIP)
    return _ShardTexts(block, texts, bad), ids


def _write_shard(job: EmbedJob, parts: ResumableFolder, shard: _ShardTexts, vectors: Array) -> None:
    """Write the vectors of a shard, and a list of its bad rows.

    Raises:
        DataError: for a vector that is not finite, or if the corpus has changed.
    """
    block, texts = shard.block, shard.texts
    job.corpus.check_unchanged(job.survey)  # a resumed run keeps the shard
    for position in np.flatnonzero(~np.isfinite(vectors).all(axis=1)):
        place = list(texts.values())[position].place
        raise DataError(f"{place}: the vector is not finite. Load the model in bfloat16, or check its weights")
    text_columns: dict[str, Any] = {"row": np.array(list(texts), dtype=np.int64)}
    if job.corpus.id_column is not None:
        text_columns["id"] = [row.id for row in texts.values()]
    if job.settings.store_text:
        text_columns["text"] = [row.text for row in texts.values()]
    bad = sorted(shard.bad.items())
    skipped = [{"row": number, "place": where, "reason": reason} for number, (where, reason) in bad]
    name, columns = job.names[block.number], job.form.stored(vectors)
    fill = partial(
        write_shard, name=name, format=job.format, columns=columns, text_columns=text_columns, skipped=skipped
    )
    parts.write(name, fill, {"first": block.first, "rows": len(texts), "skipped": len(skipped)})


def _finish_folder(job: EmbedJob, parts: ResumableFolder, rows: int) -> None:
    """Write the index of a folder with all shards; `rows` is the number of vectors."""
    from angle_llm.model.source.backbone import absolute_name

    encoder, corpus = job.encoder, job.corpus
    # A model on the hub is stored with its commit, whatever branch was named.
    model = {**parts.identity["model"], "name": absolute_name(job.source.path), "revision": job.source.revision}
    if encoder.prompts.differ:
        model |= {"side": encoder.side, "prompts": encoder.prompts.to_dict()}
    source = {  # arguments of `Corpus.open` that read the same rows again; no path for standard input
        "path": None if corpus.source.path is None else str(corpus.source.path.absolute()),
        "column": corpus.column,
        "id_column": corpus.id_column,
        "stamps": job.survey.stamps,
    }
    parts.finish({"rows": rows, "model": model, "source": source})


def _finish_file(paths: list[Path], target: Path) -> None:
    """Concatenate the .npy files of all shards into `target`, and their lists of skipped rows into NAME.skipped.jsonl.

    `paths` are the files of all shards.
    """
    lists = [path for path in paths if path.name.endswith(SKIPPED)]
    arrays = [path for path in paths if path.suffix == ".npy"]
    beside = target.with_name(target.stem + SKIPPED)
    if lists:
        write_file(beside, lambda file: file.writelines(path.read_bytes() for path in lists), writer="")
    else:
        beside.unlink(missing_ok=True)
    write_file(target, lambda file: join_arrays(arrays, file), writer="")
