"""The runs of several libraries on the same job, their summary, and warnings about different work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from speed_peers.processes import GIB, OURS, Run

LOSS_TOLERANCE = 0.05
"""Largest difference of the first loss between libraries; bfloat16 changes a loss of 2 by some hundredths."""
LOWEST_COSINE = 0.99
"""Smallest cosine between the vectors of two libraries for the same text."""
QUIET_CORES = 0.1
"""Largest use of CPU cores by other programs that does not disturb a measurement."""
COLUMNS = {
    "seconds": "{:.2f} s",
    "per_second": "{:.2f} per s",
    "peak_gib": "{:.2f} GiB",
    "ratio": "{:.2f} times angle_llm",
    "ratio_min": "least {:.2f}",
    "ratio_max": "most {:.2f}",
    "cosine_min": "cosine {:.6f}",
}
"""Value in the summary of a library → its format in the text report."""


@dataclass
class PeerComparison:
    """A training or encoding job, and the runs of each library on this job."""

    title: str
    unit: str
    """Unit of work: triples or texts."""
    units: int
    """Number of units in a measured time."""
    job: dict[str, Any]
    libraries: list[str]
    """Libraries to compare; angle_llm is the first."""
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def summary(self, library: str) -> dict[str, float]:
        """Return times, memory and ratios of a library, by the names in `COLUMNS`; empty if no run has a time.

        Ratios are times divided by the time of angle_llm in the same repetition.
        """
        times = [run.seconds for run in self.runs[library] if run.seconds]
        if not times:
            return {}
        peak = max(run.peak_bytes for run in self.runs[library]) / GIB
        found = {"seconds": median(times), "per_second": self.units / median(times), "peak_gib": peak}
        pairs = zip(self.runs[library], self.runs.get(OURS, ()), strict=False)
        if ratios := [run.seconds / ours.seconds for run, ours in pairs if run.seconds and ours.seconds]:
            found |= {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        cosines = [run.cosine_min for run in self.runs[library] if run.cosine_min is not None]
        return found | ({"cosine_min": min(cosines)} if cosines else {})

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values, without texts and absolute paths."""
        job = {k: without_folder(v) for k, v in self.job.items() if k not in ("triples", "texts")}
        return {
            **asdict(self),
            "job": job,
            "summary": {library: self.summary(library) or None for library in self.runs},
        }

    def report(self) -> str:
        """Return times, losses and notes of a comparison as text."""
        lines = [self.title]
        for library in self.runs:
            found = self.summary(library)
            lines.append(f"  {library:22}" + ", ".join(COLUMNS[name].format(value) for name, value in found.items()))
        losses = [(library, run.losses) for library, runs in self.runs.items() for run in runs[:1] if run.losses]
        lines += [f"  {library:22}losses {', '.join(f'{loss:.6f}' for loss in values)}" for library, values in losses]
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> list[str]:
        """Return failed runs, warnings about different work and busy machines, and numbers of texts and tokens."""
        lines = []
        ours = next((run.losses for run in self.runs.get(OURS, ()) if run.losses), None)
        for library, runs in self.runs.items():
            lines += [f"{library}: {run.problem}" for run in runs if run.problem][:1]
            losses = next((run.losses for run in runs if run.losses), None)
            if ours and losses and abs(losses[0] - ours[0]) > LOSS_TOLERANCE:
                lines.append(
                    f"NOT THE SAME WORK: the first loss of {library} is {losses[0]:.4f}, of angle_llm {ours[0]:.4f}."
                )
            if (cosine := self.summary(library).get("cosine_min", 1.0)) < LOWEST_COSINE:
                lines.append(
                    f"NOT THE SAME WORK: a vector of {library} has cosine {cosine:.4f} with the vector of angle_llm."
                )
            if (cores := max((run.other_cores for run in runs), default=0.0)) > QUIET_CORES:
                lines.append(
                    f"DISTURBED: other programs used up to {cores:.1f} cores while {library} ran. Measure again."
                )
        facts = next((run.facts for run in self.runs.get(OURS, ()) if run.facts), {})
        if facts:
            lines.append(f"{facts['texts']:,} texts, {facts['unique_texts']:,} of them unique.")
        if too_long := facts.get("too_long"):
            lines.append(f"{too_long:,} texts are too long: the others cut the end of the prompt, angle_llm the text.")
        if "computed_tokens" in facts:
            lines.append(f"angle_llm computed {facts['computed_tokens']:,} of {facts['logical_tokens']:,} tokens.")
        return lines


def without_folder(value: Any) -> Any:
    """Return the last part of an absolute path; return other values unchanged."""
    return Path(value).name if isinstance(value, str | Path) and Path(value).is_absolute() else value
