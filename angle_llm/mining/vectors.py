"""Every text's vector in one file on disk: made part by part, once, and found again by what it follows from.

    FOLDER/vectors-DIGEST.npy       the vectors; all that stays
    FOLDER/texts-DIGEST.jsonl       while they are made: the texts, and
    FOLDER/vectors-DIGEST.parts/    the parts there are; one process at a time holds it

The work is that of `angle-llm embed`: a command that was killed goes on after the last whole part.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.data.corpus import Corpus, CorpusText
from angle_llm.data.formats import DataError
from angle_llm.data.readers import BadRow, Row
from angle_llm.embed import embed_corpus
from angle_llm.io import write_file
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.vectors import Array, ShardOptions, VectorForm, fingerprint

_CHECKED_AT_ONCE = 8192


def described(encoder: SentenceEncoder) -> dict[str, Any]:
    """All that a text's vector follows from, beside the text and those it is embedded with."""
    return {
        "weights": fingerprint(encoder),
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "bits": encoder.bits,
        "prompt": encoder.prompt.to_dict(),
        "pooling": encoder.pooling,
        "max_length": encoder.max_length,
        "dimensions": encoder.dimensions,
    }


def vectors_of(
    texts: Sequence[str],
    encoder: SentenceEncoder,
    name: str,
    folder: Path,
    shard_rows: int,
    whose: Callable[[int], str],
) -> Array:
    """Vectors (T, D) float32, memory-mapped from a file in `folder`, which is made if it is not there. `name` is the name the
    encoder was loaded by; `whose` tells of a text's number which it is, for messages.

    Raises:
        DataError: for a text of which the tokenizer leaves nothing, before any is embedded; and a vector that is 0 or not finite.
        ShardsError: if another process is making them.
    """
    followed_from = json.dumps([described(encoder), shard_rows, list(texts)])
    digest = hashlib.sha256(followed_from.encode()).hexdigest()[:16]
    target = folder / f"vectors-{digest}.npy"
    listed = folder / f"texts-{digest}.jsonl"
    if not target.is_file():
        _check_texts(texts, encoder, whose)
        folder.mkdir(parents=True, exist_ok=True)
        _list(texts, listed)
        corpus = Corpus.open(listed)
        corpus = _Texts(corpus.source, corpus.column, whose=whose)
        embed_corpus(
            corpus,
            corpus.survey(skip_bad=False),
            encoder,
            name,
            VectorForm(encoder.dimensions, encoder.dimensions),
            ShardOptions("bare npy", shard_rows),
            folder / f"vectors-{digest}.parts",
            target=target,
        )
    listed.unlink(missing_ok=True)
    found: Array = np.load(target, mmap_mode="r", allow_pickle=False)
    _check_vectors(found, whose)
    return found


def _list(texts: Sequence[str], listed: Path) -> None:
    """Writes the texts, unless they are there: another process may be reading them, and would find them changed."""
    if listed.is_file():
        return
    mine = listed.with_name(f".{listed.name}.{os.getpid()}")
    write_file(mine, lambda file: file.writelines(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    try:
        os.link(mine, listed)
        mine.unlink()
    except FileExistsError:
        mine.unlink()
    except OSError:  # a file system without hard links
        mine.replace(listed)


@dataclass(frozen=True)
class _Texts(Corpus):
    """The file of texts, with the places of the user's rows in messages."""

    whose: Callable[[int], str] = str

    def _text(self, row: Row | BadRow) -> CorpusText | BadRow:
        found = super()._text(row)
        return found._replace(place=self.whose(row.line - 1)) if isinstance(found, CorpusText) else found


def _check_texts(texts: Sequence[str], encoder: SentenceEncoder, whose: Callable[[int], str]) -> None:
    """Tokenising takes a hundredth of the time that embedding takes."""
    for start in range(0, len(texts), _CHECKED_AT_ONCE):
        some = texts[start : start + _CHECKED_AT_ONCE]
        try:
            encoder.tokenize(some)
        except ValueError:
            for number, text in enumerate(some, start):
                try:
                    encoder.tokenize([text])
                except ValueError as error:
                    reason = str(error).removeprefix("text 0: ").removeprefix("text 0 ").rstrip(".")
                    raise DataError(f"{whose(number)}: {reason}. Mend it, or take its row out") from None
            raise


def _check_vectors(vectors_TD: Array, whose: Callable[[int], str]) -> None:
    """No cosine is made of a vector without a direction."""
    for start in range(0, len(vectors_TD), _CHECKED_AT_ONCE):
        some = vectors_TD[start : start + _CHECKED_AT_ONCE]
        bad = ~(np.isfinite(some).all(axis=1) & some.any(axis=1))
        if bad.any():
            raise DataError(
                f"{whose(start + int(bad.argmax()))}: its vector is 0 or not finite, so it has no cosine. Load the model in "
                "bfloat16 or float32, mend its weights, or take the row out"
            )
