"""Draw the figures of the report, which docs/results.md shows too.

A function takes the summary of `report.summarise` and returns a figure with a sentence. If its rows are not measured, it
raises `LookupError`, and the report names the missing rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pandas as pd
from report_plots import (
    COLOURS,
    DIFFERENCE,
    INK,
    SPEARMAN,
    Drawn,
    axes,
    dots,
    legend,
    one,
    pick,
    series,
)

from angle_llm.evaluate import PUBLISHED, PUBLISHED_TASKS

Draw = Callable[[pd.DataFrame], Drawn]
FIGURES: dict[str, Draw] = {}
"""Title of a figure → function that draws it, in the order of the page."""
PICTURES: dict[str, str] = {}
"""Title of a figure → name of its file in docs/pictures."""
TERMS = [
    (
        "ablation",
        "512 NLI triples, STS-B dev",
        "stsb-dev",
        "in-batch-cosine in-batch-angle all published simcse cosine angle-phase cosine-angle angle-reference",
    ),
    ("nli", "8,000 NLI triples, five sets", "average", "published simcse cosent regression"),
    (
        "graded",
        "1,024 graded pairs, STS-B dev",
        "stsb-dev",
        "angle-phase cosine-angle cosine-in-batch all in-batch regression angle-reference",
    ),
    (
        "saturated",
        "graded pairs, no prompt, all weights",
        "stsb-dev",
        "angle-phase cosine-angle angle-reference cosine-angle-reference",
    ),
    ("saturated", "the same, temperature 1", "stsb-dev", "angle-phase-1 angle-reference-1"),
    ("long", "256 pairs of bug reports", "issues", "in-batch-cosine in-batch-angle cosine-angle cosine angle-phase"),
]
"""Grid, heading, task and rows of each part of the forest plot of loss terms. The rows of a part share a reference."""


def figure(title: str, picture: str) -> Callable[[Draw], Draw]:
    """Register a function that draws a figure, under the title of the figure and the name of its file."""

    def register(draw: Draw) -> Draw:
        FIGURES[title], PICTURES[title] = draw, picture
        return draw

    return register


@figure("Which loss terms help", "terms")
def terms(data: pd.DataFrame) -> Drawn:
    """Draw a forest plot of the differences between rows and their reference, by kind of data."""
    parts = [(*part, pick(data, part[0], rows, part[2], kind="difference")) for *part, rows in TERMS]
    fig, ax = axes(0.235 * sum(len(found) + 1.4 for *_, found in parts) + 0.4, width=6.6)
    y, headings = 0.0, []
    for (grid, heading, task, found), colour in zip(parts, cycle(COLOURS), strict=False):
        reference = one(data, grid, found.reference.iloc[0], task).label.split(", sym")[0]
        places = [y - 1 - index for index in range(len(found))]
        dots(ax, found.assign(trained=True), places, colour)
        headings += [(y, f"{heading}; reference: {reference}"), *zip(places, found.label, strict=True)]
        y = places[-1] - 1.4
    ax.axvline(0, color=INK, lw=1)
    ax.set_ylim(y + 0.7, 0.7)
    ax.set_yticks([at for at, _ in headings], [label.split(", in-batch")[0] for _, label in headings], fontsize=8)
    for tick, (_, label) in zip(ax.get_yticklabels(), headings, strict=True):
        tick.set_fontweight("bold" if "; reference" in label else "normal")
    ax.set_xlabel(f"{DIFFERENCE} (filled: three seeds, interval over seeds; hollow: one seed, over pairs)")
    ax.grid(axis="x")
    most = one(data, "nli", "published", "average", kind="difference")
    rows = "cosine-angle angle-reference-1 cosine-1"
    added, alone, cosine = pick(data, "saturated", rows, "stsb-dev", kind="difference").itertuples()
    return fig, (
        "Does the angle help? On binary data no term was seen to add to the in-batch term: at 8,000 triples the published "
        f"weights differ by {most.value:+.2f} ({most.low:+.2f} to {most.high:+.2f}); on graded scores cosine and angle are "
        f"ahead of it. Without prompt, the phase angle added to the cosine has {added.value:+.2f} ({added.low:.2f} to "
        f"{added.high:.2f} over {added.seeds} seeds). Alone, only the reference angle is ahead of the cosine, by "
        f"{alone.value:.1f} at temperature 1; the cosine itself has {-cosine.value:.1f} more at 0.05 than at 1."
    )


@figure("Quality by number of training triples", "quality")
def quality(data: pd.DataFrame) -> Drawn:
    """Draw the Spearman correlation by number of NLI training triples, from 0 to 43,410."""
    places = {128: ("nli", "zero-shot"), 512: ("ablation", "in-batch"), 2048: ("nli_2048", "in-batch")}
    places |= {8000: ("nli", "in-batch"), 43410: ("nli_whole", "in-batch")}
    sets = {"stsb-dev": "STS-B dev", "stsb": "STS-B test", "average": "average of five sets"}
    fig, ax = axes(3.4)
    for (task, label), colour in zip(sets.items(), COLOURS, strict=False):
        where = (data.task == task) & (data.kind == "sts") & (data.metric == "spearman")
        known = data[where].set_index(["grid", "row"])
        at = [x for x, place in places.items() if place in known.index]
        found = known.loc[[places[x] for x in at]]
        ax.errorbar(at, found.value, found.sd, fmt="-o", ms=4, color=colour, label=label, capsize=2)
    ax.set_xscale("log")
    ax.set_xticks(list(places), ["0", *(f"{x:,}" for x in places if x > 128)])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("NLI triples")
    ax.set_ylabel(SPEARMAN)
    ax.grid(axis="y")
    ax.legend(loc="lower right")
    start, end = one(data, "nli", "zero-shot", "average"), one(data, "nli_whole", "in-batch", "average")
    middle = one(data, "nli", "in-batch", "average")
    return fig, (
        f"SmolLM2-135M with LoRA: the average of five STS sets is {start.value:.1f} without training, {middle.value:.1f} ± "
        f"{middle.sd:.1f} after 8,000 triples ({middle.seeds} seeds) and {end.value:.1f} after all 43,410 (one seed)."
    )


BY_COMPUTE = {
    "SmolLM2, NLI triples": [("nli", "in-batch"), ("nli_whole", "in-batch")],
    "SmolLM2, NLI triples and SNLI entailments, temperature 0.03": [("encoder", "all")],
    "SmolLM2, the same and cosines of all-MiniLM-L6-v2": [("encoder", "all-similarities")],
    "SmolLM2, mean of the weights of three seeds": [("encoder", "all-seeds")],
    "SmolLM2, mean of weights, one or more with the cosines": [
        ("encoder", row)
        for row in ("all-average", "all-similarities-seeds", "all-seeds-similarities", "all-both-seeds")
    ],
    "Qwen2.5-Coder-1.5B, 2,048, 4,096 and 8,000 NLI triples": [
        ("real_llm", f"triples-{count}") for count in (2048, 4096, 8000)
    ],
}
"""Model and training data → grids and rows, ordered by operations."""
OPERATIONS = {"real_llm": 5.36e9}
"""Grid → operations per computed token of a training step of LoRA, as `angle-llm plan` prints them; of the 1.5B model."""
SMOLLM2_OPERATIONS = 0.455e9
"""Operations per computed token of SmolLM2-135M, the model of the other grids."""
MEMBERS = {
    "all-average": ("all", "all-similarities"),
    "all-seeds": ("all",) * 3,
    "all-similarities-seeds": ("all-similarities",) * 3,
    "all-seeds-similarities": ("all", "all", "all", "all-similarities"),
    "all-both-seeds": ("all",) * 3 + ("all-similarities",) * 3,
}
"""Row of a mean of weights → rows that were combined."""
BASELINES = "AnglE-BERT-base", "sup-SimCSE-BERT-base", "AnglE-LLaMA2-7B v2"
FIVE = "sts12", "sts14", "sts15", "stsb", "sickr"


@figure("Quality by training compute", "compute")
def compute(data: pd.DataFrame) -> Drawn:
    """Draw the average of five STS sets by the operations of the training, beside published encoders."""
    minilm = one(data, "encoder", "minilm", "average").value
    fig, ax = axes(3.8)
    for (label, places), colour in zip(BY_COMPUTE.items(), (*COLOURS, INK), strict=True):
        operations = [training_operations(data, *place) for place in places]
        lines = [one(data, *place, "average") for place in places]
        values, spread = [line.value for line in lines], [line.sd for line in lines]
        ax.errorbar(operations, values, spread, fmt="-o", ms=4, color=colour, label=label, capsize=2)
    ax.set_xscale("log")
    ax.set_xlim(0.09, 10)
    ax.set_ylim(74, 85.6)
    ax.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    ax.set_xticks([], minor=True)
    known = {f"{row.model} (published)": row for row in PUBLISHED if row.model in BASELINES}
    levels = {label: row.average_over(FIVE, PUBLISHED_TASKS) for label, row in known.items()}
    for label, value in {**levels, "all-MiniLM-L6-v2": minilm}.items():
        ax.axhline(value, ls=":", lw=1, color=INK)
        ax.annotate(label, (0.09, value), xytext=(3, 2), textcoords="offset points", fontsize=8, color=INK)
    ax.set_xlabel("operations of the training, 10$^{15}$")
    ax.set_ylabel(f"{SPEARMAN}, five STS sets")
    ax.grid(axis="y")
    ax.legend(loc="lower right", fontsize=8)
    alone, mean, both = (one(data, "encoder", row, "average").value for row in ("all", "all-seeds", "all-both-seeds"))
    large = [one(data, "real_llm", f"triples-{count}", "average").value for count in (2048, 4096, 8000)]
    return fig, (
        f"SmolLM2-135M with LoRA has {alone:.2f} on five STS sets after NLI triples and entailments (three seeds), the "
        f"mean of the weights of the three {mean:.2f}, with three more trainings with a teacher {both:.2f}; the teacher, "
        f"trained on over a billion pairs, has {minilm:.2f}. Qwen2.5-Coder-1.5B has {large[0]:.2f} after 2,048 triples, "
        f"{large[1]:.2f} after 4,096 and {large[2]:.2f} after 8,000 (one seed). The five sets are STS12, STS14, STS15, STS-B "
        "and SICK-R, on raw text; published figures are on SentEval's text."
    )


def training_operations(data: pd.DataFrame, grid: str, row: str) -> float:
    """Return the operations of a training, in 10^15; of a mean of weights, the sum over the combined rows."""
    rows = MEMBERS.get(row, (row,))
    tokens = sum(one(data, grid, name, "", kind="training", metric="computed tokens").value for name in rows)
    return float(tokens) * OPERATIONS.get(grid, SMOLLM2_OPERATIONS) / 1e15


@figure("Time beside other libraries", "speed")
def speed(data: pd.DataFrame) -> Drawn:
    """Draw the time of other libraries divided by the time of angle_llm, with the peak memory."""
    found = data[(data.metric == "times ours") & (data.row != "angle_llm")]
    if found.empty:
        raise LookupError("no speed comparison")
    tasks = list(dict.fromkeys(found.task))[::-1]
    fig, ax = axes(0.5 * len(tasks) + 0.8)
    for index, (library, lines) in enumerate(found.groupby("row", sort=False)):
        y = [tasks.index(task) + 0.19 - 0.38 * index for task in lines.task]
        ax.barh(y, lines.value, 0.34, color=COLOURS[index], label=library)
        for place, line in zip(y, lines.itertuples(), strict=True):
            ax.plot([line.low, line.high], [place, place], color=INK, lw=1)
            ax.text(max(line.high, line.value) + 0.08, place, f"{line.peak:.1f} GiB", va="center", fontsize=7.5)
    ax.axvline(1, color=INK, lw=1)
    ax.set_yticks(range(len(tasks)), [shorter(data, task) for task in tasks])
    ax.set_xlabel("time ÷ time of angle_llm, least to most; peak memory")
    legend(ax)
    worst, best = found.value.max(), found.value.min()
    return fig, (
        f"The same step or the same texts take the other libraries {best:.1f} to {worst:.1f} times as long as angle_llm."
    )


def shorter(data: pd.DataFrame, task: str) -> str:
    """Return the title of a speed comparison in two lines, with the peak memory of angle_llm."""
    ours = data[(data.metric == "times ours") & (data.row == "angle_llm") & (data.task == task)]
    title = task.replace(" · ", ", ").replace("at most ", "≤ ").replace(" a step", "")
    head, _, rest = title.partition(", ")
    return f"{head}, {rest.partition(', ')[0]}\n{rest.partition(', ')[2]}: {ours.peak.iloc[0]:.1f} GiB"


@figure("First layers, first dimensions", "nested")
def nested(data: pd.DataFrame) -> Drawn:
    """Draw the Spearman correlation of truncated encoders by number of dimensions and by number of layers."""
    found = data[data.kind == "nested"].copy()
    if found.empty:
        raise LookupError("grid nested: no row")
    found[["layers", "dimensions"]] = found.metric.str.extract(r"(\d+) layers, (\d+) dim").astype(int).to_numpy()
    fig, panels = axes(2.9, columns=2)
    for row, colour in zip(("plain", "dimensions", "layers", "both"), COLOURS, strict=False):
        of = found[found.row == row]
        for ax, axis, other in zip(panels, ("dimensions", "layers"), ("layers", "dimensions"), strict=True):
            line = of[of[other] == of[other].max()]
            label = row if row == "plain" else f"trained: {row}"
            ax.plot(line[axis], line.value, "-o", ms=3.5, color=colour, label=label)
            ax.set_xlabel(f"first {axis} kept")
            ax.grid(axis="y")
    panels[0].set_xscale("log", base=2)
    panels[0].set_xticks([32, 64, 128, 256, 576], ["32", "64", "128", "256", "576"])
    panels[0].set_ylabel(f"{SPEARMAN}, STS-B dev")
    legend(panels[0], 2)
    at = found.set_index(["row", "layers", "dimensions"]).value
    return fig, (
        f"A plain model keeps {at['plain', 30, 128]:.1f} of {at['plain', 30, 576]:.1f} at 128 dimensions; after 20 of 30 layers "
        f"it keeps {at['plain', 20, 576]:.1f}, and {at['layers', 20, 576]:.1f} if inner layers were trained too (one seed)."
    )


MODELS = {"MiniLM": "minilm", "SmolLM2": "smollm2", "SmolLM2 after 8,000 triples": "smollm2-nli"}


@figure("Transfer tasks", "transfer")
def transfer(data: pd.DataFrame) -> Drawn:
    """Draw the accuracy of a linear classifier on frozen embeddings by transfer task."""
    tasks = {"mr": "MR", "cr": "CR", "sst2": "SST2", "trec": "TREC", "mrpc": "MRPC"}
    rows = {label: ("transfer", row) for label, row in MODELS.items()}
    where: dict[str, Any] = {"kind": "transfer", "metric": "accuracy"}
    fig = series(data, tasks, rows, "accuracy in %, 95 % interval over examples", **where)
    before, after = (one(data, "transfer", row, "average", **where).value for row in ("smollm2", "smollm2-nli"))
    return fig, f"Training on NLI changes the average accuracy of a linear classifier from {before:.1f} to {after:.1f}."


@figure("Where the gradient goes", "saturation")
def saturation(data: pd.DataFrame) -> Drawn:
    """Draw the fraction of pairs, and of the gradient of each loss term, at a cosine of 0.9 and more."""
    tasks = {"pairs": "pairs", "cosine": "cosine", "in_batch": "in-batch", "angle (phase)": "angle, phase"}
    tasks |= {"angle (reference)": "angle, reference (at 1)", "regression": "regression"}
    rows = {"before training": ("nli", "zero-shot"), "after, published weights": ("nli", "published")}
    rows |= {"after, in-batch": ("nli", "in-batch")}
    where: dict[str, Any] = {"kind": "saturation", "metric": "% at |cosine| >= 0.9"}
    fig = series(data, tasks, rows, "% at |cosine| ≥ 0.9 on STS-B dev (8,000 triples, three seeds)", **where)
    pairs, cosine = (one(data, "nli", "in-batch", task, **where).value for task in ("pairs", "cosine"))
    return fig, (
        f"After training with the in-batch term {pairs:.1f} % of the pairs have a cosine of 0.9 or more; they get {cosine:.1f} % "
        "of the cosine term's gradient."
    )
