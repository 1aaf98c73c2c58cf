"""Every text's vector in one file on disk: made part by part, once, and found again by what it follows from.

The work is that of `angle-llm embed`: a command that was killed goes on after the last whole part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.corpus.embed import Keeping, embed_corpus, fingerprint
from angle_llm.corpus.reading import Corpus
from angle_llm.corpus.shards import put
from angle_llm.corpus.vectors import Array, VectorForm
from angle_llm.modeling.encoder import SentenceEncoder


def described(encoder: SentenceEncoder) -> dict[str, Any]:
    """All that a text's vector follows from, beside the text."""
    return {
        "weights": fingerprint(encoder),
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "bits": encoder.bits,
        "prompt": encoder.prompt.to_dict(),
        "pooling": encoder.pooling,
        "max_length": encoder.max_length,
        "dimensions": encoder.dimensions,
    }


def vectors_of(texts: Sequence[str], encoder: SentenceEncoder, name: str, folder: Path, shard_rows: int) -> Array:
    """Vectors (T, D) float32, memory-mapped from a file in `folder`, which is made if it is not there. `name` is the name the
    encoder was loaded by.

    Raises:
        DataError: for a text of which the tokenizer leaves nothing, and a vector that is not finite.
        ShardsError: if another process is making them.
    """
    followed_from = json.dumps([described(encoder), list(texts)])
    digest = hashlib.sha256(followed_from.encode()).hexdigest()[:16]
    target = folder / f"vectors-{digest}.npy"
    listed = folder / f"texts-{digest}.jsonl"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        put(listed, lambda file: file.writelines(json.dumps({"text": text}).encode() + b"\n" for text in texts))
        corpus = Corpus.open(listed)
        embed_corpus(
            corpus,
            corpus.survey(skip_bad=False),
            encoder,
            name,
            VectorForm(encoder.dimensions),
            Keeping(format="bare npy", shard_rows=shard_rows),
            folder / f"vectors-{digest}-{shard_rows}.parts",
            target=target,
        )
    listed.unlink(missing_ok=True)
    found: Array = np.load(target, mmap_mode="r", allow_pickle=False)
    return found
