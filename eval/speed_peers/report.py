"""From runs to medians, ratios, tables and a chart."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

OURS = "angle_llm"
GIB = 2**30
LOSS_TOLERANCE = 0.05
"""bfloat16 moves a loss of 2 by some hundredths, float32 by a millionth."""
LOWEST_COSINE = 0.99
QUIET_CORES = 0.1


@dataclass(frozen=True)
class Run:
    """One process: some training steps, or one pass over the texts."""

    problem: str | None = None
    """Why there is no figure; None if there is one."""
    seconds: float | None = None
    """Of a step (the median of its run), or of the pass."""
    peak_bytes: int = 0
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    cosine_min: float | None = None
    cosine_mean: float | None = None
    """Of this library's rows with ours."""
    other_cores: float | None = None
    """Cores that other programs kept busy meanwhile."""
    facts: dict[str, int] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """A library in a scenario, over its repetitions."""

    seconds: float
    per_second: float
    peak_gib: float
    ratio: float | None
    """Its time divided by ours, repetition by repetition: the median. None where ours has no figure."""
    ratio_min: float | None
    ratio_max: float | None


@dataclass
class Scenario:
    """One comparison: the same work for every library."""

    kind: str
    """train or encode."""
    title: str
    settings: dict[str, Any]
    unit: str
    """What is counted: triples, or texts."""
    units: int
    """How many a time covers."""
    runs: dict[str, list[Run]] = field(default_factory=dict)
    """Library → its repetitions, angle_llm first."""

    def summary(self, library: str) -> Summary | None:
        """None if no run of the library ended well."""
        ours = self.runs.get(OURS, [])
        times = [run.seconds for run in self.runs[library] if run.seconds is not None]
        if not times:
            return None
        pairs = zip(self.runs[library], ours, strict=False)
        ratios = [theirs.seconds / own.seconds for theirs, own in pairs if theirs.seconds and own.seconds]
        seconds = median(times)
        return Summary(
            seconds=seconds,
            per_second=self.units / seconds,
            peak_gib=max(run.peak_bytes for run in self.runs[library]) / GIB,
            ratio=median(ratios) if ratios else None,
            ratio_min=min(ratios) if ratios else None,
            ratio_max=max(ratios) if ratios else None,
        )

    def problem(self, library: str) -> str | None:
        """The first thing that went wrong."""
        return next((run.problem for run in self.runs[library] if run.problem), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        summaries = {library: self.summary(library) for library in self.runs}
        return {
            **asdict(self),
            "summary": {library: summary and asdict(summary) for library, summary in summaries.items()},
        }


def step_time(step_seconds: Sequence[float]) -> float:
    """The median without the first step, in which threads and memory wake up."""
    return median(step_seconds[1:] or step_seconds)


def cosines(rows_ND: np.ndarray, other_ND: np.ndarray) -> tuple[float, float]:
    """Lowest and mean cosine of the rows of one matrix with those of another."""
    if rows_ND.shape != other_ND.shape:
        raise ValueError(f"rows of shape {other_ND.shape} cannot be compared with rows of shape {rows_ND.shape}.")
    first, second = (
        rows / np.linalg.norm(rows, axis=1, keepdims=True)
        for rows in (rows_ND.astype(np.float64), other_ND.astype(np.float64))
    )
    values = (first * second).sum(axis=1)
    return float(values.min()), fmean(values.tolist())


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[column]) if column else cell.ljust(widths[0]) for column, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def text_report(scenarios: Sequence[Scenario]) -> str:
    """Every scenario as a table with what shows that the same was computed."""
    return "\n\n".join(scenario_report(scenario) for scenario in scenarios) + "\n"


def scenario_report(scenario: Scenario) -> str:
    time = "s/step" if scenario.kind == "train" else "s"
    rows = [["", time, f"{scenario.unit}/s", "peak GiB", "times ours", "min–max"]]
    if scenario.kind == "encode":
        rows[0] += ["cosine with ours: min", "mean"]
    problems = []
    for library, runs in scenario.runs.items():
        summary = scenario.summary(library)
        if summary is None:
            rows.append([library, "–", "–", "–", "–", "–"])
        else:
            row = [library, f"{summary.seconds:.2f}", f"{summary.per_second:.1f}", f"{summary.peak_gib:.1f}"]
            row += (
                ["–", "–"]
                if summary.ratio is None
                else [f"{summary.ratio:.2f}", f"{summary.ratio_min:.2f}–{summary.ratio_max:.2f}"]
            )
            last = next(run for run in reversed(runs) if run.problem is None)
            if last.cosine_min is not None:
                row += [f"{last.cosine_min:.6f}", f"{last.cosine_mean:.6f}"]
            rows.append(row)
        problem = scenario.problem(library)
        if problem:
            problems.append(f"{library}: {problem}")
    parts = [scenario.title, table(rows), *problems]
    if scenario.kind == "train":
        parts.append(losses_table(scenario))
    parts += notes(scenario)
    return "\n".join(parts)


def losses_table(scenario: Scenario) -> str:
    """The loss of every step side by side, from each library's first good run."""
    losses = {
        library: next((run.losses for run in runs if run.problem is None), [])
        for library, runs in scenario.runs.items()
    }
    steps = max(map(len, losses.values()), default=0)
    rows = [["loss of step", *losses]]
    for step in range(steps):
        rows.append([str(step + 1), *(f"{each[step]:.6f}" if step < len(each) else "–" for each in losses.values())])
    return table(rows)


def notes(scenario: Scenario) -> list[str]:
    """Whether the same was computed, and what about the texts lets figures differ, counted by our worker."""
    facts = next((run.facts for run in scenario.runs.get(OURS, []) if run.facts), {})
    lines = [f"NOT THE SAME WORK: {library}, {how}." for library, how in disagreements(scenario)]
    for library, runs in scenario.runs.items():
        others = max((run.other_cores or 0 for run in runs), default=0)
        if others > QUIET_CORES:
            lines.append(
                f"DISTURBED: while {library} ran, other programs kept up to {others:.1f} cores busy. Measure again."
            )
    if facts:
        lines.append(f"{facts['texts']:,} texts, {facts['unique_texts']:,} of them different.")
        if facts["too_long"]:
            lines.append(
                f"{facts['too_long']:,} longer than the maximum: the others cut off the prompt's end, angle_llm "
                "the text's, so rows and losses differ there."
            )
        if "computed_tokens" in facts:
            lines.append(
                f"angle_llm computed {facts['computed_tokens']:,} tokens for {facts['logical_tokens']:,} "
                "(different texts, no padding)."
            )
    return lines


def disagreements(scenario: Scenario) -> list[tuple[str, str]]:
    """Libraries whose first loss or vectors are too far from ours to be rounding, and how far."""
    found = []
    ours = next((run.losses for run in scenario.runs.get(OURS, []) if run.losses), [])
    for library, runs in scenario.runs.items():
        for run in runs:
            if ours and run.losses and abs(run.losses[0] - ours[0]) > LOSS_TOLERANCE:
                found.append((library, f"its first loss is {run.losses[0]:.4f}, ours {ours[0]:.4f}"))
            elif run.cosine_min is not None and run.cosine_min < LOWEST_COSINE:
                found.append((library, f"a vector of its has cosine {run.cosine_min:.4f} with ours"))
            else:
                continue
            break
    return found


def plot(scenarios: Sequence[Scenario], path: Path) -> None:
    """Each library's time as a multiple of ours, a group of bars for every scenario."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    libraries = list(dict.fromkeys(library for scenario in scenarios for library in scenario.runs))
    height = 0.8 / len(libraries)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.38 * len(libraries) * len(scenarios)), layout="constrained")
    colours = dict(zip(libraries, ("#1b6ca8", "#e07b39", "#6a994e", "#8d5a97"), strict=False))
    for group, scenario in enumerate(scenarios):
        for position, library in enumerate(scenario.runs):
            y = group + (position - (len(scenario.runs) - 1) / 2) * height
            summary = scenario.summary(library)
            if summary is None or summary.ratio is None:
                axes.text(0.02, y, f" {library}: {scenario.problem(library)}", va="center", fontsize=8)
                continue
            error = [[summary.ratio - (summary.ratio_min or 0)], [(summary.ratio_max or 0) - summary.ratio]]
            axes.barh(y, summary.ratio, height * 0.9, xerr=error, color=colours.get(library), ecolor="#444444")
            axes.text(
                summary.ratio_max or 0,
                y,
                f"  {summary.ratio:.2f}  ({summary.per_second:.1f} {scenario.unit}/s)",
                va="center",
                fontsize=8,
            )
    axes.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    axes.set_yticks(
        range(len(scenarios)), [scenario.title.replace(" · ", "\n", 1) for scenario in scenarios], fontsize=8
    )
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("time, as a multiple of angle_llm's (bar: median of repetitions, whisker: lowest and highest)")
    axes.legend(
        handles=[pyplot.Rectangle((0, 0), 1, 1, color=colours.get(library)) for library in libraries],
        labels=libraries,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(libraries),
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def packages(scenarios: Sequence[Scenario]) -> Mapping[str, Mapping[str, str]]:
    """Library → the versions its worker ran with."""
    found: dict[str, Mapping[str, str]] = {}
    for scenario in scenarios:
        for library, runs in scenario.runs.items():
            for run in runs:
                if run.packages:
                    found.setdefault(library, run.packages)
    return found
