"""Published figures that are no STS row (those stand in `evaluation.published`), as tables.

Source: Li & Li, AnglE (arXiv 2309.12871). Figures are × 100. None: not in the source as we have it.
"""

from __future__ import annotations

from dataclasses import dataclass

from angle_llm.evaluate.published import PUBLISHED, PublishedRow
from angle_llm.report.document import Cell, Group, Table
from angle_llm.report.numbers import NOT_MEASURED, number

STS_MARK = "published, on SentEval's text, other model and data"
OTHER_MARK = "published, other model and data, text as in the paper"
_SOURCE = "Li & Li, AnglE, arXiv 2309.12871"


@dataclass(frozen=True)
class PublishedTable:
    """A table of the paper, and the grids or kinds of measure it stands beside."""

    title: str
    meaning: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    beside: frozenset[str]
    decimals: int = 2

    def table(self) -> Table:
        """As a table of the document."""
        rows = tuple(
            (Cell(name), *(Cell(NOT_MEASURED if value is None else number(value, self.decimals)) for value in values))
            for name, values in self.rows
        )
        return Table(
            f"Published: {self.title}",
            f"{self.meaning} Source: {_SOURCE}. Not to be compared line by line with the figures measured here.",
            ("model", *self.columns),
            (Group(rows, OTHER_MARK, foreign=True),),
        )


NON_TRANSFER = PublishedTable(
    "non-transfer STS",
    "Spearman × 100, trained and tested on the same set; (val): on its validation split.",
    ("MRPC", "STS-B", "QQP (val)", "QNLI (val)", "GitHub Issues", "average"),
    (
        ("AnglE-BERT", (62.20, 86.26, 76.54, 72.19, 70.55, 73.55)),
        ("AnglE-RAN (long-text encoder, 86M)", (58.70, 80.23, 74.87, 63.04, 71.25, None)),
        ("SBERT", (46.19, 84.67, 73.80, 65.98, 69.50, None)),
        ("SimCSE", (48.13, 76.27, 65.84, 33.00, 60.38, None)),
    ),
    frozenset({"nontransfer"}),
)
ABLATION = PublishedTable(
    "the objective's terms",
    "Spearman × 100 on STS-B of AnglE-BERT, trained on STS-B.",
    ("STS-B",),
    (
        ("all terms", (86.26,)),
        ("without in-batch", (86.00,)),
        ("without angle", (85.30,)),
        ("only cosine", (85.28,)),
        ("only angle", (85.15,)),
        ("only in-batch", (72.48,)),
    ),
    frozenset({"ablation", "graded"}),
)
POOLINGS = PublishedTable(
    "poolings",
    "Spearman × 100 on STS-B of AnglE-BERT, trained on STS-B.",
    ("STS-B",),
    (
        ("cls", (86.26,)),
        ("cls-last-avg", (85.81,)),
        ("last-avg", (84.15,)),
        ("first-last-avg", (81.99,)),
        ("last-max", (79.76,)),
    ),
    frozenset({"ablation"}),
)
LLM_SUPERVISED = PublishedTable(
    "learning from what an LLM wrote",
    "Spearman × 100 on STS-B test; a prompted LLM wrote sentences of the same and of opposite meaning, no human label.",
    ("STS-B",),
    (("ensemble", (82.01,)), ("ChatGPT", (81.52,)), ("ChatGLM", (81.11,)), ("LLaMA2-7B", (79.29,))),
    frozenset({"supervision"}),
)
RETRIEVAL = PublishedTable(
    "retrieval of captions",
    "Strict accuracy, %, on flickr30k test: an image's first caption asks for its captions, and the top 5 must be exactly they.",
    ("strict accuracy",),
    (("AnglE", (12.9,)), ("SimCSE", (10.4,)), ("SBERT", (5.2,))),
    frozenset({"retrieval"}),
    decimals=1,
)
TABLES = (NON_TRANSFER, ABLATION, POOLINGS, LLM_SUPERVISED, RETRIEVAL)

STS_BESIDE = {
    "nli": tuple(row for row in PUBLISHED if row.spearman and "untuned" not in row.model),
    "prompts": tuple(row for row in PUBLISHED if "untuned" in row.model),
    "bert": tuple(row for row in PUBLISHED if row.model == "AnglE-BERT-base"),
}
"""Grid → published rows with figures by task, to stand below its own."""


def sts_beside(grid: str) -> tuple[PublishedRow, ...]:
    """Published STS rows that stand below those of a grid."""
    return STS_BESIDE.get(grid, ())


def beside(*names: str) -> list[PublishedTable]:
    """Published tables that stand beside these grids or kinds of measure."""
    return [table for table in TABLES if table.beside & set(names)]
