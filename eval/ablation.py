"""Train and measure the rows of a grid of experiments, and add the measurements to docs/results.csv.

    python eval/ablation.py --grid eval/grids/ablation.yaml --data-dir DATA
    python eval/ablation.py --grid eval/grids/nli.yaml --data-dir DATA --rows in-batch --seeds 42
    python eval/ablation.py --grid eval/grids/ablation.yaml --data-dir DATA --list

A grid is a YAML file whose rows differ only in the settings they name; see `ablation_parts/grid.py`. After a kill the same
command resumes: training continues from its last checkpoint, and nothing in the results file is measured again. `make
report` draws the results.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro
import yaml
from ablation_parts.grid import RUNS, Experiment, Grid, changed, experiments, load_grid
from ablation_parts.measure import encoder_options, measure
from ablation_parts.results import (
    SCORES,
    Line,
    Measurement,
    Results,
    differences,
    key_of,
    line_of,
    load_cached,
    measurement,
)
from commit import commit
from filelock import FileLock

from angle_llm import fine_tune
from angle_llm.cli import run_cli
from angle_llm.io import write_text
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.parsing import SettingsError
from angle_llm.train.run_folder import RESULT

COMMAND = "python eval/ablation.py --grid eval/grids/{}.yaml --data-dir DATA --rows {}"
PACKAGES = ("angle_llm", "torch", "transformers", "peft", "accelerate", "scipy")


class ExperimentError(RuntimeError):
    """An experiment cannot run: its folder or results belong to other settings, or a model is missing."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train and measure the experiments of a grid that have no result yet."""

    grid: Path
    """Grid file, such as eval/grids/ablation.yaml."""
    data_dir: Path
    """Folder that replaces DATA/ in the paths of the grid."""
    results: Path = Path("docs/results.csv")
    """Results file. runs.csv in the same folder holds the settings, command, commit and date of each run. For another
    name than results.csv, such as new.csv, its name is new.runs.csv."""
    runs: Path = Path("runs")
    """Folder of the trained models: RUNS/GRID/ROW-seedN."""
    rows: tuple[str, ...] = ()
    """Run only these rows of the grid."""
    seeds: tuple[int, ...] = ()
    """Run only these seeds."""
    device: str | None = None
    """Device for the measurements. None: the best available."""
    again: bool = False
    """Measure the selected rows again. A row is trained again only if its model is not in RUNS."""
    list: bool = False
    """Print which experiments have a result, and exit."""


def main(settings: Settings) -> None:
    """Train and measure the selected experiments of a grid (a row with a seed) one after another.

    Raises:
        SettingsError: if the grid or the settings of a row are invalid; nothing has run then.
        ExperimentError: at the end, if experiments could not run; finished experiments keep their results.
    """
    data_dir = settings.data_dir.expanduser().resolve()
    if not data_dir.is_dir():
        raise SettingsError(
            f"--data-dir: expected a folder, got {settings.data_dir}. docs/evaluation.md lists the files in it."
        )
    grid = load_grid(settings.grid)
    every = experiments(grid, data_dir)
    selected = experiments(grid, data_dir, settings.rows, settings.seeds)
    # The commit is read before training, because the checkout may change during training.
    results, made_by = Results(settings.results), commit()
    errors = []
    for number, one in enumerate(selected, 1):
        known = results.of(one.key)[1]
        missing = missing_kinds(one, known)
        changes = other_settings(one, known)
        if settings.list:
            state = f"missing: {', '.join(missing)}" if missing else "has a result"
            print(f"{one.name:40} {'has a result with other settings: ' + ', '.join(changes) if changes else state}")
            continue
        print(f"[{number}/{len(selected)}] {grid.name}: {one.name}", flush=True)
        if settings.again or missing or changes:
            try:
                run_experiment(grid, one, settings, data_dir, results, made_by)
            except (RuntimeError, ValueError, OSError, FloatingPointError) as error:
                errors.append(f"{one.name}: {error}")
                print(f"  did not run: {error}", flush=True)
            compare(every, settings, results)
    if errors:
        raise ExperimentError("\n".join([f"{len(errors)} of {len(selected)} experiments did not run.", *errors]))


def run_experiment(
    grid: Grid, one: Experiment, settings: Settings, data_dir: Path, results: Results, made_by: str
) -> None:
    """Train an experiment (a row of a grid with a seed), measure the model, and write the results after each kind."""
    lines, known = ([], None) if settings.again else results.of(one.key)
    if other := other_settings(one, known):
        raise ExperimentError(
            f"{settings.results} has results of {one.name} of grid {grid.name} with other settings: {', '.join(other)}. "
            "Rename the row, or remove its folder in --runs and use --again."
        )
    path, how = one.settings.model.path, {}
    if one.is_trained:
        model = str(train(grid, one, settings, data_dir))
    else:
        model = model_path(path, settings)
        how = encoder_options(one.settings.model)
    metrics = Path(model).with_name("metrics.jsonl")
    facts = training_facts(metrics) if one.is_trained or metrics.is_file() else []  # a merged model has none
    before = [(line["metric"], line["value"]) for line in lines if line["kind"] == "training"]
    if before != [(line["metric"], line["value"]) for line in map(line_of, facts)]:
        known = None  # the model was trained again, and all measurements of a run must be of the same model
    missing, done = missing_kinds(one, known), recorded_kinds(known)
    encoder = SentenceEncoder.from_pretrained(model, device=settings.device, **how)
    run = {
        "label": one.label,
        "date": datetime.now(timezone.utc).date().isoformat(),
        # A measurement that is added later has its commit and machine after the earlier ones.
        "commit": joined(known, "commit", made_by),
        "machine": joined(known, "machine", machine()),
        "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "command": COMMAND.format(grid.name, one.row) + ("" if one.seed is None else f" --seeds {one.seed}"),
        "settings": one_line(one.given),
    }
    for kind in missing:
        print(f"  measuring {kind}", flush=True)
        found = measure(encoder, one.measures, kind, data_dir, folder(one, settings) / SCORES)
        done |= {kind: one.stated[kind]}
        results.record(one.key, run | {"measures": one_line(done)}, [*facts, *found])


def joined(known: Line | None, column: str, value: str) -> str:
    """Return the values of a column in the earlier line of a run, and `value`, each once, separated by `; `."""
    before = known[column].split("; ") if known else []
    return "; ".join(filter(None, dict.fromkeys([*before, value])))


def one_line(values: dict[str, Any]) -> str:
    """Format a dictionary as a line of YAML."""
    text: str = yaml.safe_dump(values, default_flow_style=True, width=1 << 20, sort_keys=False)
    return text.strip()


def compare(every: Sequence[Experiment], settings: Settings, results: Results) -> None:
    """Write the differences between the measured rows of a grid and their reference rows to the results file."""
    measured, runs = results.read()
    by_key = {key_of(run): run for run in runs}
    current = [one for one in every if one.key in by_key and not other_settings(one, by_key[one.key])]
    cached = {one.key: load_cached(folder(one, settings)) for one in current}
    of_grid = [line for line in measured if line["grid"] == every[0].grid]
    results.replace_differences(every[0].grid, set(cached), differences(current, of_grid, cached))


def other_settings(one: Experiment, known: Line | None) -> list[str]:
    """Return the names of the settings that differ between an experiment and its line in runs.csv."""
    return changed(yaml.safe_load(known["settings"]), one.given) if known else []


def recorded_kinds(known: Line | None) -> dict[str, Any]:
    """Return the kinds of measurement recorded for a run in runs.csv: kind (such as sts) → its tasks and data."""
    return dict(yaml.safe_load(known["measures"])) if known else {}


def missing_kinds(one: Experiment, known: Line | None) -> list[str]:
    """Return the kinds of measurement (such as sts) that are not recorded for the tasks and data of the grid."""
    done = recorded_kinds(known)
    return [kind for kind, what in one.stated.items() if done.get(kind) != what]


def folder(one: Experiment, settings: Settings) -> Path:
    """Return the run directory of an experiment, RUNS/GRID/ROW-seedN."""
    return settings.runs / one.grid / one.name


def model_path(path: str, settings: Settings) -> str:
    """Return the path or name of a model; replace the prefix `RUNS/` by the folder of trained models.

    Raises:
        ExperimentError: if a model in `RUNS/` does not exist.
    """
    found = settings.runs / path.removeprefix(RUNS)
    if not path.startswith(RUNS):
        return path
    if not found.is_dir():
        row = re.fullmatch(rf"{RUNS}([^/]+)/([^/]+)-seed(\d+)/model", path)
        how = f" Train it first: {COMMAND.format(row[1], row[2])} --seeds {row[3]}" if row else ""
        raise ExperimentError(f"{found}: expected a model that a row of a grid trains, or a merge of such models.{how}")
    return str(found.resolve())


def train(grid: Grid, one: Experiment, settings: Settings, data_dir: Path) -> Path:
    """Train an experiment, after its earlier stages, and return the model folder.

    Training resumes from the last checkpoint. A finished run is not trained again.

    Raises:
        ExperimentError: if the run directory holds a run with other settings.
        Interrupted: after SIGINT, SIGTERM or SIGHUP, when the checkpoint is written.
    """
    here = folder(one, settings)
    if one.after is None:
        base = model_path(one.settings.model.path, settings)
    else:
        (before,) = experiments(grid, data_dir, [one.after], [one.seed or 0])
        base = str(train(grid, before, settings, data_dir).resolve())
    model = replace(one.settings.model, path=base)
    run = replace(one.settings, run_dir=str(here), resume="auto", model=model)
    if not run.checkpoint.every_steps:
        run = replace(run, checkpoint=replace(run.checkpoint, every_steps=25, keep=1))
    given = here / "given.json"
    here.mkdir(parents=True, exist_ok=True)
    with FileLock(here / ".lock"):  # another program may train the same first stage
        if given.is_file() and (other := changed(json.loads(given.read_text(encoding="utf-8")), one.given)):
            raise ExperimentError(f"{here} holds a run with other settings: {', '.join(other)}. Remove that folder.")
        if (here / "model").is_dir() and (here / RESULT).is_file():
            return here / "model"
        if (teacher := run.objective.teacher) is not None:
            run = replace(run, objective=replace(run.objective, teacher=model_path(teacher, settings)))
        write_text(given, json.dumps(one.given))
        print(f"  training {one.name}", flush=True)
        fine_tune(run)
    return here / "model"


def training_facts(metrics: Path) -> list[Measurement]:
    """Return steps, seconds, computed tokens, and the mean loss of the first and last tenth from a metrics file."""
    steps = pd.read_json(metrics, lines=True).dropna(subset="loss")
    tenth = max(1, len(steps) // 10)
    facts = {
        "steps": len(steps),
        "seconds": float(steps.seconds.sum()),
        "first loss": float(steps.loss[:tenth].mean()),
        "last loss": float(steps.loss[-tenth:].mean()),
        "computed tokens": int(steps.computed_tokens.sum()),
    }
    return [measurement("training", "", metric, value) for metric, value in facts.items()]


def machine() -> str:
    """Return the number and name of the GPUs, or the CPU threads and the name of the processor."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cpu = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpu.read_text(encoding="utf-8")) if cpu.is_file() else []
    return f"{torch.get_num_threads()} CPU thread(s), {(names or [platform.machine()])[0]}"


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Settings, description=__doc__)))
