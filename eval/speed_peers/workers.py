"""A library at work: one process, from a job to its answer."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np

from speed_peers.job import RESULT_FILE, ROWS_FILE, Job, write_job
from speed_peers.report import OURS, Run, cosines, step_time
from speed_peers.watch import GIB, run_watched

WORKERS = {
    OURS: "worker_ours",
    "angle-emb": "worker_angle_emb",
    "sentence-transformers": "worker_sentence_transformers",
}


def run_worker(library: str, python: Path, job: Job, folder: Path, workdir: Path, max_gib: float) -> Run:
    """One process from job to answer. `folder` is shared by the libraries of a repetition: ours leaves its rows there."""
    own = folder / library
    own.mkdir()
    log = workdir / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}-{library}.log"
    log.parent.mkdir(exist_ok=True)
    write_job(own / "job.json", job)
    outcome = run_watched(
        [str(python), "-m", f"speed_peers.{WORKERS[library]}", str(own / "job.json"), str(own)],
        env=worker_environment(job.threads),
        limit_bytes=int(max_gib * GIB),
        log=log,
    )
    if outcome.over_limit:
        problem = f"ended at {outcome.limit_bytes / GIB:.1f} GiB of memory"
        return Run(problem, peak_bytes=outcome.peak_bytes, other_cores=outcome.other_cores)
    if outcome.code != 0:
        said = last_line(log.read_text(encoding="utf-8", errors="replace"))
        return Run(
            f"failed with code {outcome.code}: {said} (all of it: logs/{log.name})", peak_bytes=outcome.peak_bytes
        )
    return replace(read_answer(own, folder / OURS / ROWS_FILE), other_cores=outcome.other_cores)


def read_answer(own: Path, our_rows: Path) -> Run:
    """What a worker wrote, its rows compared with ours."""
    answer = json.loads((own / RESULT_FILE).read_text(encoding="utf-8"))
    common = {name: answer[name] for name in ("peak_bytes", "packages")} | {"facts": answer.get("facts", {})}
    if "step_seconds" in answer:
        steps = answer["step_seconds"]
        return Run(seconds=step_time(steps), step_seconds=steps, losses=answer["losses"], **common)
    lowest, mean = None, None
    if own != our_rows.parent and our_rows.is_file():
        lowest, mean = cosines(np.load(our_rows), np.load(own / ROWS_FILE))
    return Run(seconds=answer["seconds"], cosine_min=lowest, cosine_mean=mean, **common)


def worker_environment(threads: int) -> dict[str, str]:
    """This process's environment, with the workers importable, and without network, GPU, or paths of another Python."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


def last_line(text: str) -> str:
    """The last that was said."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was said")
