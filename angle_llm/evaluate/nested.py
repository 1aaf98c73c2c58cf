"""STS scores of an encoder cut to fewer layers and dimensions.

    sentences ──► one pass through all layers ──► (N, M, D) ──► cut to m layers and k columns ──► Spearman per task

Dimensions: N texts, M numbers of layers, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from angle_llm.evaluate.encoding import (
    Encode,
    EncoderSettings,
    OpenedEncoder,
    OpenEncoder,
    evaluation_main,
)
from angle_llm.evaluate.results import markdown_table, notes_list, number
from angle_llm.evaluate.sts import evaluate
from angle_llm.evaluate.sts_tasks import StsTask, select_tasks, variant_of

METRIC = "Spearman × 100 on STS tasks"


@dataclass(frozen=True, kw_only=True)
class NestedEvalSettings(EncoderSettings):
    """Spearman correlation on STS tasks of an encoder cut to its first layers and dimensions, from one encoding."""

    data_dir: Path | None = None
    """Directory with sts/, stsb/, sick/, as for eval/sts.py. None: the Hugging Face hub."""

    tasks: tuple[str, ...] = ("stsb",)
    """Task names or TSV files, as for eval/sts.py."""

    variant: Literal["auto", "raw", "senteval"] = "auto"
    """Text of the sentences, as for eval/sts.py."""

    layers: tuple[int, ...] = ()
    """Numbers of layers to cut to. All layers are always included."""

    dimensions: tuple[int, ...] = ()
    """Numbers of dimensions to cut to. Empty: halves of halves, down to 8. All dimensions are always included."""

    plot: Path | None = None
    """Draw the curve to this file, .png or .svg (needs matplotlib)."""


class LayeredEncoder(OpenedEncoder, Protocol):
    """An encoder that returns the output of inner layers, such as `SentenceEncoder`."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def dimensions(self) -> int:
        """D."""

    def encode_layers(
        self,
        texts: Sequence[str],
        layers: Sequence[int],
        *,
        micro_batch_tokens: int | None = None,
        show_progress: bool = False,
    ) -> NDArray[np.floating[Any]]:
        """Embeddings (N, M, D) after each of the M numbers of layers."""
        ...


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
    """Read the tasks, open the encoder, evaluate every cut, print the table, write the JSON file."""
    variant = variant_of(settings.data_dir) if settings.variant == "auto" else settings.variant
    tasks = select_tasks(settings.tasks, settings.data_dir, variant)

    def evaluate(encoder: LayeredEncoder) -> list[Point]:
        return quality_curve(
            encoder,
            tasks,
            layers=settings.layers,
            dimensions=settings.dimensions or halves(encoder.dimensions),
            micro_batch_tokens=settings.micro_batch_tokens,
        )

    def report(points: list[Point], model: str, remarks: Sequence[str]) -> str:
        return nested_report(points, model, remarks, [task.label for task in tasks])

    def content(points: list[Point]) -> dict[str, Any]:
        return {"points": [asdict(point) | {"mean": point.mean} for point in points]}

    return evaluation_main(settings, open_encoder, evaluate, report, METRIC, content)


def quality_curve(
    encoder: LayeredEncoder,
    tasks: Sequence[StsTask],
    *,
    layers: Sequence[int],
    dimensions: Sequence[int],
    micro_batch_tokens: int | None = None,
) -> list[Point]:
    """A point for each number of layers and of dimensions, all of them included, in ascending order.

    Texts are encoded once; the embeddings of all layers, N × M × D numbers, are in memory.

    Raises `ValueError` for layers or dimensions that the encoder does not have, and like `evaluate`.
    """
    depths = sorted({*layers, encoder.layers})
    widths = sorted({*dimensions, encoder.dimensions})
    valid = widths[0] >= 1 and widths[-1] == encoder.dimensions and depths[0] >= 1 and depths[-1] == encoder.layers
    if not valid:
        raise ValueError(
            f"--layers, --dimensions: expected 1 to {encoder.layers} layers and 1 to {encoder.dimensions} dimensions, got "
            f"{list(layers)} and {list(dimensions)}."
        )
    read: list[NDArray[np.floating[Any]]] = []

    def cut(place: int, width: int) -> Encode:
        def encode(texts: list[str]) -> NDArray[np.floating[Any]]:
            if not read:  # all cuts get the same texts in the same order
                read.append(
                    encoder.encode_layers(texts, depths, micro_batch_tokens=micro_batch_tokens, show_progress=True)
                )
            return read[0][:, place, :width]

        return encode

    points = []
    for place, depth in enumerate(depths):
        for width in widths:
            results = evaluate(cut(place, width), tasks)
            spearman = {name: task.spearman for name, task in results.tasks.items()}
            points.append(Point(depth, width, spearman))
    return points


def halves(dimensions: int) -> list[int]:
    """Half of the dimensions, a quarter, and so on down to 8, ascending."""
    found = [dimensions // 2]
    while found[-1] // 2 >= 8:
        found.append(found[-1] // 2)
    return found[::-1]


def nested_report(points: Sequence[Point], model: str, remarks: Sequence[str], labels: Sequence[str]) -> str:
    """Markdown: mean Spearman × 100 by number of layers and dimensions."""
    widths = sorted({point.dimensions for point in points})
    means = {(point.layers, point.dimensions): point.mean for point in points}
    depths = sorted({point.layers for point in points})
    rows = [[str(depth), *(number(means[depth, width]) for width in widths)] for depth in depths]
    header = ["layers \\ dimensions", *map(str, widths)]
    title = f"{model}: {METRIC}, mean over {', '.join(labels)}."
    return "\n\n".join([title, markdown_table(header, rows, words=0), notes_list(remarks)]) + "\n"
