"""Check that an adapter trained by angle-emb 0.6.1 gives the same vectors in angle_llm.

    python eval/peer_adapter.py [--steps 4] [--data-dir DATA]

angle-emb trains, saves and encodes with its own functions in its own environment (created once; needs pip's network). angle_llm
opens base and adapter with `SentenceEncoder.from_pretrained(base, adapter=…, prompt=…)` and encodes the same texts. Prints the
largest difference relative to the norm of a vector, and that of the base without the adapter; with --data-dir, also Spearman on
STS-B dev. Exit code 1 if a vector differs by more than 1e-5.
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
from speed_peers.environments import ensure_environment
from speed_peers.processes import run_worker

from angle_llm.cli import guarded

TEMPLATE = 'Summarize sentence "{text}" in one word:"'
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
    data_dir: Path | None = None
    """Folder with stsb/, for a score."""
    threads: int = 1
    """Threads of angle-emb."""


def main(settings: PeerAdapterSettings) -> None:
    """Train there, compare here."""
    from angle_llm import SentenceEncoder
    from angle_llm.export.texts import SENTENCES
    from angle_llm.model.tokenizer import SentenceTokenizer
    from angle_llm.prompts import PromptTemplate

    workdir = settings.workdir.expanduser().resolve()
    python = ensure_environment("angle-emb", workdir)
    base, start = prepare_model(settings.model, workdir)
    how: dict[str, Any] = {"prompt": PromptTemplate(name="peer", template=TEMPLATE), "max_length": MAX_LENGTH}
    how |= {"dtype": "float32", "device": "cpu"}
    plain = SentenceEncoder.from_pretrained(base, **how)
    # angle-emb cuts the end of a long prompt, and reads names of special tokens in a text as special tokens.
    uncut, special = SentenceTokenizer(plain.tokenizer, how["prompt"], 10**9), plain.tokenizer.all_special_tokens
    texts = [text for text in SENTENCES if not any(name in text for name in special)]
    texts = [text for text in texts if len(uncut([text])[0]) < MAX_LENGTH]
    triples = read_triples(SpeedSettings(batch=(BATCH,), steps=settings.steps))
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        job = {
            "kind": "adapter",
            "model": str(base),
            "adapter": str(start),
            "rank": RANK,
            "alpha": ALPHA,
            "dtype": "float32",
        }
        job |= {
            "learning_rate": LEARNING_RATE,
            "steps": settings.steps,
            "batch": BATCH,
            "triples": triples,
            "texts": texts,
        }
        job |= {
            "template": TEMPLATE,
            "max_length": MAX_LENGTH,
            "threads": settings.threads,
            "save": f"{folder}/adapter",
        }
        run = run_worker("angle-emb", python, job, Path(folder), workdir, SpeedSettings.max_gib)
        if run.problem is not None:
            raise RuntimeError(f"angle-emb: {run.problem}")
        theirs_ND = np.load(Path(folder) / "angle-emb/rows.npy")
        encoder = SentenceEncoder.from_pretrained(base, adapter=f"{folder}/adapter", **how)
        difference = largest_difference(theirs_ND, encoder.encode(texts))
    print(f"{run.packages}\n{len(texts)} texts, largest relative difference: {difference:.1e}")
    print(f"base without the adapter: {largest_difference(theirs_ND, plain.encode(texts)):.1e}")
    if settings.data_dir is not None:
        print_scores({"with the adapter": encoder, "base": plain}, settings.data_dir)
    sys.exit(0 if difference <= TOLERANCE else 1)


def largest_difference(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """The largest norm of a difference of rows, relative to the norm of the row."""
    one_ND, other_ND = one_ND.astype(np.float64), other_ND.astype(np.float64)
    return float((np.linalg.norm(one_ND - other_ND, axis=1) / np.linalg.norm(one_ND, axis=1)).max())


def print_scores(encoders: dict[str, Any], data_dir: Path) -> None:
    """Print Spearman on STS-B dev."""
    from angle_llm.evaluate import spearman

    rows = [line.split("\t") for line in (data_dir / "stsb/dev.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    for name, encoder in encoders.items():
        a_ND, b_ND = (encoder.encode([row[column] for row in rows]) for column in (4, 5))
        cosine_N = (a_ND * b_ND).sum(1) / np.linalg.norm(a_ND, axis=1) / np.linalg.norm(b_ND, axis=1)
        score = spearman(cosine_N, np.array([float(row[6]) for row in rows]))
        print(f"STS-B dev, Spearman x 100, {name}: {100 * score:.2f}")


if __name__ == "__main__":
    guarded(lambda: main(tyro.cli(PeerAdapterSettings, description=__doc__)))
