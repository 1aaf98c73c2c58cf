"""STS scores of an encoder cut to fewer layers and dimensions.

    sentences ──► one pass through all layers ──► (N, M, D) ──► cut to m layers and k columns ──► Spearman per task

Dimensions: N texts, M numbers of layers, D columns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angle_llm.evaluate.encoding import Encode, OpenEncoder, check_names, evaluated, finish
from angle_llm.evaluate.results import report, table
from angle_llm.evaluate.sts import evaluate
from angle_llm.evaluate.sts_tasks import StsTask, StsTaskSettings, select_tasks
from angle_llm.settings_io import Positive, need_library, settings_class

if TYPE_CHECKING:
    from angle_llm.model.encoder import SentenceEncoder

METRIC = "Spearman × 100 on STS tasks"


@settings_class
class NestedEvalSettings(StsTaskSettings):
    """Spearman correlation on STS tasks of an encoder cut to its first layers and dimensions, from one encoding."""

    tasks: tuple[str, ...] = ("stsb",)
    """Names of STS tasks, or files of scored pairs, as in eval sts."""

    layers: tuple[Positive, ...] = ()
    """Numbers of layers to cut to. All layers are always included."""

    dimensions: tuple[Positive, ...] = ()
    """Numbers of dimensions to cut to. Empty: halves of halves, down to 8. All dimensions are always included."""

    plot: Path | None = None
    """Draw the curve to this file, .png or .svg (needs matplotlib)."""


@dataclass(frozen=True)
class Point:
    """Spearman × 100 by task of an encoder cut to `layers` and `dimensions`."""

    layers: int
    dimensions: int
    spearman: dict[str, float]

    @property
    def mean(self) -> float:
        """Mean over tasks; NaN if one is NaN."""
        return sum(self.spearman.values()) / len(self.spearman)


def nested_main(settings: NestedEvalSettings, open_encoder: OpenEncoder) -> list[Point]:
    """Read the tasks, open the encoder, evaluate every cut, print the table, write the JSON file, draw the curve."""
    tasks = select_tasks(settings.tasks, settings.data_dir, settings.variant)
    if settings.plot is not None:
        need_library("matplotlib", "--plot", "bench")
        settings.plot.parent.mkdir(parents=True, exist_ok=True)

    def curve(encoder: SentenceEncoder, _: Encode, __: Encode | None) -> list[Point]:
        return quality_curve(
            encoder,
            tasks,
            layers=settings.layers,
            dimensions=settings.dimensions or halves(encoder.dimensions),
            micro_batch_tokens=settings.micro_batch_tokens,
        )

    points, used = evaluated(settings, open_encoder, curve, single_texts=True)
    depths, widths = ({getattr(point, name): None for point in points} for name in ("layers", "dimensions"))
    means = {(point.layers, point.dimensions): point.mean for point in points}
    rows = [[str(depth), *(means[depth, width] for width in widths)] for depth in depths]
    shown = table(["layers \\ dimensions", *map(str, widths)], rows, words=0)
    notes = [f"{METRIC}, mean over {', '.join(task.label for task in tasks)}.", str(used)]
    content = {"points": [asdict(point) | {"mean": point.mean} for point in points]}
    finish(settings, METRIC, report(settings.model, [shown], notes), content, used)
    if settings.plot is not None:
        plot(points, settings.plot)
    return points


def quality_curve(
    encoder: SentenceEncoder,
    tasks: Sequence[StsTask],
    *,
    layers: Sequence[int],
    dimensions: Sequence[int],
    micro_batch_tokens: int | None = None,
) -> list[Point]:
    """Return a point for each number of layers and of dimensions, all of them included, in ascending order.

    Texts are encoded once; the embeddings of all layers, N × M × D numbers, are in memory.

    Raises:
        ValueError: for layers or dimensions that the encoder does not have, and like `evaluate`.
    """
    check_names([task.name for task in tasks])
    depths = sorted({*layers, encoder.layers})
    widths = sorted({*dimensions, encoder.dimensions})
    valid = widths[0] >= 1 and widths[-1] == encoder.dimensions and depths[0] >= 1 and depths[-1] == encoder.layers
    if not valid:
        raise ValueError(
            f"--layers, --dimensions: expected 1 to {encoder.layers} layers and 1 to {encoder.dimensions} dimensions, got "
            f"{list(layers)} and {list(dimensions)}."
        )
    texts = list(dict.fromkeys(text for task in tasks for pair in task.pairs for text in pair[:2]))  # as in `evaluate`
    encoded_NMD = encoder.encode_layers(texts, depths, micro_batch_tokens=micro_batch_tokens, show_progress=True)
    points = []
    for place, depth in enumerate(depths):
        for width in widths:
            rows_NK = encoded_NMD[:, place, :width]
            results = evaluate(lambda _, rows=rows_NK: rows, tasks)  # type: ignore[misc]
            points.append(Point(depth, width, {name: task.spearman for name, task in results.tasks.items()}))
    return points


def halves(dimensions: int) -> list[int]:
    """Return half of the dimensions, a quarter, and so on down to 8, ascending."""
    found = [dimensions // 2]
    while found[-1] // 2 >= 8:
        found.append(found[-1] // 2)
    return found[::-1]


def plot(points: Sequence[Point], path: Path) -> None:
    """Draw the mean over the number of dimensions, a line for every number of layers."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for depth in sorted({point.layers for point in points}, reverse=True):
        line = [(point.dimensions, point.mean) for point in points if point.layers == depth]
        axes.plot(*zip(*line, strict=True), marker="o", label=f"{depth} layers")
    widths = sorted({point.dimensions for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("dimensions kept")
    axes.set_ylabel("Spearman × 100, mean over " + ", ".join(points[0].spearman))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
