"""Main function of a worker: read a job from a JSON file, and write the answer to another one.

Three interpreters with different packages import this module, so it needs the standard library, torch and numpy only.

train: optimizer steps on triples. In-batch cross-entropy of each anchor against all positives and negatives, cosine /
0.05; LoRA on all linear layers; AdamW, constant learning rate, gradients clipped to norm 1. Answer: step_seconds,
losses.
encode: texts to vectors. Answer: seconds, rows.
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
Answer = dict[str, Any]


def serve(*kinds: Callable[[Job], Answer]) -> None:
    """Run a worker: `python -m WORKER FOLDER` reads job.json and writes result.json and rows.npy.

    `kinds`: a function for each kind of job, with its name.
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
    # The peak since the program started. `getrusage` includes the memory of the parent process before.
    peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    content = json.dumps({**answer, "peak_bytes": peak, "packages": versions}, allow_nan=False)
    (folder / "result.json").write_text(content, encoding="utf-8")


def timed(encode: Callable[[list[str]], Any], job: Job) -> Answer:
    """Return the time and rows of all texts, after a first batch that warms up threads and memory."""
    encode(job.texts[: job.batch])
    started = time.perf_counter()
    rows = encode(job.texts)
    return {"seconds": time.perf_counter() - started, "rows": rows}


class Clock:
    """Seconds and loss of each optimizer step of a transformers Trainer; data loading and tokenization are included."""

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
        steps = [after - before for before, after in zip(self._ticks, self._ticks[1:], strict=False)]
        return {"step_seconds": steps, "losses": self.losses}


def load_start(model: Any, adapter: str) -> None:
    """Load the initial adapter weights of the job, in float32: all libraries start with the same numbers.

    Raises:
        ValueError: if the file does not have exactly the adapter of the model.
    """
    from safetensors.torch import load_file

    start = load_file(adapter)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = adapter_key(name)
            if key not in start or start[key].shape != parameter.shape:
                raise ValueError(f"{adapter} has no {key} of shape {tuple(parameter.shape)}: another model or rank.")
            parameter.data = start.pop(key).float()
    if start:
        raise ValueError(f"{adapter} has {sorted(start)}, which the model does not have.")


def adapter_key(name: str) -> str:
    """Return a parameter name without the prefixes of the library, from `layers.` on."""
    return name[name.index("layers.") :].replace(".default", "") if "layers." in name else name
