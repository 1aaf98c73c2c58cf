"""From material to a document: what stands on the page, in which order, in which words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from angle_llm.evaluate.published import PUBLISHED
from angle_llm.evaluate.tasks import PUBLISHED_TASKS
from angle_llm.experiments.provenance import grid_command
from angle_llm.report.against import findings
from angle_llm.report.document import Block, Cell, Commands, Document, Folded, Group, Notice, Paragraph, Section, Table
from angle_llm.report.kind_tables import kind_blocks
from angle_llm.report.material import KINDS, Material, MaterialGrid, MaterialRow
from angle_llm.report.measured import Lengths, Speed, SpeedScenario, Sts
from angle_llm.report.numbers import NOT_MEASURED, PLAIN, number
from angle_llm.report.plots import length_figure
from angle_llm.report.published import STS_MARK, TABLES, PublishedTable, beside
from angle_llm.report.run_tables import missing_blocks, run_blocks
from angle_llm.report.sts_tables import sts_blocks
from angle_llm.report.terms import terms_table

TITLE = "angle_llm: what was measured"
LEAD = (
    "Made from the result files in `docs/results` alone, by `make report`: no figure of a table or plot was typed by hand but "
    "the published ones, and those say so (what stands below a grid's title is the grid's own words). Rows of a table share "
    "everything but what the table of differences names. All correlations and accuracies are × 100."
)
QUANTILES = {"0.05": "5 %", "0.25": "25 %", "0.5": "median", "0.75": "75 %", "0.95": "95 %", "1.0": "longest"}


def document(material: Material) -> Document:
    """The whole report."""
    sections = [_overview(material)]
    if found := findings(material.grids):
        sections.append(Section("findings", "What the comparisons show", (found,), short="findings"))
    sections += [*(_grid(material, grid) for grid in material.grids)]
    sections += [_lengths(material.lengths)] if material.lengths is not None and material.lengths.sets else []
    sections += [_speed(material.speeds)] if material.speeds else []
    told = {table.title for grid in material.grids for table in _beside(grid)}
    sections.append(_published([table for table in TABLES if table.title not in told]))
    return Document(TITLE, LEAD, tuple(sections))


def _overview(material: Material) -> Section:
    blocks: list[Block] = []
    if not any(grid.rows for grid in material.grids):
        blocks.append(Notice("There are no results yet, so there is nothing to compare.", "missing"))
        commands = tuple(grid_command(grid.name) for grid in material.grids) or (grid_command("nli"),)
        blocks.append(
            Commands("To run the grids (DATA stands for the data directory), then `make report` again:", commands)
        )
    blocks += [Notice(problem, "problem") for problem in material.problems]
    told = [f"{grid.name} ({len(grid.problems)})" for grid in material.grids if grid.problems]
    if told:
        text = f"Some results cannot be used, or do not fit their grid; what and why stands with the grid: {', '.join(told)}."
        blocks.append(Notice(text, "problem"))
    if material.grids:
        rows = tuple(_state(grid) for grid in material.grids)
        table = Table(
            "What has been run",
            "A grid is a set of rows that answer one question; an experiment is a row with a seed.",
            ("grid", "state", "measured", "dates", "machines", "experiments"),
            (Group(rows),),
            words=5,
        )
        blocks.append(table)
        blocks.append(Folded("What the words mean", (terms_table(),)))
    return Section("overview", "Overview", tuple(blocks))


def _state(grid: MaterialGrid) -> tuple[Cell, ...]:
    results = [one.result for row in grid.rows for one in row.results]
    state = "not run yet" if not results else "in part" if grid.missing else "complete"
    dates = sorted({result.date for result in results})
    kinds = dict.fromkeys(kind for result in results for kind in result.measures)
    expected = max(len(grid.expected), len(results))
    return (
        Cell(grid.name, grid.title),
        Cell(state),
        Cell(", ".join(kinds) or NOT_MEASURED),
        Cell(" to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or NOT_MEASURED),
        Cell("; ".join(dict.fromkeys(result.machine for result in results)) or NOT_MEASURED),
        Cell(f"{len(results)} of {expected}"),
    )


def _grid(material: Material, grid: MaterialGrid) -> Section:
    blocks: list[Block] = [Paragraph(grid.about)] if grid.about else []
    if not grid.in_file:
        blocks.append(Notice(f"There is no grid file recipes/grids/{grid.name}.yaml for these results.", "problem"))
    blocks += missing_blocks(grid)
    blocks += [Notice(problem, "problem") for problem in grid.problems]

    def untrained(row: MaterialRow, task: str) -> Sts | None:
        return _untrained(material, row, task)

    blocks += sts_blocks(grid, untrained)
    blocks += kind_blocks(grid)
    blocks += [table.table() for table in _beside(grid)]
    blocks += run_blocks(grid) if grid.rows else []
    return Section(f"grid-{grid.name}", grid.title, tuple(blocks), short=grid.name)


def _beside(grid: MaterialGrid) -> list[PublishedTable]:
    kinds = [name for name, kind in KINDS.items() if any(row.of(kind) for row in grid.rows)]
    return beside(grid.name, *kinds)


def _untrained(material: Material, trained: MaterialRow, task: str) -> Sts | None:
    """The figures of the same backbone, prompt and pooling before training, with this task's density; from any grid."""
    wanted = trained.results[0].result.settings.get("model", {})
    for grid in material.grids:
        for row in grid.rows:
            for one in row.results:
                model, sts = one.result.settings.get("model", {}), one.of(Sts)
                same = all(model.get(key) == wanted.get(key) for key in ("path", "prompt", "pooling"))
                if one.result.train is None and same and sts is not None and task in sts.density:
                    return sts
    return None


def _lengths(lengths: Lengths) -> Section:
    names = list(dict.fromkeys(name for of in lengths.sets.values() for name in of.quantiles))
    rows = []
    for name, of in lengths.sets.items():
        texts = PLAIN if of.texts is None else Cell(f"{of.texts:,}")
        mean = PLAIN if of.mean is None else Cell(number(of.mean, 1))
        quantiles = [Cell(f"{of.quantiles[key]:,.0f}") if key in of.quantiles else PLAIN for key in names]
        rows.append((Cell(name), texts, mean, *quantiles))
    tokenizer = f" Tokenizer: `{lengths.tokenizer}`." if lengths.tokenizer else ""
    table = Table(
        "Text lengths",
        f"Tokens of each distinct text, without the prompt: so many texts in 100 are at most that long.{tokenizer}",
        ("set", "texts", "mean", *(QUANTILES.get(name, name) for name in names)),
        (Group(tuple(rows)),),
    )
    return Section("lengths", "How long the texts are", (length_figure(lengths), table), short="text lengths")


def _speed(speeds: Sequence[Speed]) -> Section:
    blocks: list[Block] = []
    for speed in speeds:
        blocks += [_scenario(scenario) for scenario in speed.scenarios]
        machine = ", ".join(f"{key} {value}" for key, value in speed.machine.items())
        packages = ", ".join(f"{key} {_versions(value)}" for key, value in speed.packages.items())
        about = [f"Machine: {machine}." if machine else "", f"Packages: {packages}." if packages else ""]
        about.append(f"Finished {speed.finished}." if speed.finished else "")
        about.append(
            f"Repetitions: {speed.settings.get('repetitions', 'not told')}. Again: `{_speed_command(speed.settings)}`."
        )
        blocks.append(Paragraph(" ".join(filter(None, about))))
    return Section("speed", "Speed beside other libraries", tuple(blocks), short="speed")


def _speed_command(settings: dict[str, Any]) -> str:
    """What a user of `eval/speed.py` would type; files by their names."""
    words = ["python eval/speed.py", *(f"--{kind}" for kind in ("train", "encode") if settings.get(kind))]
    asked = ("peers", "dtype", "max_length", "batch", "steps") if settings.get("train") else ("peers", "dtype")
    for name in (*asked, "repetitions", *(("data",) if settings.get("train") else ("data_dir", "texts"))):
        value = settings.get(name)
        if value is not None:
            told = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            told = "DATA" if name == "data_dir" else told
            words.append(f"--{name.replace('_', '-')} {told}")
    return " ".join(words)


def _scenario(scenario: SpeedScenario) -> Table:
    rows = []
    for library, of in scenario.summary.items():
        problem = next((run["problem"] for run in scenario.runs.get(library, []) if run.get("problem")), "")
        if of is None:
            rows.append((Cell(library, f"no figure: {problem or 'the file gives no reason'}"), *[PLAIN] * 4))
            continue
        least, most = of.ratio_min, of.ratio_max
        beside = "" if least is None or most is None or least == most else f"{least:.2f}–{most:.2f}"
        ratio = PLAIN if of.ratio is None else Cell(number(of.ratio), beside)
        figures = [Cell(number(of.seconds)), Cell(number(of.per_second)), ratio, Cell(number(of.peak_gib, 1))]
        rows.append((Cell(library, problem), *figures))
    meaning = f"Seconds for {scenario.units:,} {scenario.unit}; times ours: its time divided by ours (least to most)."
    columns = ("library", "seconds", f"{scenario.unit} a second", "times ours", "peak GiB")
    return Table(scenario.title, meaning, columns, (Group(tuple(rows)),))


def _versions(value: object) -> str:
    return " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _published(tables: list[PublishedTable]) -> Section:
    rows = []
    for row in PUBLISHED:
        figures = [row.spearman.get(name) for name in PUBLISHED_TASKS]
        cells = [PLAIN if value is None else Cell(number(value)) for value in (*figures, row.average)]
        rows.append((Cell(row.model), *cells))
    sts = Table(
        "Published: STS",
        "Spearman × 100, “all” protocol. Sources: Li & Li, AnglE (arXiv 2309.12871) and the cards of its LLaMA adapters; Jiang "
        "et al. (2023), PromptEOL; Gao et al. (2021), SimCSE. – : only the average is known.",
        ("model", "STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R", "average"),
        (Group(tuple(rows), STS_MARK, foreign=True),),
    )
    lead = Paragraph(
        "Figures of others, for orientation: other models, other amounts of data, and for STS another form of the text "
        "(SentEval's tokenised one). None of them was measured with this code."
    )
    return Section(
        "published", "Published figures", (lead, sts, *(table.table() for table in tables)), short="published figures"
    )
