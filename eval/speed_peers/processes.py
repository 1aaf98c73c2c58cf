"""Create the environments of the libraries, and run a worker in a process with a memory limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from angle_llm.model.vectors import cosine_differences

OURS = "angle_llm"
WORKERS = {
    OURS: "worker_ours",
    "angle-emb": "worker_angle_emb",
    "sentence-transformers": "worker_sentence_transformers",
}
GIB = 2**30
SPARE = GIB // 2
"""Memory in bytes that a worker must leave free on the machine."""
TORCH = "torch==2.13.0"
REQUIREMENTS: dict[str, list[str]] = {
    # angle-emb requires its transformers, peft and bitsandbytes.
    "angle-emb": ["angle-emb==0.6.1", "transformers==5.3.0", "peft==0.18.1", "bitsandbytes==0.49.2", TORCH],
    "sentence-transformers": ["sentence-transformers[train]==6.2.0", "transformers==5.23.0", "peft==0.21.2", TORCH],
}


def ensure_environment(name: str, workdir: Path) -> Path:
    """Create the virtual environment of a library, unless it exists, and return its Python interpreter.

    Raises:
        RuntimeError: if pip fails, for example without a network.
    """
    folder, wanted = workdir / "environments" / name, REQUIREMENTS[name]
    python, mark = folder / "bin/python", folder / "installed.json"
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == wanted:
        return python
    print(f"installing {', '.join(wanted)} into {folder} (once; minutes)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    # torch first: the exact version takes the build of the configured index, which can be the CPU build.
    for command in ([sys.executable, "-m", "venv", str(folder)], [*install, TORCH], [*install, *wanted]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            output, others = done.stderr.strip()[-1000:], " ".join(peer for peer in REQUIREMENTS if peer != name)
            raise RuntimeError(f"{' '.join(command)} failed:\n{output}\nTo compare without {name}: --peers {others}")
    mark.write_text(json.dumps(wanted), encoding="utf-8")
    return python


@dataclass
class Run:
    """Result of a worker process: times of optimizer steps, or the time to encode the texts."""

    problem: str | None = None
    """Reason of a failure; None if the run has a time."""
    seconds: float | None = None
    """Median seconds of a step without the first step, or seconds to encode the texts."""
    peak_bytes: int = 0
    other_cores: float = 0.0
    """Average number of CPU cores that other programs used during the run."""
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    cosine_min: float | None = None
    """Smallest cosine of a vector with the vector of angle_llm for the same text."""
    facts: dict[str, int] = field(default_factory=dict)
    """Numbers of texts and tokens."""
    packages: dict[str, str] = field(default_factory=dict)


def run_worker(library: str, python: Path, job: dict[str, Any], folder: Path, workdir: Path, max_gib: float) -> Run:
    """Run a job with a library in a new process.

    The libraries of a repetition share `folder`, so that their vectors can be compared. Logs are in `workdir`.
    """
    own = folder / library
    own.mkdir(parents=True)
    (own / "job.json").write_text(json.dumps(job), encoding="utf-8")
    log = workdir / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}-{library}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", f"speed_peers.{WORKERS[library]}", str(own)]
    code, run = watched(command, worker_environment(job["threads"]), int(max_gib * GIB), log)
    if run.problem is None and code != 0:
        output = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        run.problem = f"exit code {code}: {output[-1] if output else 'no output'} (logs/{log.name})"
    if run.problem is None:
        answer = json.loads((own / "result.json").read_text(encoding="utf-8"))
        answer["peak_bytes"] = max(run.peak_bytes, answer["peak_bytes"])
        run = replace(run, **answer)
        if run.step_seconds:
            run.seconds = float(np.median(run.step_seconds[1:] or run.step_seconds))
        if library != OURS and (folder / OURS / "rows.npy").is_file():
            differences_N = cosine_differences(np.load(folder / OURS / "rows.npy"), np.load(own / "rows.npy"))
            run.cosine_min = float(1 - differences_N.max())
    return run


def watched(command: list[str], environment: dict[str, str], limit: int, log: Path) -> tuple[int, Run]:
    """Run a program; return its exit code, and a `Run` with peak memory and the CPU use of other programs.

    The program is killed when its memory exceeds `limit` bytes, or the available memory of the machine if that is less;
    otherwise the kernel could kill another program.
    """
    limit = min(limit, psutil.virtual_memory().available - SPARE)
    run, started, before = Run(), time.monotonic(), _other_seconds()
    with log.open("wb") as output:
        process = psutil.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while process.poll() is None and run.problem is None:
                with suppress(psutil.Error):  # it has just ended
                    run.peak_bytes = max(run.peak_bytes, process.memory_info().rss)
                if run.peak_bytes > limit:
                    run.problem = f"killed at {limit / GIB:.1f} GiB of memory"
                time.sleep(0.5)  # at 0.05 s, the calls of psutil slowed encoding in bfloat16 by a tenth
        finally:
            if process.poll() is None:
                process.kill()
            code = int(process.wait())
    run.other_cores = max(0.0, (_other_seconds() - before) / max(0.1, time.monotonic() - started))
    return code, run


def _other_seconds() -> float:
    """Return the CPU seconds of all programs and of other virtual machines, except ended child processes of this program."""
    system, own = psutil.cpu_times(), os.times()
    used = sum(getattr(system, field, 0.0) for field in ("user", "nice", "system", "steal"))
    return float(used) - own.children_user - own.children_system


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a worker process: number of threads, no network, no GPU."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **limits, **offline, **paths}
