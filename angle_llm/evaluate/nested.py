"""How much is lost when an encoder is cut: Spearman after every number of layers, at every number of dimensions.

    sentences ──► one pass through all layers ──► (N, M, D) ──► cut to m layers and k columns ──► Spearman per task

`eval/nested.py` reads `NestedEvalSettings` from the command line, hands them to `nested_main` and draws the curve.

Legend: N texts, M numbers of layers, D dimensions.
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
    open_from,
    remark_on,
    used_by,
)
from angle_llm.evaluate.sts import evaluate
from angle_llm.evaluate.sts_tasks import StsTask, select_tasks, variant_of
from angle_llm.io import plain, write_json


@dataclass(frozen=True, kw_only=True)
class NestedEvalSettings(EncoderSettings):
    """Spearman correlation on STS tasks of an encoder cut to its first layers and dimensions, from one encoding."""

    data_dir: Path | None = None
    """Directory with sts/, stsb/, sick/, as eval/sts.py takes it. None: the Hugging Face hub."""

    tasks: tuple[str, ...] = ("stsb",)
    """Task names or TSV files, as eval/sts.py takes them."""

    variant: Literal["auto", "raw", "senteval"] = "auto"
    """Text of the sentences, as eval/sts.py takes it."""

    layers: tuple[int, ...] = ()
    """Numbers of layers to cut to. All layers are always measured."""

    dimensions: tuple[int, ...] = ()
    """Numbers of dimensions to cut to. Empty: halves of halves, down to 8. All dimensions are always measured."""

    plot: Path | None = None
    """Draw the curve to this file, .png or .svg (needs matplotlib)."""


class LayeredEncoder(OpenedEncoder, Protocol):
    """An encoder whose inner layers can be read, such as `SentenceEncoder`."""

    @property
    def layers(self) -> int:
        """How many there are."""

    @property
    def dimensions(self) -> int:
        """D, how many numbers a vector has."""

    def encode_layers(
        self,
        texts: Sequence[str],
        layers: Sequence[int],
        *,
        micro_batch_tokens: int | None = None,
        show_progress: bool = False,
    ) -> NDArray[np.floating[Any]]:
        """Vectors (N, M, D) after so many layers each."""
        ...


@dataclass(frozen=True)
class Point:
    """What an encoder cut to `layers` and `dimensions` reaches: Spearman × 100 by task, and the mean over tasks."""

    layers: int
    dimensions: int
    spearman: dict[str, float]

    @property
    def mean(self) -> float:
        """NaN if that of a task is."""
        return sum(self.spearman.values()) / len(self.spearman)


def nested_main(settings: NestedEvalSettings, open_encoder: OpenEncoder) -> list[Point]:
    """Read the tasks, open the encoder, measure every cut, print the table and write the JSON file where one is asked
    for."""
    variant = variant_of(settings.data_dir) if settings.variant == "auto" else settings.variant
    tasks = select_tasks(settings.tasks, settings.data_dir, variant)
    encoder: Any = open_from(settings, open_encoder)
    points = quality_curve(
        encoder,
        tasks,
        layers=settings.layers,
        dimensions=settings.dimensions or halves(encoder.dimensions),
        micro_batch_tokens=settings.micro_batch_tokens,
    )
    print(table(points, settings.model, [task.label for task in tasks], remark_on(encoder)), end="")
    if settings.json is not None:
        found = [asdict(point) | {"mean": point.mean} for point in points]
        content = {"model": settings.model, "encoder": used_by(encoder), "settings": plain(settings)}
        write_json(settings.json, content | {"points": plain(found)})
    return points


def quality_curve(
    encoder: LayeredEncoder,
    tasks: Sequence[StsTask],
    *,
    layers: Sequence[int],
    dimensions: Sequence[int],
    micro_batch_tokens: int | None = None,
) -> list[Point]:
    """A point for every number of layers at every number of dimensions, all of either included, in ascending order.

    The texts go through the encoder once. It takes memory for the vectors of all layers asked for: N × M × D numbers.

    Raises `ValueError` for layers or dimensions that are not there, and as `evaluate` does.
    """
    depths = sorted({*layers, encoder.layers})
    widths = sorted({*dimensions, encoder.dimensions})
    there = widths[0] >= 1 and widths[-1] == encoder.dimensions and depths[0] >= 1 and depths[-1] == encoder.layers
    if not there:
        raise ValueError(
            f"the encoder has {encoder.layers} layers and {encoder.dimensions} dimensions to be cut to; asked for were layers "
            f"{list(layers)} and dimensions {list(dimensions)}."
        )
    read: list[NDArray[np.floating[Any]]] = []

    def cut(place: int, width: int) -> Encode:
        def encode(texts: list[str]) -> NDArray[np.floating[Any]]:
            if not read:  # every other cut is asked for the same texts in the same order
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
    """Half of them, half of that, and so on, down to 8."""
    found = [dimensions // 2]
    while found[-1] // 2 >= 8:
        found.append(found[-1] // 2)
    return found[::-1]


def table(points: Sequence[Point], model: str, labels: Sequence[str], remark: str) -> str:
    """The means for a reader, a line for each number of layers."""
    widths = sorted({point.dimensions for point in points})
    means = {(point.layers, point.dimensions): point.mean for point in points}
    lines = [
        f"{model}: Spearman × 100, mean over {', '.join(labels)}. {remark}",
        "",
        "| layers \\ dimensions | " + " | ".join(map(str, widths)) + " |",
        "|---:|" + "---:|" * len(widths),
    ]
    for depth in sorted({point.layers for point in points}):
        lines.append(f"| {depth} | " + " | ".join(f"{means[depth, width]:.2f}" for width in widths) + " |")
    return "\n".join(lines) + "\n"
