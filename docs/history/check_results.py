"""Check that docs/results.csv and docs/runs.csv hold every number of the tables of docs/RESULTS.md at the tag `before-redesign`.

    PYTHONPATH=eval:. python docs/history/check_results.py

A number of a table row is found if, rounded to its decimals, it equals a measurement of the same grid, row and seed, or a value
that eval/report.py derives from them (mean, deviation, interval over seeds, time ratio). Settings are looked up in runs.csv, then
in the defaults of a training run. Prose is not checked: it is the text of recipes/grids and of the report's own sentences.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import report
import yaml

from angle_llm.config import TrainSettings, settings_to_dict

NUMBER = re.compile(r"(?<![\w.])[+−]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?!\w)")
TASKS = {
    "STS12": "sts12",
    "STS14": "sts14",
    "STS15": "sts15",
    "STS-B dev": "stsb-dev",
    "STS-B": "stsb",
    "SICK-R": "sickr",
}
FIVE = ("sts12", "sts14", "sts15", "stsb", "sickr")
TRANSFER = ("mr", "cr", "sst2", "trec", "mrpc")
WORDS = {"seed", "seeds", "set", "text", "figure", "row", "date", "machine", "measured on", "library"}


def tables(text: str) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Section, heading, column names and cells of every table row."""
    section, heading, columns = "", "", []
    for line in text.splitlines():
        if line.startswith("## "):
            section = heading = line[3:]
        elif line.startswith("### "):
            heading = line[4:]
        elif not line.startswith("|"):
            columns = []
        else:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not columns:
                columns = cells
            elif not set(cells[0]) <= {"-", ":"}:
                yield section, heading, columns, cells


def tokens(cells: Iterable[str]) -> list[tuple[float, int]]:
    """Numbers as value and decimals."""
    found = [token.rstrip(",").replace(",", "").replace("−", "-") for cell in cells for token in NUMBER.findall(cell)]
    return [(float(token), len(token.partition(".")[2]) if "e" not in token else 12) for token in found]


def holds(values: set[float], number: float, decimals: int) -> bool:
    half = 0.5 * 10.0**-decimals
    return any(abs(value - number) <= half * 1.001 + 1e-9 for value in values)


def flat(values: Any, under: str = "") -> dict[str, Any]:
    if isinstance(values, list):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        return {under: values}
    return {k: v for key, item in values.items() for k, v in flat(item, f"{under}.{key}".strip(".")).items()}


def at_tag(path: str) -> str:
    command = ["git", "show", f"before-redesign:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Check:
    """What the new files hold, by grid, row and seed."""

    def __init__(self) -> None:
        self.measured, self.runs = report.read(Path("docs/results.csv"))
        self.summary = report.summarise(self.measured, self.runs)
        names = [path.stem for path in Path("recipes/grids").glob("*.yaml")]
        self.titles = {yaml.safe_load(at_tag(f"recipes/grids/{name}.yaml"))["title"]: name for name in names}

    def rows(self, grid: str, label: str) -> set[str]:
        plain = re.sub(r" \((the reference|a reference|against: .*)\)$", "", label)
        runs = self.runs[(self.runs.grid == grid) & (self.runs.label == plain)]
        return set(runs.row)

    def values(self, grid: str, rows: set[str], seed: str | None) -> set[float]:
        of = self.measured[(self.measured.grid == grid) & self.measured.row.isin(rows)]
        if seed not in (None, "mean"):
            of = of[of.seed == ("" if seed == "none" else seed)]
        found = set(of[["value", "low", "high", "n", "p"]].to_numpy().ravel())
        if seed in (None, "mean"):
            derived = self.summary[(self.summary.grid == grid) & self.summary.row.isin(rows)]
            found |= set(derived[["value", "sd", "low", "high", "seeds"]].to_numpy().ravel())
        return {value for value in found if value == value}

    def settings(self, grid: str, rows: set[str]) -> set[float]:
        found = set()
        for run in self.runs[(self.runs.grid == grid) & self.runs.row.isin(rows)].itertuples():
            found |= set(flat(yaml.safe_load(run.settings)).values())
        return {float(value) for value in found if isinstance(value, int | float)}


def main() -> None:
    text = subprocess.run(
        ["git", "show", "before-redesign:docs/RESULTS.md"], capture_output=True, text=True, check=True
    ).stdout
    check, counts, missing = Check(), Counter[str](), []
    defaults = {float(v) for v in flat(settings_to_dict(TrainSettings())).values() if isinstance(v, int | float)}
    grid, group = "", ""
    for section, heading, columns, cells in tables(text):
        label, seed = cells[0], None
        words = {i for i, column in enumerate(columns) if i == 0 or column in WORDS}
        numbers = [cell for i, cell in enumerate(cells) if i not in words]
        kind = "measurements"
        if section in check.titles:
            grid = check.titles[section]
        if heading == "What has been run" or section == "Overview":
            counts["overview: counts of experiments, from grids and runs.csv"] += len(tokens(numbers))
            continue
        if label.startswith("**"):
            group = label
            if section == "What the comparisons show":
                grid = next(name for title, name in check.titles.items() if label.startswith(f"**{title}"))
                said = label.rpartition("” on ")[2]
                labels = label.partition("beside “")[2].partition("”")[0]
                named = [
                    TASKS.get(part, part) for part in re.split(", ", re.sub(r", [\d.]+.*|mean of |the ", "", said))
                ]
                of = check.measured[
                    (check.measured.grid == grid)
                    & check.measured.row.isin(check.rows(grid, labels))
                    & check.measured.task.isin(named)
                    & (check.measured.metric == "spearman")
                    & (check.measured.kind == "sts")
                ]
                means = of.groupby("seed").value.mean()
                values = {means.mean(), means.std()}
                label_numbers = [said.rpartition(", ")[2]]
                for number, decimals in tokens(label_numbers):
                    counts["measurements, derived: mean of the reference"] += 1
                    if not holds(values, number, decimals):
                        missing.append((section, label, number))
            continue
        published = "published" in group and section in check.titles and heading in ("STS", "Transfer")
        if heading.startswith("Published") or section == "Published figures" or published:
            kind = "published values"
            of = check.measured[
                (check.measured.grid == "published") & check.measured.row.isin(check.rows("published", label))
            ]
            of = of[of.kind == "published"]
            sets = of[of.text == "senteval"].set_index("task").value
            values = set(of.value) | {
                sets[sets.index.isin(names)].mean() for names in (FIVE, ("stsb", "sickr"), TRANSFER)
            }
        elif section == "How long the texts are":
            values = check.values("lengths", {label}, "")
        elif section == "Speed beside other libraries":
            of = check.measured[(check.measured.task == heading) & (check.measured.row == label.partition(" (no")[0])]
            seconds = of[of.metric == "seconds"]
            middle = median(seconds.value.dropna()) if seconds.value.notna().any() else 0
            ratios = check.summary[(check.summary.task == heading) & (check.summary.row == label)]
            values = {middle, seconds.n.iloc[0] / middle if middle else 0, *of[of.metric == "peak GiB"].value}
            values |= set(ratios[["value", "low", "high"]].to_numpy().ravel())
            numbers = [cell for cell in numbers if "no figure" not in cell]
        else:
            own = re.fullmatch(
                r"(?:Where the gradient goes|First dimensions, first layers): (.*?)(?:, seed (\d+))?: the figures",
                heading,
            )
            if own:
                label, seed = own[1], own[2]
            elif "seed" in columns:
                seed = cells[columns.index("seed")]
            rows = check.rows(grid, label)
            if heading.endswith("by seed") and "transfer" in (grid,):
                seed = None
            values = check.values(grid, rows, seed)
            if heading == "What differs between the rows":
                kind = "settings"
                values = check.settings(grid, rows)
        group = group if label.startswith("**") or published else ("" if heading not in ("STS", "Transfer") else group)
        for number, decimals in tokens(numbers):
            if holds(values, number, decimals):
                counts[f"{kind}: found"] += 1
            elif kind == "settings" and holds(defaults, number, decimals):
                counts["settings: a default that the grid does not state"] += 1
            else:
                counts[f"{kind}: MISSING"] += 1
                missing.append((section[:40], heading[:40], cells[0][:40], seed, number))
    for name, count in sorted(counts.items()):
        print(f"{count:6,} {name}")
    for each in missing:
        print("missing:", *each)


if __name__ == "__main__":
    main()
