"""`angle-llm embed`: embed a corpus of any size and write the vectors to disk.

Rows are read, encoded and written in blocks, with one block in memory at a time. The shard of a block depends on no other
block, so any process can compute it at any time. A killed command resumes with the missing shards.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from angle_llm.data.corpus import SKIP, Corpus, CorpusText, Survey, TextBlock, bad_row
from angle_llm.data.formats import DataError
from angle_llm.data.sources import STANDARD_INPUT, BadRow
from angle_llm.io import ResumableFolder, check_resumable, has_terminal, progress_bar, remove_folder, write_file
from angle_llm.model.vectors import (
    FORMAT_VERSION,
    INDEX,
    SKIPPED,
    Array,
    ShardOptions,
    VectorForm,
    encoder_identity,
    join_arrays,
    untokenizable,
    write_shard,
)
from angle_llm.settings.commands import EmbedSettings
from angle_llm.settings.parsing import SettingsError

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

_FILE_ENDINGS = (
    ".txt", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".gz", ".npz", ".pt", ".bin", ".index", ".safetensors",
)  # fmt: skip
"""Extensions with which `--output` is refused, because the user probably means a file and not a folder."""
_POLL_SECONDS = 1.0
"""Seconds between two checks whether other processes have written their shards."""
_LOG_SECONDS = 60
"""Seconds between two messages while waiting for other processes."""


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
    _check_output(output, settings.input)
    check_resumable(folder, "--output", INDEX)
    corpus = Corpus.open(settings.input, settings.column, settings.id_column)
    if corpus.source.ignored and rank == 0:
        print(f"skipped, of other types or .json: {', '.join(corpus.source.ignored[:5])}", file=sys.stderr)
    survey = corpus.survey(skip_bad=settings.on_bad_row == "skip")

    import torch

    from angle_llm.model.encoder import SentenceEncoder

    # Encoder.
    if settings.device is None and world_size > 1 and torch.cuda.is_available():
        settings = replace(settings, device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    encoder = SentenceEncoder.from_pretrained(settings.model, **settings.options())
    if settings.side is not None:
        encoder = encoder.for_side(settings.side)
    elif encoder.prompts.differ:
        raise SettingsError(
            f"--as: expected query or document, because {settings.model} has {encoder.prompts}. A query is a text to "
            "search for, a document a text to find."
        )
    # Form of the vectors.
    size = encoder.dimensions
    if settings.dim is not None and settings.dim > size:
        raise SettingsError(f"--dim must be at most {size}, the dimensions of {settings.model}, got {settings.dim}.")
    if settings.complex and size % 2:
        raise SettingsError(f"--complex needs an even number of dimensions; {settings.model} has {size}.")
    # Cut rows are no longer of length 1.
    normalize = settings.normalize or (encoder.normalize and settings.dim is not None)
    form = VectorForm(size, settings.dim or size, normalize, settings.precision, settings.complex)
    # Embed the corpus.
    shards = ShardOptions(
        "bare npy" if settings.one_file else settings.format,
        settings.shard_rows,
        settings.store_text,
        settings.on_bad_row == "skip",
    )
    how: Any = {"target": output if settings.one_file else None, "rank": rank, "world_size": world_size}
    rows = embed_corpus(corpus, survey, encoder, settings.model, form, shards, folder, **how)
    if rank == 0:
        skipped = f"; skipped {survey.rows - rows} bad rows, see *.skipped.jsonl" if rows < survey.rows else ""
        print(f"{rows} rows of {form.kept} dimensions in {settings.output}{skipped}")


def _check_output(path: Path, input: Path) -> None:
    """Check that the output can be written. Raises `SettingsError` if it cannot."""
    if path.suffix in _FILE_ENDINGS:
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


def embed_corpus(
    corpus: Corpus,
    survey: Survey,
    encoder: SentenceEncoder,
    model: str,
    form: VectorForm,
    shards: ShardOptions,
    folder: Path,
    *,
    target: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> int:
    """Write the vectors of a corpus to shards in `folder`, or resume; return the number of vectors of the whole corpus.

    A process writes every `world_size`-th shard, starting with shard `rank`. Rank 0 then waits for all other processes
    and writes the index. With `target`, rank 0 writes the .npy file `target` instead and removes `folder`. Other ranks
    return 0. `model` is the name or path that the encoder was loaded from.

    Raises:
        FolderError: if the folder contains other files, or was started with other input, model or settings.
        DataError: if a row cannot be embedded and bad rows are not skipped, or the input changes meanwhile.
    """
    names = [f"shard-{block:06d}" for block in range(-(-survey.rows // shards.rows))]
    if rank >= len(names):
        return 0
    columns = {"column": corpus.column, "id_column": corpus.id_column}
    # All inputs that change the bytes of the shards. Paths and the number of processes do not change them.
    identity: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "input": {
            "files": survey.files,
            "rows": survey.rows,
            **columns,
            "bad_rows": "skipped" if shards.skip_bad else "refused",
        },
        "model": encoder_identity(encoder),
        "vectors": asdict(form),
        "layout": {"format": shards.format, "rows": shards.rows, "store_text": shards.store_text},
    }
    with ResumableFolder(folder, identity, option="--output", index=INDEX, rank=rank) as parts:
        mine = range(rank, len(names), world_size)
        kept = {block for block in mine if parts.is_whole(names[block])}
        total, done = (sum(min(shards.rows, survey.rows - shards.rows * block) for block in s) for s in (mine, kept))
        if done and rank == 0:
            state = f"resuming: {done} of {total} rows" if done < total else f"all {total} rows"
            print(f"{state} are embedded already", file=sys.stderr)
        title = "embed" if world_size == 1 else f"embed (process {rank} of {world_size})"
        with progress_bar(title, total, "row", done=done, enabled=rank == 0) as progress:
            for block in corpus.blocks(shards.rows, lambda number: number in mine and number not in kept):
                texts, vectors, skipped = _encode_block(block, encoder, shards.skip_bad, rank == 0 and has_terminal())
                sides: dict[str, Any] = {"row": np.array(list(texts), dtype=np.int64)}
                if corpus.id_column is not None:
                    sides["id"] = [row.id for row in texts.values()]
                if shards.store_text:
                    sides["text"] = [row.text for row in texts.values()]
                name = names[block.number]
                stored = form.stored(vectors)
                fill = partial(write_shard, name=name, options=shards, columns=stored, sides=sides, skipped=skipped)
                parts.write(name, fill, {"first": block.first, "rows": len(texts), "skipped": len(skipped)})
                progress.update(len(block.rows))
        corpus.check_unchanged(survey)
        if rank != 0:
            return 0
        _wait_for(parts, [name for block, name in enumerate(names) if block not in mine])
        manifests = [parts.manifest(name) for name in names]
        rows: int = sum(manifest["values"]["rows"] for manifest in manifests)
        if target is not None:
            _join([folder / file["name"] for manifest in manifests for file in manifest["files"]], target)
            remove_folder(folder)
            return rows
        from angle_llm.model.source.backbone import absolute_name
        from angle_llm.model.source.resolve import split_revision

        source = {  # arguments of `Corpus.open` that read the same rows again; no path for standard input
            "path": None if corpus.source.path is None else str(corpus.source.path.absolute()),
            **columns,
            "stamps": survey.stamps,
        }
        # A model on the hub is stored with its commit, whatever branch was named.
        on_hub = encoder.base_revision is not None and encoder.base == split_revision(model)[0]
        known = {"name": encoder.base, "revision": encoder.base_revision}
        used = {**identity["model"], **(known if on_hub else {"name": absolute_name(model), "revision": None})}
        if encoder.prompts.differ:
            used |= {"side": encoder.side, "prompts": encoder.prompts.to_dict()}
        parts.finish({"rows": rows, "model": used, "source": source})
        return rows


def _wait_for(parts: ResumableFolder, missing: Sequence[str]) -> None:
    """Wait until all other processes have written the missing shards."""
    logged = time.monotonic()
    while missing := parts.unwritten(missing):
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            print(f"waiting for {len(missing)} shards of other processes", file=sys.stderr)
        time.sleep(_POLL_SECONDS)


def _join(paths: list[Path], target: Path) -> None:
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


def _encode_block(
    block: TextBlock, encoder: SentenceEncoder, skip_bad: bool, show_progress: bool
) -> tuple[dict[int, CorpusText], Array, list[dict[str, Any]]]:
    """Encode a block of texts; return encoded rows by index in the corpus, their vectors (N, D), and skipped rows.

    A skipped row is a dictionary of the index in the corpus, the place in the file, and the reason.

    Raises:
        DataError: if a row is bad and `skip_bad` is False, or a vector is not finite.
    """
    texts: dict[int, CorpusText] = {}
    bad: dict[int, tuple[str, str]] = {}
    for number, row in enumerate(block.rows, block.first):
        if isinstance(row, BadRow):
            bad[number] = (row.place, row.reason)
        else:
            texts[number] = row
    try:
        vectors = encoder.encode([row.text for row in texts.values()], show_progress=show_progress)
    except ValueError:  # a text without tokens is rare, so the texts are checked one by one only after an error
        reasons = {number: reason for number, row in texts.items() if (reason := untokenizable(encoder, row.text))}
        if not reasons:
            raise
        bad |= {number: (texts.pop(number).place, reason) for number, reason in reasons.items()}
        if skip_bad:
            vectors = encoder.encode([row.text for row in texts.values()], show_progress=show_progress)
    if bad and not skip_bad:
        raise bad_row(*bad[min(bad)], SKIP)
    for row, vector in zip(texts.values(), vectors, strict=True):
        if not np.isfinite(vector).all():
            raise DataError(f"{row.place}: the vector is not finite. Load the model in bfloat16, or check its weights")
    skipped = [
        {"row": number, "place": location, "reason": reason} for number, (location, reason) in sorted(bad.items())
    ]
    return texts, vectors, skipped
