"""Build an HTML page and the pictures of docs/results.md from docs/results.csv. Needs no model, data or network.

python eval/report.py
python eval/report.py --pictures docs/pictures
"""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import tyro
import yaml
from ablation_parts.grid import Grid, changed, experiments, load_grid
from ablation_parts.results import runs_path
from markupsafe import Markup
from matplotlib.figure import Figure
from report_figures import FIGURES, PICTURES
from report_plots import INK
from scipy import stats

from angle_llm.cli import run_cli
from angle_llm.io import write_text
from angle_llm.settings.parsing import flags_of

WHAT = ["grid", "row", "kind", "task", "text", "metric", "reference"]
"""Columns of the results file that identify a value, except the seed."""
PAGE = jinja2.Template(Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8"), autoescape=True)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Input and output files of the report."""

    results: Path = Path("docs/results.csv")
    """Results file; its file of runs, in the same folder, is read too."""
    grids: Path = Path("eval/grids")
    """Folder of grid files, for titles and for rows without results."""
    page: Path = Path("runs/report.html")
    """HTML page to write."""
    pictures: Path | None = None
    """Folder for the pictures of docs/results.md. None: write only the page."""
    add_speed: Path | None = None
    """Output of `eval/speed.py --json`. It is first added to the results file, with the name of this file as its grid."""


def main(settings: Settings) -> None:
    """Write the HTML page of results, and the pictures if `--pictures` is set."""
    if settings.add_speed is not None:
        add_speed(settings.add_speed, settings.results)
    measured, runs = read(settings.results)
    data = summarise(measured, runs)
    grids = {path.stem: load_grid(path) for path in sorted(settings.grids.glob("*.yaml"))}
    figures, missing = [], []
    for title, draw in FIGURES.items():
        try:
            drawn, sentence = draw(data)
        except LookupError as error:
            missing.append(f"{title}: {error}")
            continue
        figures.append({"title": title, "sentence": minus(sentence), "svg": svg(drawn)})
        if settings.pictures is not None:
            settings.pictures.mkdir(parents=True, exist_ok=True)
            how: dict[str, Any] = {"dpi": 100, "facecolor": "white", "metadata": {"Software": None}}
            drawn.savefig(settings.pictures / f"{PICTURES[title]}.png", **how)
    sections = [
        section(name, grids.get(name, Grid(title=name)), data, runs) for name in dict.fromkeys([*grids, *data.grid])
    ]
    page = PAGE.render(figures=figures, missing=missing, sections=sections, values=len(measured), runs=len(runs))
    write_text(settings.page, page)
    print(f"{settings.page}: {len(figures)} figures, {len(measured):,} measurements of {len(runs)} runs")
    for line in missing:
        print(f"not drawn: {line}")


def read(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the measurements of a results file, and the runs of its file of runs."""
    numbers = dict.fromkeys(("value", "low", "high", "n", "p"), float)
    measured = pd.read_csv(
        path, dtype={"seed": str} | numbers, keep_default_na=False, na_values={c: [""] for c in numbers}
    )
    return measured, pd.read_csv(runs_path(path), dtype=str, keep_default_na=False)


def speed_rows(name: str, comparisons: Any) -> pd.DataFrame:
    """Convert the output of `eval/speed.py --json` to measurements: seconds and peak memory by library and repetition."""
    found = []
    for scenario in comparisons["scenarios"]:
        for library, repetitions in scenario["runs"].items():
            for seed, one in enumerate(repetitions, 1):
                key = {"grid": name, "row": library, "seed": str(seed), "kind": "speed", "task": scenario["title"]}
                time = {
                    "metric": "seconds",
                    "value": one["seconds"],
                    "n": scenario["units"],
                    "note": one["problem"] or "",
                }
                peak = one["peak_bytes"] and one["peak_bytes"] / 2**30
                memory = {"metric": "peak GiB", "value": peak, "note": "" if peak else "not measured"}
                found += [key | time, key | memory]
    return pd.DataFrame(found)


def draw_speed(comparisons: Any, path: Path) -> None:
    """Draw the output of `eval/speed.py --json` to a picture."""
    ratios = times_ours(speed_rows("speed", comparisons))
    FIGURES["Time beside other libraries"](ratios)[0].savefig(path, dpi=150, facecolor="white")


def add_speed(path: Path, results: Path) -> None:
    """Add the output of `eval/speed.py --json` to the results file, and replace an earlier output with the same file name."""
    now = json.loads(path.read_text(encoding="utf-8"))
    new, machine = speed_rows(path.stem, now), now["machine"]
    switches = [f"--{name}" for name, value in now["settings"].items() if value is True]
    values = {name: value for name, value in now["settings"].items() if not isinstance(value, bool)}
    versions = {row: ", ".join(map(" ".join, of.items())) for row, of in now["packages"].items()}
    run = {
        "date": now["finished"][:10],
        "commit": now.get("commit", ""),
        "machine": f"{machine['cores']} cores, {machine['processor']}, {machine['system']}",
        "command": " ".join(["python eval/speed.py", *switches, *flags_of(values)]),
        "settings": "{}",
        "measures": "{}",
    }
    new_runs = new[["grid", "row", "seed"]].drop_duplicates()
    new_runs = new_runs.assign(label=new_runs.row, versions=new_runs.row.map(versions).fillna(""), **run)
    new = new.assign(**{c: [f"{x:.7g}" if pd.notna(x) else "" for x in new[c]] for c in ("value", "n")})
    for file, added in ((results, new), (runs_path(results), new_runs)):
        old = pd.read_csv(file, dtype=str, keep_default_na=False)
        table = pd.concat([old[old.grid != path.stem], added])[old.columns]
        table = table.sort_values(["grid", "row", "seed"], kind="stable")
        write_text(file, table.to_csv(index=False, lineterminator="\n"))


def summarise(measured: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Summarise measurements over seeds: return a table with mean, standard deviation and interval of each value.

    The interval of a value is over the pairs of the test set, with its ends averaged over seeds. The interval of a
    difference depends on the number of seeds:

    * one seed: over pairs
    * several seeds with a recorded mean: over queries, as recorded
    * three or more seeds otherwise: over seeds (t)
    * two seeds otherwise, or several seeds of the reference only: none

    `trained` is False for values without a seed.
    """
    means = measured[(measured.seed == "mean") & measured.low.notna()].set_index(WHAT)
    measured = measured[measured.seed != "mean"]
    groups = measured.groupby(WHAT, sort=False, dropna=False)
    data = groups.agg(
        value=("value", lambda values: values.mean(skipna=False)),
        sd=("value", "std"),
        seeds=("value", "size"),
        n=("n", "first"),
        p=("p", "first"),
    )
    for end in ("low", "high"):
        data[end] = groups[end].agg(lambda values: values.mean(skipna=False))
    data["trained"] = groups["seed"].first() != ""
    recorded = data.index.isin(means.index)
    data = data.reset_index()
    difference = data.kind == "difference"
    data.loc[difference & (data.seeds > 1), ["low", "high"]] = math.nan
    seeded = set(runs[runs.seed != ""][["grid", "row"]].itertuples(index=False, name=None))
    # The seeds of a row that has one model are of its reference.
    has_seeds = data.apply(lambda line: (line.grid, line.row) in seeded, axis=1)
    three = difference & (data.seeds > 2) & has_seeds
    half = stats.t.ppf(0.975, data.seeds[three] - 1) * data.sd[three] / data.seeds[three] ** 0.5
    data.loc[three, "low"], data.loc[three, "high"] = data.value[three] - half, data.value[three] + half
    ends = ["low", "high", "p"]
    data.loc[recorded, ends] = means.reindex(pd.MultiIndex.from_frame(data.loc[recorded, WHAT]))[ends].to_numpy()
    data = pd.concat([data, times_ours(measured)])
    labels = runs.drop_duplicates(["grid", "row"])[["grid", "row", "label"]]
    return data.merge(labels, how="left", on=["grid", "row"])


def times_ours(measured: pd.DataFrame) -> pd.DataFrame:
    """Return the time of each library divided by the time of angle_llm in the same repetition: median, least and most."""
    key = ["grid", "row", "task"]
    seconds = measured[(measured.kind == "speed") & (measured.metric == "seconds")]
    ours = seconds[seconds.row == "angle_llm"][["grid", "task", "seed", "value"]]
    both = seconds.merge(ours, on=["grid", "task", "seed"], suffixes=("", "_ours"))
    groups = both.assign(ratio=both.value / both.value_ours).dropna(subset="ratio").groupby(key, sort=False)
    found = groups.agg(value=("ratio", "median"), low=("ratio", "min"), high=("ratio", "max"), seeds=("ratio", "size"))
    peak = measured[measured.metric == "peak GiB"].groupby(key).value.max().rename("peak")
    return found.join(peak).reset_index().assign(kind="speed", metric="times ours", trained=False)


def svg(drawn: Figure) -> Markup:
    """Convert a figure to inline SVG in the text colour of the page."""
    file = io.StringIO()
    drawn.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace("<svg ", '<svg role="img" ', 1)
    return Markup(text.replace(INK, "currentColor"))


def section(name: str, grid: Grid, data: pd.DataFrame, runs: pd.DataFrame) -> dict[str, Any]:
    """Return the page content for a grid: tables of values by row and task, runs, and rows without results."""
    runs = runs[runs.grid == name]
    order = {row: place for place, row in enumerate(grid.rows)}
    of = data[data.grid == name].sort_values("row", key=lambda s: s.map(order).fillna(len(order)), kind="stable")
    of = of.assign(
        label=of.label.where(of.label != "", of.row),
        task=[f"average of {n:.0f}" if task == "average" else task for task, n in zip(of.task, of.n, strict=True)],
        cell=[cell(line) for line in of.itertuples()],
    )
    first, rest = list[tuple[str, Markup]](), list[tuple[str, Markup]]()
    for (kind, metric), values in of.groupby(["kind", "metric"], sort=False):
        pivot = {
            "index": ["label", "reference"] if kind == "difference" else "label",
            "columns": "task",
            "values": "cell",
            "aggfunc": "first",
            "sort": False,
            "fill_value": "–",
        }
        table = (f"{kind}: {metric}", html(values.pivot_table(**pivot)))
        (first if metric in ("spearman", "accuracy", "times ours") else rest).append(table)
    planned = experiments(grid, Path("DATA")) if grid.rows else []
    recorded = dict(zip(zip(runs.row, runs.seed, strict=True), runs.settings, strict=True))
    missing = [one.name for one in planned if one.key[1:] not in recorded]
    measured = [one for one in planned if one.key[1:] in recorded]
    other = [one.name for one in measured if changed(yaml.safe_load(recorded[one.key[1:]]), one.given)]
    return {
        "name": name,
        "title": grid.title,
        "about": grid.about,
        "tables": first,
        "rest": rest,
        "runs": html(runs.drop(columns=["grid", "measures"]).set_index("row")),
        "missing": missing,
        "other": other,
    }


def cell(line: Any) -> str:
    """Format a line of the summary: value, standard deviation over seeds, and interval."""
    if line.value != line.value:
        return "undefined"
    digits = "+.2f" if line.kind == "difference" else ",.6g" if line.value % 1 == 0 else ".2f"
    number = f"{line.value:{digits}}"
    spread = f" ± {line.sd:.2f}" if line.seeds > 1 and line.sd == line.sd and line.kind != "difference" else ""
    interval = f" ({line.low:.2f} to {line.high:.2f})" if line.low == line.low and line.high > line.low else ""
    seeds = f", {line.seeds} seeds" if line.kind == "difference" and line.seeds > 1 else ""
    return minus(number + spread + interval + seeds)


def minus(text: str) -> str:
    """Return a text with minus signs instead of hyphens before numbers."""
    return re.sub(r"(?<![\w–-])-(?=\d)", "−", text)


def html(table: pd.DataFrame) -> Markup:
    """Convert a table to HTML."""
    table = table.rename_axis(index=[None] * table.index.nlevels, columns=None)
    return Markup(table.to_html(border=0, escape=True))


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(Settings, description=__doc__)))
