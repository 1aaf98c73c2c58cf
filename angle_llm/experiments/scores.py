"""The cosine of every pair, kept beside the result: what two rows are compared by, pair by pair.

    RESULTS/GRID/NAME.npz      for each task its cosines, four bytes each, and a digest of its gold scores

Small enough to be committed, so a row that is run in another checkout can be compared with those that came with it. Gold
scores belong to the data: they are read again, and the digest tells whether they are still the same.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate import PairScores
from angle_llm.io import write_file

Gold = Mapping[str, NDArray[np.float64]]
"""Task → gold scores (P,), in the order of its pairs."""


def scores_path(results: Path, grid: str, name: str) -> Path:
    """Where an experiment's cosines are."""
    return results / grid / f"{name}.npz"


def save_scores(scores: Mapping[str, PairScores], path: Path) -> None:
    """Writes the file whole or not at all."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for task, of in scores.items():
        arrays[f"{task}/cosine"] = of.cosine.astype(np.float32)
        arrays[f"{task}/gold_digest"] = _digest(of.gold)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_file(path, lambda file: file.write(buffer.getvalue()))


def load_scores(path: Path, gold: Callable[[], Gold]) -> dict[str, PairScores] | None:
    """Cosines and gold scores of the tasks whose gold scores are still those; None without a file, or of a damaged one."""
    if not path.is_file():
        return None
    known = gold()
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            tasks = dict.fromkeys(key.rsplit("/", 1)[0] for key in arrays.files)
            return {
                task: PairScores(arrays[f"{task}/cosine"].astype(np.float64), known[task])
                for task in tasks
                if task in known and np.array_equal(_digest(known[task]), arrays[f"{task}/gold_digest"])
            }
    except Exception as error:  # damaged bytes come as whatever the reading meets: zlib's errors, tokenize's, zipfile's
        print(f"not compared pair by pair: {path} is damaged ({error!r}). Remove it, or run its row with --again.")
        return None


def _digest(gold: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.sha256(np.asarray(gold, dtype="<f8").tobytes()).digest(), dtype=np.uint8)
