"""How training reads a large file: memory, first batch, going on, and who reads what, measured in processes of their own.

    python eval/data_scale.py --rows 1000000

Writes triples of made-up words, has them read as a run reads them, and prints one line for each figure. No model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tyro

from angle_llm.config import DataSettings, OptimizerSettings, TrainSettings
from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.train.schedule import BatchPlan

_WORDS = (
    "amber",
    "basket",
    "canal",
    "early",
    "gently",
    "harbour",
    "island",
    "lantern",
    "meadow",
    "narrow",
    "orchard",
    "paper",
)


@dataclass(frozen=True)
class ScaleSettings:
    """What is measured."""

    rows: int = 1_000_000
    """Rows of the file."""
    batch_size: int = 64
    """Examples of a batch."""
    processes: tuple[int, ...] = (1, 2, 3)
    """Worlds whose order of reading is compared."""
    folder: Path | None = None
    """Where the file and its index are put, and stay. None: a folder that goes."""


def main(settings: ScaleSettings) -> dict[str, float]:
    """Prints the figures and returns them by name."""
    if settings.folder is not None:
        settings.folder.mkdir(parents=True, exist_ok=True)
        return _measured(settings, settings.folder)
    with TemporaryDirectory() as folder:
        return _measured(settings, Path(folder))


def _measured(settings: ScaleSettings, folder: Path) -> dict[str, float]:
    path = folder / f"rows-{settings.rows}.jsonl"
    if not path.exists():
        _write(path, settings.rows)
    print(f"{path.stat().st_size / 1e6:,.0f} MB in {settings.rows:,} rows")
    figures: dict[str, float] = {}
    for name in ("cold", "warm", "resume"):
        figures |= {f"{name}_{key}": value for key, value in _child(name, path, settings.batch_size, "0", "1").items()}
    orders = {}
    for world in settings.processes:
        children = [_start("epoch", path, settings.batch_size, str(rank), str(world)) for rank in range(world)]
        told = [_told(child) for child in children]
        orders[world] = [one["order"] for one in told]
        figures[f"epoch_seconds_{world}"] = max(one["seconds"] for one in told)
        if any(one["seen"] != settings.rows for one in told):
            raise AssertionError(f"with {world} processes an epoch has {told} of {settings.rows} rows")
    if len({order for world in orders.values() for order in world}) != 1:
        raise AssertionError(f"processes read in other orders: {orders}")
    for name, figure in figures.items():
        print(f"{name:24} {figure:10,.2f}")
    print(f"worlds of {settings.processes}: every process sees each row once in an epoch, all in the same order")
    return figures


def _write(path: Path, rows: int) -> None:
    generator = random.Random(0)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for number in range(rows):
            words = generator.choices(_WORDS, k=24)
            parts = {
                "anchor": f"{number} {' '.join(words[:12])}.",
                "positive": f"{number} {' '.join(words[12:18])}.",
                "negative": f"{number} {' '.join(words[18:])}.",
            }
            file.write(json.dumps(parts) + "\n")
    temporary.replace(path)


def _start(*arguments: str | Path | int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def _told(child: subprocess.Popen[str]) -> dict[str, float]:
    out, _ = child.communicate()
    if child.returncode:
        raise RuntimeError(f"a measuring process ended with exit code {child.returncode}")
    told: dict[str, float] = json.loads(out.splitlines()[-1])
    return told


def _child(*arguments: str | Path | int) -> dict[str, float]:
    return _told(_start(*arguments))


def _memory() -> float:
    """Resident, in MB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1000


def _plan(data: Mixture, batch_size: int, rows: int) -> BatchPlan:
    run = TrainSettings(batch_size=batch_size, epochs=2, optimizer=OptimizerSettings(warmup=0))
    plan = BatchPlan(data.draws, run)
    assert plan.steps == 2 * -(-rows // batch_size)
    return plan


def _open(path: Path) -> Mixture:
    return load_mixture(DataSettings(path=str(path)), path.parent / "cache")


def _cold(path: Path, batch_size: int, rank: int, world: int) -> dict[str, float]:
    """Reads the file and writes the index."""
    return _warm(path, batch_size, rank, world)


def _warm(path: Path, batch_size: int, rank: int, world: int) -> dict[str, float]:
    """From nothing to the first batch, then a thousand batches."""
    memory, started = _memory(), time.perf_counter()
    data = _open(path)
    plan = _plan(data, batch_size, len(data))
    steps = plan.after(0)
    _, ((*indices,),) = next(steps)
    first = [data[index] for index in indices]
    seconds = time.perf_counter() - started
    assert len(first) == min(batch_size, len(data))
    started = time.perf_counter()
    count = 0
    for _, batches in steps:
        count += sum(len([data[index] for index in batch]) for batch in batches)
        if count >= 1000 * batch_size:
            break
    return {
        "first_batch_seconds": seconds,
        "examples_per_second": count / (time.perf_counter() - started),
        "memory_grown_mb": _memory() - memory,
    }


def _resume(path: Path, batch_size: int, rank: int, world: int) -> dict[str, float]:
    """The next batch of a run that stopped in the middle of its second epoch, once the data is open."""
    data = _open(path)
    plan = _plan(data, batch_size, len(data))
    done = plan.steps * 3 // 4
    started = time.perf_counter()
    _, (indices,) = next(plan.after(done))
    batch = [data[index] for index in indices]
    seconds = time.perf_counter() - started
    assert batch
    return {"seconds": seconds}


def _epoch(path: Path, batch_size: int, rank: int, world: int) -> dict[str, float]:
    """A whole epoch's rows, as this process reads them."""
    started = time.perf_counter()
    data = _open(path)
    digest, seen = hashlib.sha256(), bytearray(len(data))
    for epoch, batches in _plan(data, batch_size, len(data)).after(0):
        if epoch:
            break
        for batch in batches:
            for index in batch:
                example = data[index]
                digest.update(f"{index} {example}".encode())
                seen[index] += 1
    once = sum(count == 1 for count in seen)
    return {"order": int(digest.hexdigest()[:12], 16), "seen": once, "seconds": time.perf_counter() - started}


_CHILDREN: dict[str, Callable[[Path, int, int, int], dict[str, float]]] = {
    "cold": _cold,
    "warm": _warm,
    "resume": _resume,
    "epoch": _epoch,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, name, path, batch_size, rank, world = sys.argv
        print(json.dumps(_CHILDREN[name](Path(path), int(batch_size), int(rank), int(world))))
    else:
        main(tyro.cli(ScaleSettings, description=__doc__))
