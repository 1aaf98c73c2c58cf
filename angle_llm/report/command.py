"""`make report`: reads what is saved, writes the page and the tables."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from angle_llm.io import write_text
from angle_llm.report.markdown import markdown
from angle_llm.report.material import Material, read_material
from angle_llm.report.page import page
from angle_llm.report.sections import document


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """One page and one file of tables from saved results; needs no model, no data, no network."""

    results: Path = Path("docs/results")
    """Where results are kept: GRID/NAME.json, GRID/comparisons.json, lengths.json, speed*.json."""
    grids: Path = Path("recipes/grids")
    """The grids, which name what is missing."""
    page: Path = Path("docs/report.html")
    """The page, with plots."""
    tables: Path = Path("docs/RESULTS.md")
    """The same figures as Markdown tables."""


def report_main(settings: ReportSettings) -> Material:
    """Writes both files, each whole or not at all, and tells on standard error what could not be used.

    Raises:
        FileNotFoundError: when there is neither a folder of results nor one of grids.
    """
    if not settings.results.is_dir() and not settings.grids.is_dir():
        raise FileNotFoundError(
            f"there is no folder {settings.results} and no folder {settings.grids}. Run this where the project lies, or "
            "name them with --results and --grids."
        )
    material = read_material(settings.results, settings.grids)
    whole = document(material)
    for path, text in ((settings.page, page(whole)), (settings.tables, markdown(whole))):
        write_text(path, text)
        print(f"{path}: {len(text.encode()):,} bytes")
    results = sum(len(row.results) for grid in material.grids for row in grid.rows)
    print(f"{results} results of {len(material.grids)} grids, {len(material.all_problems)} problems")
    for problem in material.all_problems:
        print(f"attention: {problem}", file=sys.stderr)
    return material
