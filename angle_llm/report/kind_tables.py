"""Tables of every kind of measure but STS: transfer, retrieval, saturation, nested, and kinds without a form of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from angle_llm.report.document import Block, Cell, Folded, Group, Notice, Table
from angle_llm.report.material import MaterialGrid, MaterialRow
from angle_llm.report.measured import Nested, Retrieval, Saturation, Span, Transfer
from angle_llm.report.numbers import PLAIN, UNDEFINED, number, over_seeds
from angle_llm.report.plots import nested_figure, saturation_figure

SEEDS = (
    "Large: the mean over seeds ± their standard deviation, or the figure of the one seed. Small: 95 % interval over the "
    "test items, of the first seed named."
)


MOST = 32
"""A longer list is counted, not told."""


def kind_blocks(grid: MaterialGrid) -> list[Block]:
    """Everything but STS, in a fixed order; nothing for what was not measured."""
    return [block for form in FORMS for block in form(grid)]


def transfer_blocks(grid: MaterialGrid) -> Iterator[Block]:
    """Accuracies of a linear classifier on frozen vectors."""
    rows = [row for row in grid.rows if row.of(Transfer)]
    if not rows:
        return
    labels: dict[str, str] = {}
    for row in rows:
        for seed, figures in row.of(Transfer):
            for name, task in figures.tasks.items():
                labels.setdefault(name, task.label or name)
                if task.accuracy is None or task.undefined:
                    reason = task.undefined or "the file gives no reason"
                    yield Notice(f"{row.label}, seed {seed}, {labels[name]}: {UNDEFINED}, as {reason}.", "problem")
    body = []
    for row in rows:
        found = [figures for _, figures in row.of(Transfer)]
        cells = [_over([(figures.mean, None) for figures in found if figures.mean is not None])]
        for name in labels:
            tasks = [figures.tasks[name] for figures in found if name in figures.tasks]
            cells.append(_over([(task.accuracy, task.interval) for task in tasks]))
        body.append((Cell(row.label), Cell(row.seeds), *cells))
    yield Table(
        "Transfer",
        "Accuracy, %, of a logistic regression on the frozen embeddings; higher is better. Text: SentEval's, as the published "
        f"figures. {SEEDS}",
        ("row", "seeds", "average", *labels.values()),
        (Group(tuple(body)),),
        words=2,
    )
    yield from _every_number("Every transfer figure of every seed", rows, "transfer")


def retrieval_blocks(grid: MaterialGrid) -> Iterator[Block]:
    """How well captions of one image find each other."""
    rows = [row for row in grid.rows if row.of(Retrieval)]
    if not rows:
        return
    tasks = {
        name: of.label or name for row in rows for _, figures in row.of(Retrieval) for name, of in figures.tasks.items()
    }
    for task, label in tasks.items():
        found = {row.label: (row, [f.tasks[task] for _, f in row.of(Retrieval) if task in f.tasks]) for row in rows}
        names = list(dict.fromkeys(name for _, of in found.values() for one in of for name in one.figures))
        body = []
        for row, of in found.values():
            values = [[one.figures[name] for one in of if name in one.figures] for name in names]
            cells = [_over([(figure.value, figure.interval) for figure in figures]) for figures in values]
            body.append((Cell(row.label), Cell(row.seeds), *cells))
        sizes = {(one.queries, one.candidates) for _, of in found.values() for one in of if one.queries is not None}
        among = "".join(
            f" {queries:,} queries, {candidates or 0:,} candidates." for queries, candidates in sorted(sizes)
        )
        yield Table(
            f"Retrieval: {label}",
            "× 100, means over queries; higher is better. Strict: the first ranks are exactly the answers. R@k (recall): the "
            "share of the answers within the first k. MRR: 1 / the rank of the first answer. nDCG: earlier ranks count more."
            f"{among} {SEEDS}",
            ("row", "seeds", *names),
            (Group(tuple(body)),),
            words=2,
        )
    yield from _every_number("Every retrieval figure of every seed", rows, "retrieval")


def saturation_blocks(grid: MaterialGrid) -> Iterator[Block]:
    """Where each term's gradient goes."""
    for row in grid.rows:
        for seed, of in row.of(Saturation):
            title = f"Where the gradient goes: {row.label}" + (f", seed {seed}" if len(row.results) > 1 else "")
            yield saturation_figure(title, of)
            lines = []
            for index, share in enumerate(of.pairs):
                zone = f"{number(of.edges[index])} to {number(of.edges[index + 1])}"
                cells = [_percent(share), *(_percent(shares[index]) for shares in of.terms.values())]
                lines.append((Cell(zone), *cells))
            known = [of.saturated.get(name) for name in ("pairs", *of.terms)]
            ends = [PLAIN if share is None else _percent(share) for share in known]
            lines.append((Cell("|cosine| of 0.9 and more"), *ends))
            table = Table(
                f"{title}: the figures",
                "% of the pairs in a zone of their cosine, and % of each term's gradient (alone, weight 1) that goes to them, in "
                "batches of 64 in the order of the file, which in STS-B goes by genre: training shuffles.",
                ("cosine", "pairs", *of.terms),
                (Group(tuple(lines)),),
            )
            yield Folded("The same as a table", (table,))


def nested_blocks(grid: MaterialGrid) -> Iterator[Block]:
    """How much of the quality is in the first dimensions and layers."""
    for row in grid.rows:
        for seed, of in row.of(Nested):
            title = f"First dimensions, first layers: {row.label}" + (f", seed {seed}" if len(row.results) > 1 else "")
            drawing = nested_figure(title, of)
            if drawing is not None:
                yield drawing
            lines = tuple(
                (Cell(f"{layers} layers"), *(Cell(number(value)) for value in values))
                for layers, values in zip(of.layers, of.spearman, strict=True)
            )
            yield Table(
                f"{title}: the figures",
                "Spearman × 100 of the first dimensions (columns) after the first layers (rows); all cut from one model.",
                ("", *(str(dimension) for dimension in of.dimensions)),
                (Group(lines),),
            )


def other_blocks(grid: MaterialGrid) -> Iterator[Block]:
    """Kinds this report has no form for: every number of them, so that none is hidden."""
    for kind in dict.fromkeys(kind for row in grid.rows for one in row.results for kind in one.other):
        yield from _every_number(f"Also measured: {kind}", grid.rows, kind)


FORMS = (transfer_blocks, retrieval_blocks, nested_blocks, saturation_blocks, other_blocks)


def _every_number(summary: str, rows: Sequence[MaterialRow], kind: str) -> Iterator[Block]:
    lines = []
    for row in rows:
        for one in row.results:
            values = one.result.measures.get(kind)
            if isinstance(values, dict):
                told = {key: value for key, value in values.items() if key != "asked"}
                for key, value in _leaves(told):
                    lines.append((Cell(row.label), Cell(str(one.result.seed)), Cell(key), Cell(value)))
    if lines:
        table = Table(
            f"{kind} by seed",
            "Each value as it stands in the result file; its name is the path to it.",
            ("row", "seed", "figure", "value"),
            (Group(tuple(lines)),),
            words=3,
        )
        yield Folded(summary, (table,))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and not _flat(value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, _plain(value)


def _flat(values: Sequence[Any]) -> bool:
    return all(not isinstance(item, dict | list | tuple) for item in values)


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) if len(value) <= MOST else f"{len(value):,} values"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}".replace("-", "−")
    return str(value)


def _over(figures: Sequence[tuple[float | None, Span | None]]) -> Cell:
    found = over_seeds(figures)
    return PLAIN if found is None else found.cell()


def _percent(share: float) -> Cell:
    return Cell(number(100 * share, 1))
