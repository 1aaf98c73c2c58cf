"""Main function of a worker: read a job from a JSON file, run it, and write the answer to a JSON file.

Interpreters with different packages import this module, so it needs only the standard library, torch and numpy. The kinds
of jobs:

* train: optimizer steps on triples. The loss is the in-batch cross-entropy of each anchor against all positives and
  negatives, with temperature 0.05; LoRA on all linear layers; AdamW with a constant learning rate; gradients clipped to
  norm 1. The answer has `step_seconds` and `losses`.
* encode: texts to vectors. The answer has `seconds` and `rows`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PACKAGES = ("angle_llm", "angle-emb", "sentence-transformers", "torch", "transformers", "peft", "tokenizers")
Job = SimpleNamespace
"""Settings and texts of a training or encoding job."""
Answer = dict[str, Any]
"""Times and results of a training or encoding job."""


def serve(*kinds: Callable[[Job], Answer]) -> None:
    """Run a worker as a program: `python -m WORKER FOLDER` reads job.json and writes result.json and rows.npy.

    `kinds` are the functions that run a job, named after its kind.
    """
    folder = Path(sys.argv[1])
    job = Job(**json.loads((folder / "job.json").read_text(encoding="utf-8")))
    import numpy as np
    import torch

    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    answer = next(kind for kind in kinds if kind.__name__ == job.kind)(job)
    if "rows" in answer:
        np.save(folder / "rows.npy", np.asarray(answer.pop("rows"), dtype=np.float32), allow_pickle=False)
    installed = {each.metadata["Name"].replace("-", "_"): each.version for each in metadata.distributions()}
    versions = {name: installed[key] for name in PACKAGES if (key := name.replace("-", "_")) in installed}
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    # Peak memory since the program started; the peak of `getrusage` includes memory of the parent process.
    peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    content = json.dumps({**answer, "peak_bytes": peak, "packages": versions}, allow_nan=False)
    (folder / "result.json").write_text(content, encoding="utf-8")


def timed(encode: Callable[[list[str]], Any], job: Job) -> Answer:
    """Encode the texts of a job, after a first batch as warm-up; return seconds and vectors."""
    encode(job.texts[: job.batch])
    started = time.perf_counter()
    rows = encode(job.texts)
    return {"seconds": time.perf_counter() - started, "rows": rows}


class Clock:
    """Records seconds and loss of each optimizer step of a transformers Trainer, including data loading and tokenization."""

    def __init__(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        self.losses: list[float] = []
        self._ticks = ticks = list[float]()
        step = trainer.training_step

        def recorded(*arguments: Any, **named: Any) -> Any:
            loss = step(*arguments, **named)
            self.losses.append(float(loss))
            return loss

        class Ticks(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                ticks.append(time.perf_counter())

            def on_step_end(self, *_: Any, **__: Any) -> None:
                ticks.append(time.perf_counter())

        trainer.training_step = recorded
        trainer.add_callback(Ticks())

    def answer(self) -> Answer:
        """Return the recorded seconds and losses."""
        steps = [after - before for before, after in zip(self._ticks, self._ticks[1:], strict=False)]
        return {"step_seconds": steps, "losses": self.losses}


def load_start(model: Any, adapter: str) -> None:
    """Load initial adapter weights in float32, the same for all libraries.

    Raises:
        ValueError: if the weights in the file and the adapter weights of the model differ in names or shapes.
    """
    from safetensors.torch import load_file

    start = load_file(adapter)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = adapter_key(name)
            if key not in start or start[key].shape != parameter.shape:
                raise ValueError(
                    f"{adapter}: expected {key} of shape {tuple(parameter.shape)}; it was made for another model or rank."
                )
            parameter.data = start.pop(key).float()
    if start:
        raise ValueError(f"{adapter} has {len(start)} weights that the model does not have, such as {min(start)}.")


def adapter_key(name: str) -> str:
    """Return the name of a parameter from `layers.` on, without prefixes that differ between libraries."""
    return name[name.index("layers.") :].replace(".default", "") if "layers." in name else name
