"""Time and memory to read a large training file, and the order in which processes read it.

    python eval/data_scale.py --rows 1000000

Writes triples of random words and reads them as a training run does, without a model. Each measurement has its own
process.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import tyro

from angle_llm.config import DataSettings, OptimizerSettings, TrainSettings
from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.train.schedule import StepSchedule

WORDS = "amber basket canal early gently harbour island lantern meadow narrow orchard paper".split()  # noqa: SIM905


@dataclass(frozen=True)
class ScaleSettings:
    """What is measured."""

    rows: int = 1_000_000
    """Rows of the file."""
    batch_size: int = 64
    """Examples of a batch."""
    processes: tuple[int, ...] = (1, 2, 3)
    """World sizes to compare."""
    folder: Path | None = None
    """Folder of the file and its index. None: a temporary one."""


def main(settings: ScaleSettings) -> dict[str, float]:
    """Measure, print and return all figures by name."""
    with TemporaryDirectory() as temporary:
        folder = settings.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rows-{settings.rows}.jsonl"
        if not path.exists():
            write_rows(path, settings.rows)
        print(f"{path.stat().st_size / 1e6:,.0f} MB in {settings.rows:,} rows")
        figures: dict[str, float] = {}
        # cold: reads the file and writes the index; warm: reads the index.
        for name, measure in (("cold", first_batches), ("warm", first_batches), ("resume", resume)):
            (found,) = in_processes(1, measure, path, settings.batch_size)
            figures |= {f"{name}_{key}": value for key, value in found.items()}
        orders = set()
        for world in settings.processes:
            epochs = in_processes(world, whole_epoch, path, settings.batch_size)
            figures[f"epoch_seconds_{world}"] = max(one["seconds"] for one in epochs)
            orders |= {(one["order"], one["seen"]) for one in epochs}
    if len(orders) != 1 or next(iter(orders))[1] != settings.rows:
        raise AssertionError(f"expected all {settings.rows} rows in the same order, got (order, rows) {orders}")
    for name, figure in figures.items():
        print(f"{name:24} {figure:10,.2f}")
    print("every process reads each row once in an epoch, all in the same order")
    return figures


def in_processes(
    count: int, measure: Callable[[Path, int], dict[str, float]], path: Path, batch_size: int
) -> list[dict[str, float]]:
    """Return the results of a function in new processes that run at the same time."""
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(measure, [path] * count, [batch_size] * count))


def write_rows(path: Path, rows: int) -> None:
    """Write triples of random words, distinct by their number."""
    generator = random.Random(0)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for number in range(rows):
            words = generator.choices(WORDS, k=24)
            texts = (f"{number} {' '.join(part)}." for part in (words[:12], words[12:18], words[18:]))
            file.write(json.dumps(dict(zip(("anchor", "positive", "negative"), texts, strict=True))) + "\n")
    temporary.replace(path)


def open_data(path: Path, batch_size: int) -> tuple[Mixture, StepSchedule]:
    """Return the data and the batches of two epochs."""
    data = load_mixture(DataSettings(path=str(path)), path.parent / "cache")
    run = TrainSettings(batch_size=batch_size, epochs=2, optimizer=OptimizerSettings(warmup=0))
    return data, StepSchedule(data.draws, run)


def first_batches(path: Path, batch_size: int) -> dict[str, float]:
    """Return the seconds to the first batch, examples per second of the next thousand batches, and memory growth."""
    process = psutil.Process()
    memory, started = process.memory_info().rss, time.perf_counter()
    data, plan = open_data(path, batch_size)
    steps = plan.after(0)
    _, ((*indices,),) = next(steps)
    first = [data[index] for index in indices]
    seconds = time.perf_counter() - started
    assert len(first) == min(batch_size, len(data))
    started, count = time.perf_counter(), 0
    for _, batches in steps:
        count += sum(len([data[index] for index in batch]) for batch in batches)
        if count >= 1000 * batch_size:
            break
    rate = count / (time.perf_counter() - started)
    grown = (process.memory_info().rss - memory) / 1e6
    return {"first_batch_seconds": seconds, "examples_per_second": rate, "memory_grown_mb": grown}


def resume(path: Path, batch_size: int) -> dict[str, float]:
    """Return the seconds to the next batch of a run that stopped in the second epoch."""
    data, plan = open_data(path, batch_size)
    started = time.perf_counter()
    _, (indices,) = next(plan.after(plan.steps * 3 // 4))
    assert [data[index] for index in indices]
    return {"seconds": time.perf_counter() - started}


def whole_epoch(path: Path, batch_size: int) -> dict[str, float]:
    """Return the seconds of an epoch, a hash of its rows in their order, and the number of rows seen once."""
    started = time.perf_counter()
    data, plan = open_data(path, batch_size)
    digest, seen = hashlib.sha256(), bytearray(len(data))
    for epoch, batches in plan.after(0):
        if epoch:
            break
        for index in (index for batch in batches for index in batch):
            digest.update(f"{index} {data[index]}".encode())
            seen[index] += 1
    order = int(digest.hexdigest()[:12], 16)
    return {"order": order, "seen": seen.count(1), "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main(tyro.cli(ScaleSettings, description=__doc__))
