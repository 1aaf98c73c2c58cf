"""Figures of the report. Each function takes the summary of `report.summarise` and returns a figure and one sentence.

A figure whose rows have not been measured raises LookupError; the page then names what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
from report_plots import (
    BLUE,
    COLOURS,
    DIFFERENCE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SPEARMAN,
    Drawn,
    axes,
    dots,
    legend,
    listed,
    names,
    one,
    pick,
    series,
)

Draw = Callable[[pd.DataFrame], Drawn]
FIGURES: dict[str, Draw] = {}
"""Title → function. The first three are on the first screen."""
TERMS = {
    "ablation": (
        "512 NLI triples, STS-B dev",
        "stsb-dev",
        "in-batch-cosine in-batch-angle all published simcse cosine angle-phase cosine-angle angle-reference",
    ),
    "nli": ("8,000 NLI triples, five sets", "average", "published simcse cosent regression"),
    "graded": (
        "1,024 graded pairs, STS-B dev",
        "stsb-dev",
        "angle-phase cosine-angle cosine-in-batch all in-batch regression angle-reference",
    ),
    "long": ("256 pairs of bug reports", "issues", "in-batch-cosine in-batch-angle cosine-angle cosine angle-phase"),
}
"""Grid → heading, task, rows of the forest plot."""


def figure(title: str) -> Callable[[Draw], Draw]:
    """Register a figure under its title."""

    def register(draw: Draw) -> Draw:
        FIGURES[title] = draw
        return draw

    return register


@figure("Quality by number of training triples")
def quality(data: pd.DataFrame) -> Drawn:
    """Draw Spearman before training and after 512 to 43,410 NLI triples."""
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


@figure("Time beside other libraries")
def speed(data: pd.DataFrame) -> Drawn:
    """Draw the time of the same work divided by ours, with the peak memory."""
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
        f"On two CPU cores the same step or the same texts take the other libraries {best:.1f} to {worst:.1f} times as "
        "long; losses and vectors are equal."
    )


def shorter(data: pd.DataFrame, task: str) -> str:
    """Return the title of a speed comparison in two lines, with our peak memory."""
    ours = data[(data.metric == "times ours") & (data.row == "angle_llm") & (data.task == task)]
    title = task.replace(" · ", ", ").replace("at most ", "≤ ").replace(" a step", "")
    head, _, rest = title.partition(", ")
    return f"{head}, {rest.partition(', ')[0]}\n{rest.partition(', ')[2]}: {ours.peak.iloc[0]:.1f} GiB"


@figure("Which loss terms help")
def terms(data: pd.DataFrame) -> Drawn:
    """Draw a forest plot: each row minus its reference, on four kinds of data."""
    parts = {grid: pick(data, grid, rows, task, kind="difference") for grid, (_, task, rows) in TERMS.items()}
    fig, ax = axes(0.235 * sum(len(found) + 1.4 for found in parts.values()) + 0.4, width=6.6)
    y, headings = 0.0, []
    for (grid, found), colour in zip(parts.items(), COLOURS, strict=False):
        reference = one(data, grid, found.reference.iloc[0], TERMS[grid][1]).label.split(", sym")[0]
        places = [y - 1 - index for index in range(len(found))]
        dots(ax, found.assign(trained=True), places, colour)
        headings += [(y, f"{TERMS[grid][0]}; reference: {reference}"), *zip(places, found.label, strict=True)]
        y = places[-1] - 1.4
    ax.axvline(0, color=INK, lw=1)
    ax.set_xlim(-15, 4)
    ax.set_ylim(y + 0.7, 0.7)
    ax.set_yticks([at for at, _ in headings], [label.split(", in-batch")[0] for _, label in headings], fontsize=8)
    for tick, (_, label) in zip(ax.get_yticklabels(), headings, strict=True):
        tick.set_fontweight("bold" if "; reference" in label else "normal")
    ax.set_xlabel(f"{DIFFERENCE} (filled: three seeds, interval over seeds; hollow: one seed, over pairs)")
    ax.grid(axis="x")
    most = one(data, "nli", "published", "average", kind="difference")
    return fig, (
        "On binary data no term was seen to add to the in-batch term: at 8,000 triples the published weights differ by "
        f"{most.value:+.2f} ({most.low:+.2f} to {most.high:+.2f}); on graded scores cosine and angle are ahead of it."
    )


@figure("First layers, first dimensions")
def nested(data: pd.DataFrame) -> Drawn:
    """Draw Spearman of cut encoders, by number of dimensions and by number of layers."""
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


@figure("Cosine by gold score")
def by_score(data: pd.DataFrame) -> Drawn:
    """Draw the mean cosine with quartiles by human score, before and after training."""
    fig, ax = axes(2.7)
    of_test = data[(data.grid == "nli") & (data.task == "stsb") & data.metric.str.startswith("cosine at")]
    for label, row, colour in (("before", "zero-shot", GREY), ("after 8,000 triples", "in-batch", BLUE)):
        found = of_test[of_test.row == row]
        if found.empty:
            raise LookupError(f"grid nli: no cosines of {row}")
        ends = found.metric.str.extract(r"score (\S+) to (\S+)").astype(float)
        ax.plot(ends.mean(axis=1), found.value, "-o", ms=4, color=colour, label=label)
        ax.fill_between(ends.mean(axis=1), found.low, found.high, color=colour, alpha=0.2, lw=0)
    ax.set_xlabel("human score, STS-B test")
    ax.set_ylabel("cosine (band: quartiles)")
    ax.grid(axis="y")
    ax.legend()
    return fig, "Training spreads the cosines: before, nearly all pairs lie above 0.9 whatever their score."


@figure("Trained and tested on one set")
def one_set(data: pd.DataFrame) -> Drawn:
    """Draw Spearman before and after training on the train split of the same set."""
    sets = {
        "stsb": ("stsb", "STS-B"),
        "sick": ("sickr", "SICK-R"),
        "mrpc": ("mrpc", "MRPC"),
        "issues": ("issues", "issues"),
    }
    before = pd.concat([pick(data, "nontransfer", "zero-shot", task) for task, _ in sets.values()])
    after = pd.concat([pick(data, "nontransfer", row, task) for row, (task, _) in sets.items()])
    fig, ax = axes(2.2)
    y = list(range(len(sets)))[::-1]
    dots(ax, before, y, GREY, "untrained")
    dots(ax, after, y, BLUE, "trained on its train split (one seed)")
    names(ax, y, [name for _, name in sets.values()], f"{SPEARMAN}, 95 % interval over pairs")
    legend(ax)
    gains = after.value.to_numpy() - before.value.to_numpy()
    low, high = gains.min(), gains.max()
    return fig, f"Training on a set's own train split adds {low:.0f} to {high:.0f} points (one seed each)."


MODELS = {"MiniLM": "minilm", "SmolLM2": "smollm2", "SmolLM2 after 8,000 triples": "smollm2-nli"}


@figure("Transfer tasks")
def transfer(data: pd.DataFrame) -> Drawn:
    """Draw the accuracy of a linear classifier on frozen embeddings."""
    tasks = {"mr": "MR", "cr": "CR", "sst2": "SST2", "trec": "TREC", "mrpc": "MRPC"}
    rows = {label: ("transfer", row) for label, row in MODELS.items()}
    where: dict[str, Any] = {"kind": "transfer", "metric": "accuracy"}
    fig = series(data, tasks, rows, "accuracy in %, 95 % interval over examples", **where)
    before, after = (one(data, "transfer", row, "average", **where).value for row in ("smollm2", "smollm2-nli"))
    return fig, f"Training on NLI changes the average accuracy of a linear classifier from {before:.1f} to {after:.1f}."


@figure("Caption retrieval, Flickr30k")
def retrieval(data: pd.DataFrame) -> Drawn:
    """Draw strict accuracy, recall, MRR and nDCG of captions."""
    metrics = ("strict", "in top 5", "R@1", "R@5", "R@10", "R@100", "MRR", "nDCG@10")
    found = data[(data.kind == "retrieval") & data.metric.isin(metrics)].assign(task=lambda d: d.metric, metric="value")
    rows = {label: ("transfer", row) for label, row in MODELS.items()}
    where: dict[str, Any] = {"kind": "retrieval", "metric": "value"}
    fig = series(found, {name: name for name in metrics}, rows, "× 100, 95 % interval over queries", **where)
    minilm, before, after = (one(found, "transfer", row, "strict", **where).value for row in MODELS.values())
    return fig, (
        f"Strict accuracy (an image's first caption finds exactly the other four) goes from {before:.1f} to {after:.1f}; "
        f"MiniLM, which was trained on Flickr30k, has {minilm:.1f}. 257 of the captions are anchors of the NLI triples."
    )


@figure("Where the gradient goes")
def saturation(data: pd.DataFrame) -> Drawn:
    """Draw the share of pairs, and of each term's gradient, at a cosine of 0.9 and more."""
    tasks = {"pairs": "pairs", "cosine": "cosine", "in_batch": "in-batch", "angle (phase)": "angle, phase"}
    tasks |= {"angle (reference)": "angle, reference", "regression": "regression"}
    rows = {"before training": ("nli", "zero-shot"), "after, published weights": ("nli", "published")}
    rows |= {"after, in-batch": ("nli", "in-batch")}
    where: dict[str, Any] = {"kind": "saturation", "metric": "% at |cosine| >= 0.9"}
    fig = series(data, tasks, rows, "% at |cosine| ≥ 0.9 on STS-B dev (8,000 triples, three seeds)", **where)
    pairs, cosine = (one(data, "nli", "in-batch", task, **where).value for task in ("pairs", "cosine"))
    return fig, (
        f"After training with the in-batch term {pairs:.1f} % of the pairs have a cosine of 0.9 or more; they get {cosine:.1f} % "
        "of the cosine term's gradient."
    )


FIGURES["Prompt, without training"] = partial(
    listed,
    grid="prompts",
    task="average",
    xlabel="average of five sets",
    colour=BLUE,
    sentence="prompteol is {difference[prompteol].value:+.2f} beside summarize_one_word ({difference[prompteol].low:.2f} to "
    "{difference[prompteol].high:.2f}); without a prompt the last token is of little use ({value[plain]:.1f}).",
)
FIGURES["Text variant"] = partial(
    listed,
    grid="variants",
    rows="zero-shot zero-shot-senteval zero-shot-senteval-edited trained trained-senteval trained-senteval-edited",
    task="average",
    xlabel="average of STS12, 14, 15, STS-B",
    colour=PURPLE,
    sentence="Without training {value[zero-shot]:.2f} as released and {value[zero-shot-senteval]:.2f} on SentEval's text; after "
    "8,000 triples {value[trained]:.2f} and {value[trained-senteval]:.2f} (one seed).",
)
FIGURES["Graded pairs on all-MiniLM-L6-v2"] = partial(
    listed,
    grid="bert",
    task="stsb",
    xlabel="STS-B test",
    colour=GREEN,
    sentence="On an encoder that ranks well already ({value[untrained]:.1f}) the cosine term at its usual temperature of 0.05 "
    "gives {value[stsb-cosine]:.1f}, at 0.2 {value[stsb-cosine-soft]:.1f} (one seed).",
)
FIGURES["Hard negatives on all-MiniLM-L6-v2"] = partial(
    listed,
    grid="mining_minilm",
    task="stsb-dev",
    kind="difference",
    xlabel="STS-B dev, to positives alone",
    colour=RED,
    sentence="Contradictions that people wrote add {difference[human].value:+.2f}, mined texts {difference[mined].value:+.2f} "
    "({difference[mined].low:.2f} to {difference[mined].high:.2f}, three seeds), to an encoder with little left to gain.",
)
FIGURES["Pairs written by a language model"] = partial(
    listed,
    grid="supervision",
    task="stsb",
    xlabel="STS-B test",
    colour=ORANGE,
    sentence="SmolLM2 goes from {value[smollm2-none]:.1f} to {value[smollm2-judged]:.1f} on pairs that it wrote itself and "
    "MiniLM judged, and to {value[smollm2-human]:.1f} on as many human scores (one seed).",
)
