"""Check that an adapter trained by angle-emb 0.6.1 gives the same vectors in angle_llm.

    python eval/peer_adapter.py [--steps 4]

angle-emb trains, saves and encodes with its own functions in its own environment (created once; needs pip's network).
angle_llm opens base and adapter with `SentenceEncoder.from_pretrained(base, adapter=…, prompt=…)` and encodes the same
texts. Prints the largest difference relative to the norm of a vector, and that of the base without the adapter. Exit
code 1 if a vector differs by more than 1e-5.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from speed import ALPHA, LEARNING_RATE, RANK, SpeedSettings, prepare_model, read_triples
from speed_peers.processes import ensure_environment, run_worker

from angle_llm import PromptTemplate, SentenceEncoder
from angle_llm.cli import guarded
from angle_llm.export.texts import SENTENCES
from angle_llm.model.tokenizer import SentenceTokenizer

PROMPT = PromptTemplate(name="peer", template='Summarize sentence "{text}" in one word:"')
MAX_LENGTH = 128
BATCH = 8
TOLERANCE = 1e-5


@dataclass(frozen=True)
class PeerAdapterSettings:
    """What is trained, and where."""

    workdir: Path = SpeedSettings.workdir
    """Folder of environments and models."""
    model: str = SpeedSettings.model
    """The base model."""
    steps: int = 4
    """Optimizer steps, of 8 triples each."""
    threads: int = 1
    """Threads of angle-emb."""


def main(settings: PeerAdapterSettings) -> None:
    """Train with angle-emb, and compare the vectors with angle_llm."""
    workdir = settings.workdir.expanduser().resolve()
    python = ensure_environment("angle-emb", workdir)
    base, start = prepare_model(settings.model, workdir)
    how: dict[str, Any] = {"prompt": PROMPT, "max_length": MAX_LENGTH, "dtype": "float32", "device": "cpu"}
    plain = SentenceEncoder.from_pretrained(base, **how)
    job = {
        "kind": "adapter",
        "model": str(base),
        "adapter": str(start),
        "dtype": "float32",
        "threads": settings.threads,
    }
    job |= {"rank": RANK, "alpha": ALPHA, "learning_rate": LEARNING_RATE, "steps": settings.steps, "batch": BATCH}
    texts = comparable_texts(plain)
    job |= {"template": PROMPT.template, "max_length": MAX_LENGTH, "texts": texts}
    job |= {"triples": read_triples(SpeedSettings(batch=(BATCH,), steps=settings.steps))}
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        job |= {"save": f"{folder}/adapter"}
        run = run_worker("angle-emb", python, job, Path(folder), workdir, SpeedSettings.max_gib)
        if run.problem is not None:
            raise RuntimeError(f"angle-emb: {run.problem}")
        theirs_ND = np.load(Path(folder) / "angle-emb/rows.npy")
        encoder = SentenceEncoder.from_pretrained(base, adapter=f"{folder}/adapter", **how)
        difference = largest_difference(theirs_ND, encoder.encode(texts))
    print(f"{run.packages}\n{len(theirs_ND)} texts, largest relative difference: {difference:.1e}")
    print(f"base without the adapter: {largest_difference(theirs_ND, plain.encode(texts)):.1e}")
    sys.exit(0 if difference <= TOLERANCE else 1)


def comparable_texts(encoder: SentenceEncoder) -> list[str]:
    """Return texts that angle-emb tokenizes alike: it truncates long prompts and parses special tokens."""
    uncut, special = SentenceTokenizer(encoder.tokenizer, PROMPT, 10**9), encoder.tokenizer.all_special_tokens
    texts = [text for text in SENTENCES if not any(name in text for name in special)]
    return [text for text in texts if len(uncut([text])[0]) < MAX_LENGTH]


def largest_difference(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """Return the largest norm of a difference of rows, relative to the norm of the row."""
    one_ND, other_ND = one_ND.astype(np.float64), other_ND.astype(np.float64)
    return float((np.linalg.norm(one_ND - other_ND, axis=1) / np.linalg.norm(one_ND, axis=1)).max())


if __name__ == "__main__":
    guarded(lambda: main(tyro.cli(PeerAdapterSettings, description=__doc__)))
