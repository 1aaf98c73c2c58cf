"""Nested evaluation: STS scores of an encoder that is cut to fewer layers and dimensions.

    python eval/nested.py --model DIR --tasks starter:graded_pairs.tsv --layers 6 12 --dimensions 64 128
    python eval/nested.py --model DIR --data-dir DATA --tasks stsb sickr

    sentences ──► the first m layers ──► (N, D) ──► the first k columns ──► Spearman per task

Dimensions: N texts, D columns, K kept columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from angle_llm.cli import run_cli
from angle_llm.evaluate.encoding import Encode, EncoderFacts, encode_functions, open_encoder, write_results
from angle_llm.evaluate.held_out import cached
from angle_llm.evaluate.results import report, table
from angle_llm.evaluate.sts import evaluate
from angle_llm.evaluate.sts_tasks import StsTask, select_tasks
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.model.vectors import with_one_prompt
from angle_llm.settings.commands import StsTaskSettings
from angle_llm.settings.parsing import Positive, parse_settings, settings_class

METRIC = "Spearman × 100 on STS tasks"


@settings_class
class NestedEvalSettings(StsTaskSettings):
    """Spearman correlation on STS tasks of an encoder that is cut to its first layers and dimensions."""

    tasks: tuple[str, ...] = ("stsb",)
    """Names of STS tasks, or files of scored pairs, as in eval sts."""

    layers: tuple[Positive, ...] = ()
    """Numbers of layers to keep, such as 6 12. The full number is always evaluated too."""

    dimensions: tuple[Positive, ...] = ()
    """Numbers of dimensions to keep. Empty: 1/2, 1/4, … of the dimensions, down to 8. The full number is always evaluated
    too."""


@dataclass(frozen=True)
class Point:
    """Spearman × 100 by task name of an encoder that is cut to `layers` layers and `dimensions` dimensions."""

    layers: int
    dimensions: int
    spearman: dict[str, float]

    @property
    def mean(self) -> float:
        """Mean of Spearman × 100 over the tasks; NaN if a correlation is NaN."""
        return sum(self.spearman.values()) / len(self.spearman)


def nested_main(settings: NestedEvalSettings) -> list[Point]:
    """Evaluate the model cut to fewer layers and dimensions, print and write the results.

    All combinations of the numbers of layers and dimensions are evaluated.
    """
    tasks = select_tasks(settings.tasks, settings.data_dir, settings.variant, settings.columns, settings.score_range)

    encoder = with_one_prompt(open_encoder(settings, settings.model), settings.side)
    points = quality_curve(
        encoder,
        tasks,
        layers=settings.layers,
        dimensions=settings.dimensions or halves(encoder.dimensions),
    )
    depths, widths = ({getattr(point, name): None for point in points} for name in ("layers", "dimensions"))
    means = {(point.layers, point.dimensions): point.mean for point in points}
    rows = [[str(depth), *(means[depth, width] for width in widths)] for depth in depths]
    shown = table(["layers \\ dimensions", *map(str, widths)], rows, words=0)
    facts = EncoderFacts.of(encoder)
    notes = [f"{METRIC}, mean over {', '.join(task.label for task in tasks)}.", str(facts)]
    content = {"points": [asdict(point) | {"mean": point.mean} for point in points]}
    write_results(settings, METRIC, report(settings.model, [shown], notes), content, facts)
    return points


def quality_curve(
    encoder: SentenceEncoder,
    tasks: Sequence[StsTask],
    *,
    layers: Sequence[int],
    dimensions: Sequence[int],
) -> list[Point]:
    """Return Spearman × 100 on STS tasks of an encoder cut to each combination of numbers of layers and dimensions.

    The full numbers are included; results are in ascending order of layers, then dimensions. Texts are encoded once for
    each number of layers.

    Raises:
        ValueError: for more layers or dimensions than the encoder has, no tasks, equal task names, or embeddings that
            are not finite.
    """
    depths = sorted({*layers, encoder.layers})
    widths = sorted({*dimensions, encoder.dimensions})
    valid = widths[0] >= 1 and widths[-1] == encoder.dimensions and depths[0] >= 1 and depths[-1] == encoder.layers
    if not valid:
        raise ValueError(
            f"--layers, --dimensions: expected 1 to {encoder.layers} layers and 1 to {encoder.dimensions} dimensions, got "
            f"{list(layers)} and {list(dimensions)}."
        )
    points = []
    for depth in depths:
        encode = cached(encode_functions(encoder.truncated(layers=depth))[0])
        for width in widths:
            results = evaluate(partial(_first_columns, encode, width), tasks)
            points.append(Point(depth, width, {name: task.spearman for name, task in results.tasks.items()}))
    return points


def _first_columns(encode: Encode, width: int, texts: list[str], **options: Any) -> NDArray[Any]:
    """Return the first `width` columns of the embeddings of texts."""
    return np.asarray(encode(texts, **options))[:, :width]


def halves(dimensions: int) -> list[int]:
    """Return 1/2, 1/4, 1/8, … of a number of dimensions, down to 8, in ascending order."""
    return [dimensions >> p for p in range(dimensions.bit_length(), 0, -1) if dimensions >> p >= 8]


if __name__ == "__main__":
    run_cli(lambda: nested_main(parse_settings(NestedEvalSettings, description=__doc__ or "")))
