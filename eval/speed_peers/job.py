"""What a worker is asked and what it answers, as files; and the frame every worker runs in.

Read by three interpreters with different packages, so nothing here needs more than the standard library, torch and numpy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("angle_llm", "angle-emb", "sentence-transformers", "torch", "transformers", "peft", "tokenizers")
ROWS_FILE = "rows.npy"
RESULT_FILE = "result.json"


@dataclass(frozen=True)
class TrainJob:
    """Some optimizer steps on triples. In-batch contrast of each anchor against all positives and negatives,
    cosine / 0.05; LoRA on all linear layers; AdamW at a constant rate, gradients clipped to norm 1."""

    model: str
    """A plain model folder."""
    adapter: str
    """A safetensors file with the adapter's start, keys from `layers.` on: the same numbers in every library."""
    dtype: str
    max_length: int
    template: str
    """The wording, with one `{text}`."""
    rank: int
    alpha: int
    batch: int
    steps: int
    learning_rate: float
    triples: list[list[str]]
    """(anchor, positive, negative), `batch * steps` of them, in the order of training."""
    micro_batch_tokens: int
    graph_tokens: int
    threads: int


@dataclass(frozen=True)
class EncodeJob:
    """Texts to vectors."""

    model: str
    dtype: str
    max_length: int
    template: str | None
    """None: the plain text."""
    pooling: str
    """last or mean."""
    batch: int
    texts: list[str]
    threads: int


Job = TrainJob | EncodeJob
JOBS: dict[str, type[Job]] = {"train": TrainJob, "encode": EncodeJob}
Answer = dict[str, Any]
"""Of a training: `step_seconds` and `losses`. Of an encoding: `seconds`, with the rows beside it in `ROWS_FILE`. Either may
hold `facts`, which are reported as they are."""


def write_json(path: Path, content: object) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    temporary.replace(path)


def write_job(path: Path, job: Job) -> None:
    kind = next(name for name, cls in JOBS.items() if isinstance(job, cls))
    write_json(path, {"kind": kind, **asdict(job)})


def read_job(path: Path) -> Job:
    values = json.loads(path.read_text(encoding="utf-8"))
    cls = JOBS[values.pop("kind")]
    needed = {field.name for field in fields(cls)}
    if values.keys() != needed:
        raise ValueError(f"{path}: fields {sorted(values.keys() ^ needed)} are missing or unknown.")
    return cls(**values)


def serve(
    train: Callable[[TrainJob], Answer], encode: Callable[[EncodeJob], Answer], arguments: list[str] | None = None
) -> None:
    """The main of a worker: `JOB_FILE FOLDER`; writes the answer with memory and versions into the folder."""
    job_file, folder = map(Path, sys.argv[1:] if arguments is None else arguments)
    job = read_job(job_file)
    import torch

    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    answer = train(job) if isinstance(job, TrainJob) else encode(job)
    rows = answer.pop("rows", None)
    if rows is not None:
        import numpy as np

        np.save(folder / ROWS_FILE, np.asarray(rows, dtype=np.float32), allow_pickle=False)
    write_json(folder / RESULT_FILE, {**answer, "peak_bytes": peak_bytes(), "packages": versions()})


def versions() -> dict[str, str]:
    """Of the packages that matter here, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def peak_bytes() -> int:
    """The most memory this process had resident, weights and libraries included."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would count what the parent had resident before this program was started
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def load_start(model: Any, adapter: str) -> None:
    """Gives the model's adapter the start every library begins with, in float32.

    transformers' `add_adapter` makes the adapter in the base's dtype; peft's own `get_peft_model` and angle_llm keep it
    in float32, so that is what all are compared with.

    Raises:
        ValueError: if the file does not hold exactly the model's adapter.
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
        raise ValueError(f"the model has no place for {sorted(start)}, which {adapter} holds.")


def adapter_key(name: str) -> str:
    """A parameter's name without what each library wraps around the backbone."""
    return name[name.index("layers.") :].replace(".default", "") if "layers." in name else name
