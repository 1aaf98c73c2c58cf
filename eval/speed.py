"""How fast is it, beside others? The same work by angle_llm, angle-emb and sentence-transformers, on the CPU.

python eval/speed.py --json speed.json --plot speed.png
python eval/speed.py --train --batch 16 64 --data DATA/nli/nli_triplets.jsonl.gz
python eval/speed.py --encode --data-dir DATA --peers sentence-transformers

Each library works through its own public way, in a process and an environment of its own (made once, by pip), on the same
weights, rows, order, prompt, adapter and objective; losses and vectors are compared, so that it shows that they compute
the same. One process runs at a time, and repetitions take turns.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tyro
from speed_peers.comparisons import Comparison, SpeedSettings, plan, without_folder
from speed_peers.environments import ensure_environment
from speed_peers.report import OURS, Scenario, packages, plot, scenario_report, text_report
from speed_peers.workers import run_worker

from angle_llm.cli import guarded
from angle_llm.io import write_json


def main(settings: SpeedSettings) -> list[Scenario]:
    """Makes what is missing, waits for quiet, measures, and reports."""
    if settings.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib.")
    for target in (settings.json, settings.plot):
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
    workdir = settings.workdir.expanduser().resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / ".gitignore").write_text("*\n")
    pythons = {OURS: Path(sys.executable)}
    pythons |= {peer: ensure_environment(peer, workdir) for peer in settings.peers}

    comparisons = plan(settings, workdir)
    wait_until_quiet(settings.max_load, settings.patience)
    done: list[Scenario] = []
    for comparison in comparisons:
        measure(comparison, settings, pythons, workdir)
        done.append(comparison.scenario)
        print(f"\n{scenario_report(comparison.scenario)}\n", flush=True)
        if settings.json is not None:  # after each: what was measured is kept if something stops the rest
            write_json(settings.json, results_dict(done, settings))
    print("=" * 20 + f"\n\n{text_report(done)}", end="")
    if settings.plot is not None:
        plot(done, settings.plot)
    return done


def measure(comparison: Comparison, settings: SpeedSettings, pythons: dict[str, Path], workdir: Path) -> None:
    """Runs the libraries in turn, repetition by repetition, so that what drifts drifts for all."""
    runs = comparison.scenario.runs
    runs.update({library: [] for library in comparison.libraries})
    print(comparison.scenario.title, flush=True)
    for repetition in range(settings.repetitions):
        with tempfile.TemporaryDirectory(dir=workdir, prefix="run-") as folder:
            for library in comparison.libraries:
                if any(run.problem for run in runs[library]):
                    continue  # it would fail again, after as long
                place = f"  {repetition + 1}/{settings.repetitions} {library}"
                print(f"{place} …", flush=True)
                run = run_worker(library, pythons[library], comparison.job, Path(folder), workdir, settings.max_gib)
                runs[library].append(run)
                print(f"{place}: {run.problem or f'{run.seconds:.2f} s'}", flush=True)


def wait_until_quiet(max_load: float, patience: int) -> None:
    """Two programs at once on few cores slow each other up to tenfold: such figures say nothing.

    Raises:
        RuntimeError: if the load does not fall in time.
    """
    if not hasattr(os, "getloadavg"):
        return
    started = time.monotonic()
    told = False
    while (load := os.getloadavg()[0]) > max_load:
        if time.monotonic() - started >= patience:
            raise RuntimeError(
                f"the machine is busy: load average {load:.2f}, and only {max_load} is allowed while measuring. Wait, or "
                "take --max-load 99 for figures that say little."
            )
        if not told:
            print(f"waiting for the machine to be quiet (load average {load:.2f}, wanted {max_load})", flush=True)
            told = True
        time.sleep(2)


def results_dict(scenarios: Sequence[Scenario], settings: SpeedSettings) -> dict[str, Any]:
    """Everything, as plain JSON values."""
    return {
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "packages": packages(scenarios),
        "settings": {name: without_folder(value) for name, value in asdict(settings).items()},
        "scenarios": [scenario.as_dict() for scenario in scenarios],
    }


def processor() -> str:
    """The model's name, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    guarded(lambda: main(tyro.cli(SpeedSettings, description=__doc__)))
