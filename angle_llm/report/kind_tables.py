"""Tables of every kind of measure but STS: transfer, retrieval, saturation, nested, and kinds without a form of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from angle_llm.evaluate.transfer_report import PUBLISHED_TRANSFER
from angle_llm.evaluate.transfer_tasks import TRANSFER_TASKS
from angle_llm.report.document import Block, Cell, Figure, Folded, Group, Notice, Table
from angle_llm.report.material import MaterialGrid, MaterialRow
from angle_llm.report.measured import Nested, Retrieval, Saturation, Span, Transfer
from angle_llm.report.numbers import PLAIN, SPREAD, UNDEFINED, number, over_seeds
from angle_llm.report.plots import nested_figure, saturation_figure

SEEDS = f"{SPREAD} Small: 95 % interval over the test items, its ends averaged over seeds."


TRANSFER_MARK = "published (Gao et al. 2021, table E.1), other models, all training examples"
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
        whole = [figures for figures in found if figures.tasks.keys() == labels.keys()]
        cells = [_over([(figures.mean, None) for figures in whole if figures.mean is not None])]
        for name in labels:
            tasks = [figures.tasks[name] for figures in found if name in figures.tasks]
            cells.append(_over([(task.accuracy, task.interval) for task in tasks]))
        body.append((Cell(row.label), Cell(row.seeds), *cells))
    yield Table(
        "Transfer",
        "Accuracy, %, of a logistic regression on the frozen embeddings; higher is better. Majority: what always saying the "
        f"commonest class gets. Text: SentEval's, as the published figures. {SEEDS}",
        ("row", "seeds", f"average of {len(labels)}", *labels.values()),
        (Group(tuple(body)), *_published_transfer(list(labels))),
        tuple(filter(None, [_majorities(rows, labels), _sampled(rows, labels)])),
        words=2,
    )
    yield from _every_number("Every transfer figure of every seed", rows, "transfer")


def _majorities(rows: Sequence[MaterialRow], labels: dict[str, str]) -> str:
    known: dict[str, float] = {}
    for row in rows:
        for _, of in row.of(Transfer):
            known |= {name: task.majority for name, task in of.tasks.items() if task.majority is not None}
    return (
        f"Majority: {', '.join(f'{labels[name]} {number(value)}' for name, value in known.items())}." if known else ""
    )


def _sampled(rows: Sequence[MaterialRow], labels: dict[str, str]) -> str:
    """What was done to the sets, where a result tells; of fits that did not converge, the most of any row."""
    told = []
    for name, label in labels.items():
        tasks = [of.tasks[name] for row in rows for _, of in row.of(Transfer) if name in of.tasks]
        dropped, repeated = (max(getattr(task, what) or 0 for task in tasks) for what in ("dropped", "repeated"))
        unconverged = max((task.unconverged or 0 for task in tasks), default=0)
        what = [f"{dropped:,} examples whose text is tested elsewhere left out"] if dropped else []
        what += [f"{repeated:,} test texts in training too"] if repeated and not dropped else []
        what += ["training examples drawn at random, not all"] if any(task.sampled for task in tasks) else []
        what += [f"up to {unconverged:,} fits stopped before they converged"] if unconverged else []
        told += [f"{label}: {', '.join(what)}"] if what else []
    return "; ".join(told) + "." if told else ""


def _published_transfer(tasks: list[str]) -> list[Group]:
    """The published rows, on the tasks that were measured here."""
    known = [name for name in tasks if name in TRANSFER_TASKS]
    if not known:
        return []
    rows = []
    for row in PUBLISHED_TRANSFER:
        average = Cell(number(row.average_over(known))) if len(known) == len(tasks) else PLAIN
        cells = [Cell(number(row.accuracy[name])) if name in known else PLAIN for name in tasks]
        rows.append((Cell(row.model), PLAIN, average, *cells))
    return [Group(tuple(rows), TRANSFER_MARK, foreign=True)]


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
            "× 100, means over queries; higher is better. Strict: the first ranks, as many as there are answers, are exactly the "
            "answers; “in top 5”: all answers are among the first five, the other reading of the paper's accuracy. R@k "
            "(recall): the share of the answers within the first k; of four answers at most a quarter can be first. MRR: 1 / "
            f"the rank of the first answer. nDCG: earlier ranks count more.{among} {SEEDS}",
            ("row", "seeds", *names),
            (Group(tuple(body)),),
            words=2,
        )
    yield from _every_number("Every retrieval figure of every seed", rows, "retrieval")


def saturation_blocks(grid: MaterialGrid) -> Iterator[Block]:
    """Where each term's gradient goes: a line for each result, then a figure for each row."""
    rows = [row for row in grid.rows if row.of(Saturation)]
    if not rows:
        return
    terms = list(dict.fromkeys(term for row in rows for _, of in row.of(Saturation) for term in of.terms))
    lines = []
    for row in rows:
        for seed, of in row.of(Saturation):
            shares = [of.saturated.get(name) for name in ("pairs", *terms)]
            cells = [PLAIN if share is None else _percent(share) for share in shares]
            lines.append((Cell(row.label), Cell(str(seed) if row.trained else "none"), *cells))
    yield Table(
        "Where the gradient goes",
        f"% of the pairs that lie at a |cosine| of 0.9 and more, and % of each term's gradient (alone, weight 1) that goes to "
        f"them: a term whose share is below that of the pairs saturates there. {_BATCHES}",
        ("row", "seed", "pairs", *terms),
        (Group(tuple(lines)),),
        words=2,
    )
    figures: dict[str, Figure] = {}
    tables = []
    for row in rows:
        seed, of = row.of(Saturation)[0]
        title = f"Where the gradient goes: {row.label}" + (f", seed {seed}" if len(row.results) > 1 else "")
        figures[row.name] = saturation_figure(title, of)
        tables.append(_zones(title, of))
    first = next((row.name for row in rows if not row.trained), None)
    shown = [name for name in figures if name in (first, grid.reference)] or list(figures)
    yield from (figures[name] for name in shown)
    if others := tuple(figure for name, figure in figures.items() if name not in shown):
        yield Folded("The other rows", others)
    yield Folded("The same as tables", tuple(tables))


_BATCHES = "In batches of 64 in the order of the file, which in STS-B goes by genre: training shuffles."


def _zones(title: str, of: Saturation) -> Table:
    lines = []
    for index, share in enumerate(of.pairs):
        zone = f"{number(of.edges[index])} to {number(of.edges[index + 1])}"
        lines.append((Cell(zone), _percent(share), *(_percent(shares[index]) for shares in of.terms.values())))
    return Table(
        f"{title}: the figures",
        f"% of the pairs in a zone of their cosine, and % of each term's gradient that goes to them. {_BATCHES}",
        ("cosine", "pairs", *of.terms),
        (Group(tuple(lines)),),
    )


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
