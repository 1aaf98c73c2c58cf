"""Tables and a plot of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from speed_peers.processes import GIB, OURS, Run

LOSS_TOLERANCE = 0.05  # bfloat16 changes a loss of 2 by some hundredths, float32 by a millionth
LOWEST_COSINE = 0.99
QUIET_CORES = 0.1


@dataclass
class Comparison:
    """The same job for several libraries, and their runs."""

    title: str
    unit: str
    """triples or texts."""
    units: int
    """Number of units per time."""
    job: dict[str, Any]
    libraries: list[str]
    """angle_llm first."""
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def summary(self, library: str) -> dict[str, float] | None:
        """Median time, units per second, peak GiB, and the time divided by ours, repetition by repetition."""
        times = [run.seconds for run in self.runs[library] if run.seconds]
        if not times:
            return None
        peak = max(run.peak_bytes for run in self.runs[library]) / GIB
        found = {"seconds": median(times), "per_second": self.units / median(times), "peak_gib": peak}
        pairs = zip(self.runs[library], self.runs.get(OURS, ()), strict=False)
        ratios = [run.seconds / ours.seconds for run, ours in pairs if run.seconds and ours.seconds]
        spread = {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)} if ratios else {}
        cosines = [run.cosine_min for run in self.runs[library] if run.cosine_min is not None]
        return found | spread | ({"cosine_min": min(cosines)} if cosines else {})

    def problem(self, library: str) -> str | None:
        """The first problem of a library."""
        return next((run.problem for run in self.runs[library] if run.problem), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without texts and the folders of this machine."""
        job = {k: without_folder(v) for k, v in self.job.items() if k not in ("triples", "texts")}
        summaries = {library: self.summary(library) for library in self.runs}
        return {**asdict(self), "job": job, "summary": summaries}


def without_folder(value: Any) -> Any:
    """The last part of an absolute path; other values unchanged."""
    return Path(value).name if isinstance(value, str | Path) and Path(value).is_absolute() else value


def text_report(comparison: Comparison) -> str:
    """Times, losses and notes of a comparison."""
    each = "s/step" if comparison.job["kind"] == "train" else "s"
    rows = [["", each, f"{comparison.unit}/s", "peak GiB", "times ours", "min–max", "smallest cosine"]]
    for library in comparison.runs:
        found = comparison.summary(library) or {}
        cells = [
            f"{found[name]:.2f}" if name in found else "–" for name in ("seconds", "per_second", "peak_gib", "ratio")
        ]
        spread = f"{found['ratio_min']:.2f}–{found['ratio_max']:.2f}" if "ratio" in found else "–"
        rows.append([library, *cells, spread, f"{found['cosine_min']:.6f}" if "cosine_min" in found else "–"])
    parts = [comparison.title, _table(rows)]
    losses = {
        library: next((run.losses for run in runs if run.losses), []) for library, runs in comparison.runs.items()
    }
    if steps := max(map(len, losses.values()), default=0):
        lines = [
            [f"{each[step]:.6f}" if step < len(each) else "–" for each in losses.values()] for step in range(steps)
        ]
        parts.append(_table([["loss of step", *losses], *([str(step), *line] for step, line in enumerate(lines, 1))]))
    return "\n".join([*parts, *notes(comparison)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def notes(comparison: Comparison) -> list[str]:
    """Problems, other results than ours, disturbances, and numbers of texts and tokens."""
    lines = []
    ours = next((run.losses for run in comparison.runs.get(OURS, ()) if run.losses), None)
    for library, runs in comparison.runs.items():
        if problem := comparison.problem(library):
            lines.append(f"{library}: {problem}")
        losses = next((run.losses for run in runs if run.losses), None)
        if ours and losses and abs(losses[0] - ours[0]) > LOSS_TOLERANCE:
            lines.append(f"NOT THE SAME WORK: the first loss of {library} is {losses[0]:.4f}, ours {ours[0]:.4f}.")
        if (cosine := (comparison.summary(library) or {}).get("cosine_min", 1.0)) < LOWEST_COSINE:
            lines.append(f"NOT THE SAME WORK: a vector of {library} has cosine {cosine:.4f} with ours.")
        if (cores := max((run.other_cores for run in runs), default=0.0)) > QUIET_CORES:
            lines.append(f"DISTURBED: other programs used up to {cores:.1f} cores while {library} ran. Measure again.")
    facts = next((run.facts for run in comparison.runs.get(OURS, ()) if run.facts), {})
    if facts:
        lines.append(f"{facts['texts']:,} texts, {facts['unique_texts']:,} of them unique.")
    if facts.get("too_long"):
        lines.append(
            f"{facts['too_long']:,} texts are too long: the others cut the end of the prompt, angle_llm the text."
        )
    if "computed_tokens" in facts:
        lines.append(f"angle_llm computed {facts['computed_tokens']:,} of {facts['logical_tokens']:,} tokens.")
    return lines


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the time of each library as a multiple of ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    libraries = list(dict.fromkeys(library for comparison in comparisons for library in comparison.runs))
    height = 0.8 / len(libraries)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.4 * len(libraries) * len(comparisons)), layout="constrained")
    for position, library in enumerate(libraries):
        found = [(each.summary(library) if library in each.runs else None) or {} for each in comparisons]
        drawn = [(place, each) for place, each in enumerate(found) if "ratio" in each]
        y = [place + position * height for place, _ in drawn]
        ratios = [each["ratio"] for _, each in drawn]
        error = [
            [each[end] * sign - each["ratio"] * sign for _, each in drawn]
            for end, sign in (("ratio_min", -1), ("ratio_max", 1))
        ]
        axes.barh(y, ratios, height * 0.9, xerr=error, label=library)
        for place, (_, each) in zip(y, drawn, strict=True):
            axes.text(each["ratio_max"], place, f"  {each['ratio']:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(comparisons)), [each.title.replace(" · ", "\n", 1) for each in comparisons], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time as a multiple of angle_llm's; bar: median of the repetitions, whisker: smallest and largest")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(libraries), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
