"""What is measured on an encoder, kind by kind: from its name to figures that fit in a small JSON file.

The cosine of every pair is kept beside the result (`scores`), where two models can be compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from angle_llm.config import DataSource, ModelSettings, settings_to_dict
from angle_llm.experiments.grid import Measures

if TYPE_CHECKING:
    from angle_llm.evaluate import Interval, StsTask, TaskResult
    from angle_llm.model.encoder import SentenceEncoder

Figures = dict[str, Any]

RESAMPLES = 1000
DENSITIES = ("stsb", "stsb-dev", "mrpc", "issues")
"""Tasks whose cosines are counted by gold score, for the report's density plot."""
GOLD_BINS = 5
COSINE_BINS = 80


@dataclass(frozen=True)
class Kind:
    """One kind of measure."""

    name: str
    asked: Callable[[Measures], Figures | None]
    """What of it is asked for, as plain values; None for nothing. A result that answers something else is not enough."""
    take: Callable[[SentenceEncoder, Measures, Path, Path], Figures]
    """Encoder, what is asked, data directory, file for the cosines of pairs → figures."""


def measure(
    measures: Measures,
    kinds: Sequence[str],
    model: str,
    *,
    as_saved: bool,
    model_settings: ModelSettings,
    data_dir: Path,
    device: str | None,
    scores: Path,
) -> Iterator[tuple[str, Figures]]:
    """Opens the encoder once and takes the named kinds of measure, one after another: kind, `{"asked": …, figures}`.

    A trained model is opened as it was saved, a backbone as `model_settings` say.
    """
    from angle_llm.model.encoder import SentenceEncoder

    how: dict[str, Any] = {}
    if not as_saved:
        how = {
            "prompt": model_settings.prompt,
            "pooling": model_settings.pooling,
            "max_length": model_settings.max_length,
            "dtype": model_settings.dtype,
            "revision": model_settings.revision,
            "bits": model_settings.bits,
        }
    encoder = SentenceEncoder.from_pretrained(model, device=device, **how)
    for kind in KINDS:
        if kind.name in kinds:
            print(f"  measuring {kind.name}", flush=True)
            yield kind.name, {"asked": kind.asked(measures)} | kind.take(encoder, measures, data_dir, scores)


def _sts_asked(measures: Measures) -> Figures | None:
    if not measures.sts and not measures.pairs:
        return None
    pairs = {name: settings_to_dict(source) for name, source in measures.pairs.items()}
    return {"tasks": list(measures.sts), "variant": measures.variant, "pairs": pairs}


def each_set(measures: Measures) -> list[Measures]:
    """The same, a set of pairs at a time."""
    sets = [replace(measures, sts=(name,), pairs={}) for name in measures.sts]
    return sets + [replace(measures, sts=(), pairs={name: source}) for name, source in measures.pairs.items()]


def sts_tasks(measures: Measures, data_dir: Path) -> list[StsTask]:
    """The sets of pairs that are asked for, read."""
    from angle_llm.evaluate import select_tasks

    tasks = select_tasks(measures.sts, data_dir, measures.variant) if measures.sts else []
    return tasks + [pairs_task(name, source) for name, source in measures.pairs.items()]


def _take_sts(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Figures:
    from angle_llm.evaluate import evaluate
    from angle_llm.experiments.scores import save_scores

    tasks = sts_tasks(measures, data_dir)
    results = evaluate(lambda texts: encoder.encode(texts, show_progress=True), tasks, resamples=RESAMPLES)
    save_scores(results.scores, scores)
    return {
        "average": {
            "tasks": list(results.averaged),
            "spearman": results.average,
            "interval": _ends(results.average_interval),
        }
        if results.averaged
        else None,
        "tasks": {name: _sts_figures(task) for name, task in results.tasks.items()},
        "density": {name: _density(task) for name, task in results.tasks.items() if name in DENSITIES},
    }


def _sts_figures(task: TaskResult) -> Figures:
    means = {"subtask_mean": task.mean_over_subtasks, "subtask_weighted": task.weighted_mean_over_subtasks}
    return {
        "label": task.label,
        "variant": task.text,
        "pairs": task.pairs,
        "spearman": task.spearman,
        "interval": _ends(task.interval),
        "pearson": task.pearson,
        **{name: None if mean is None else mean.spearman for name, mean in means.items()},
        "undefined": task.undefined,
    }


def _density(task: TaskResult) -> Figures:
    """How many pairs of each gold score have which cosine: the paper's Figure 5 as counts."""
    cosine_P, gold_P = task.scores
    gold_edges = np.linspace(gold_P.min(), gold_P.max(), GOLD_BINS + 1)
    cosine_edges = np.linspace(-1, 1, COSINE_BINS + 1)
    counts, _, _ = np.histogram2d(gold_P, np.clip(cosine_P, -1, 1), (gold_edges, cosine_edges))
    return {
        "gold_edges": gold_edges.tolist(),
        "cosine_edges": cosine_edges.tolist(),
        "counts": counts.astype(int).tolist(),
    }


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def pairs_task(name: str, source: DataSource) -> StsTask:
    """Scored pairs of a data file as a task.

    Raises:
        DataError: for a file that cannot be read, or holds no scored pairs.
    """
    from angle_llm.data.formats import DataError, ScoredPair
    from angle_llm.data.sources import load_examples
    from angle_llm.evaluate import StsPair, StsTask

    examples = load_examples(source).examples
    pairs = tuple(StsPair(e.left, e.right, e.score) for e in examples if isinstance(e, ScoredPair))
    if not pairs:
        raise DataError(f"{source.path} holds no scored pairs to compare with a score. Set format to scored_pair.")
    return StsTask(name=name, label=name, variant="file", source=source.path, pairs=pairs)


def _saturation_asked(measures: Measures) -> Figures | None:
    return {"pairs": settings_to_dict(measures.saturation)} if measures.saturation is not None else None


def _take_saturation(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Figures:
    import torch

    from angle_llm.data.batching import TextBatch
    from angle_llm.data.sources import load_examples
    from angle_llm.experiments.saturation import saturation

    assert measures.saturation is not None
    examples = load_examples(measures.saturation).examples
    texts = TextBatch.from_examples(examples).texts
    rows_ND = torch.from_numpy(encoder.encode(texts, show_progress=True))
    return saturation(dict(zip(texts, rows_ND, strict=True)), examples)


def _transfer_asked(measures: Measures) -> Figures | None:
    if not measures.transfer:
        return None
    return {
        "tasks": list(measures.transfer),
        "limit_train": measures.transfer_limit,
        "drop_repeated": measures.transfer_drop_repeated,
    }


def _take_transfer(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Figures:
    from angle_llm.evaluate import evaluate_transfer, read_transfer_task

    tasks = [read_transfer_task(data_dir, name) for name in measures.transfer]
    results = evaluate_transfer(
        lambda texts: encoder.encode(texts, show_progress=True),
        tasks,
        limit_train=measures.transfer_limit,
        drop_repeated=measures.transfer_drop_repeated,
    )
    return {
        "average": results.average,
        "tasks": {
            name: {
                "label": task.label,
                "accuracy": task.accuracy,
                "interval": _ends(task.interval),
                "f1": task.f1,
                "majority": task.majority,
                "rows": dict(task.rows),
                "protocol": task.protocol,
                "sampled": task.sampled,
                "repeated": task.repeated,
                "dropped": task.dropped,
                "chosen": task.chosen,
                "unconverged": task.unconverged,
            }
            for name, task in results.tasks.items()
        },
    }


def _retrieval_asked(measures: Measures) -> Figures | None:
    return {"texts": measures.retrieval} if measures.retrieval is not None else None


def _take_retrieval(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Figures:
    from angle_llm.evaluate import evaluate_retrieval, read_flickr30k, read_groups
    from angle_llm.evaluate.retrieval_tasks import FLICKR30K

    assert measures.retrieval is not None
    task = read_flickr30k(data_dir) if measures.retrieval == FLICKR30K else read_groups(measures.retrieval)
    results = evaluate_retrieval(lambda texts: encoder.encode(texts, show_progress=True), [task])
    return {
        "tasks": {
            name: {
                "label": found.label,
                "queries": found.queries,
                "candidates": found.candidates,
                "figures": {
                    which: {"value": figure.value, "interval": _ends(figure.interval)}
                    for which, figure in found.figures.items()
                },
            }
            for name, found in results.tasks.items()
        }
    }


def _nested_asked(measures: Measures) -> Figures | None:
    if measures.nested is None:
        return None
    return {"variant": measures.variant} | {key: list(value) for key, value in vars(measures.nested).items()}


def _take_nested(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Figures:
    from angle_llm.evaluate import select_tasks
    from angle_llm.evaluate.nested import quality_curve

    assert measures.nested is not None
    tasks = select_tasks(measures.nested.tasks, data_dir, measures.variant)
    points = quality_curve(encoder, tasks, layers=measures.nested.layers, dimensions=measures.nested.dimensions)
    layers = sorted({point.layers for point in points})
    dimensions = sorted({point.dimensions for point in points})
    mean = {(point.layers, point.dimensions): point.mean for point in points}
    return {
        "layers": layers,
        "dimensions": dimensions,
        "spearman": [[mean[depth, width] for width in dimensions] for depth in layers],
    }


KINDS: tuple[Kind, ...] = (
    Kind("sts", _sts_asked, _take_sts),
    Kind("saturation", _saturation_asked, _take_saturation),
    Kind("transfer", _transfer_asked, _take_transfer),
    Kind("retrieval", _retrieval_asked, _take_retrieval),
    Kind("nested", _nested_asked, _take_nested),
)
