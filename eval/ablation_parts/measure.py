"""Measure an encoder, and return the measurements as rows of the results file.

A measurement is a dictionary with some of these columns; `ablation` adds grid, row and seed:

    kind                   sts, saturation, transfer, retrieval, nested, training or difference
    task, text             name of the dataset, and variant of its text
    metric, value          value × 100, except losses, counts and cosines
    low, high              95 % interval over pairs or queries; for a cosine, quartiles
    n                      number of pairs, queries or test rows
    reference, p           for a paired difference: the reference row, and the two-sided p-value
    note                   reason why the value is missing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nested import quality_curve
from transfer import evaluate_transfer
from transfer_tasks import read_transfer_task

from ablation_parts.grid import Measures, below
from ablation_parts.results import DIFFERED, FILES, QUERIES, Measurement, measurement, save_queries, save_scores
from ablation_parts.saturation import saturation
from angle_llm.data.batch import TextBatch
from angle_llm.data.examples import load_examples
from angle_llm.data.sources import evaluation_source
from angle_llm.evaluate import (
    PairScores,
    evaluate,
    evaluate_retrieval,
    read_groups,
    select_tasks,
)
from angle_llm.evaluate.encoding import encode_functions
from angle_llm.evaluate.retrieval_tasks import RetrievalTask, read_beir
from angle_llm.evaluate.sts_tasks import read_examples
from angle_llm.model.encoder import SentenceEncoder
from angle_llm.settings.train import ModelSettings

BY_SCORE = ("stsb", "stsb-dev", "mrpc", "issues")
"""Names of STS tasks for which the cosine is also summarised by range of the gold score."""
SCORE_BINS = 5
"""Number of equal ranges into which the gold score is divided."""


def encoder_options(model: ModelSettings) -> dict[str, Any]:
    """Return the arguments of `SentenceEncoder.from_pretrained` that open a base model in the same way as training."""
    options = {name: getattr(model, name) for name in ("prompt", "pooling", "max_length", "dtype", "attention")}
    return options if model.bits is None else options | {"bits": model.bits}  # otherwise the bits of a saved encoder


def measure(encoder: SentenceEncoder, measures: Measures, kind: str, data_dir: Path, scores: Path) -> list[Measurement]:
    """Measure an encoder, and return the measurements of one kind, such as `sts`.

    The scores of all pairs (kind `sts`) are written to the file `scores`; the scores of all queries (kind `retrieval`)
    to a file in the same folder. `results` reads both.
    """
    # An encoder with two prompts uses the prompt of queries for symmetric tasks, as E5 (arXiv 2212.03533) advises.
    encode, _ = encode_functions(encoder.for_side("query"))
    kinds: dict[str, Callable[[], Iterator[Measurement]]] = {
        "sts": lambda: _sts(encode, measures, data_dir, scores),
        "saturation": lambda: _saturation(encode, measures, data_dir),
        "transfer": lambda: _transfer(encode, measures, data_dir),
        "retrieval": lambda: _retrieval(encoder, measures, data_dir, scores),
        "nested": lambda: _nested(encoder, measures, data_dir),
    }
    return list(kinds[kind]())


def _sts(encode: Any, measures: Measures, data_dir: Path, scores: Path) -> Iterator[Measurement]:
    """Yield Spearman and Pearson correlations of STS tasks and files of scored pairs."""
    tasks = select_tasks(measures.sts, data_dir, measures.variant) if measures.sts else []
    for name, source in measures.pairs.items():
        tasks = [*tasks, read_examples(name, replace(source, path=below(source.path, data_dir)))]
    results = evaluate(encode, tasks, resamples=1000)
    save_scores(results.scores, scores)
    for name, task in results.tasks.items():
        common: dict[str, Any] = {"text": task.text, "n": task.pairs}
        yield measurement("sts", name, "spearman", task.spearman, task.interval, note=task.undefined, **common)
        yield measurement("sts", name, "pearson", task.pearson, **common)
        means = {"mean": task.mean_over_subtasks, "weighted mean": task.weighted_mean_over_subtasks}
        for how, mean in means.items():
            if mean is not None:
                yield measurement("sts", name, f"spearman, {how} of subtasks", mean.spearman, **common)
        if name in BY_SCORE:
            yield from _by_score(name, task.scores)
    if len(results.averaged) > 1:
        average = results.average, results.average_interval
        yield measurement("sts", "average", "spearman", *average, n=len(results.averaged))
    if len(measures.pairs) > 1:
        values = [results.tasks[name].spearman for name in measures.pairs]
        yield measurement("sts", FILES, "spearman", float(np.mean(values)), n=len(values))


def _by_score(task: str, scores: PairScores) -> Iterator[Measurement]:
    """Yield the mean and quartiles of the cosine for five equal ranges of the gold score."""
    edges = np.linspace(scores.gold.min(), scores.gold.max(), SCORE_BINS + 1)
    bins_P = np.clip(np.searchsorted(edges, scores.gold, side="right") - 1, 0, SCORE_BINS - 1)
    for index in range(SCORE_BINS):
        cosine = scores.cosine[bins_P == index]
        if len(cosine):
            low, high = np.quantile(cosine, [0.25, 0.75])
            metric = f"cosine at score {edges[index]:g} to {edges[index + 1]:g}"
            yield measurement("sts", task, metric, cosine.mean(), low=low, high=high, n=len(cosine))


def _saturation(encode: Any, measures: Measures, data_dir: Path) -> Iterator[Measurement]:
    """Yield the fraction of the pairs, and of the gradient of each loss term, by range of the cosine."""
    assert measures.saturation is not None
    source = replace(measures.saturation, path=below(measures.saturation.path, data_dir))
    examples = load_examples(source).examples
    texts = TextBatch.from_examples(examples).texts
    found = saturation(dict(zip(texts, torch.from_numpy(encode(texts)), strict=True)), examples)
    edges = found["edges"]
    for name, shares in {"pairs": found["pairs"], **found["terms"]}.items():
        for low, high, share in zip(edges, edges[1:], shares, strict=False):
            yield measurement("saturation", name, f"% at cosine {low:g} to {high:g}", 100 * share)
        yield measurement("saturation", name, "% at |cosine| >= 0.9", 100 * found["saturated"][name])


def _transfer(encode: Any, measures: Measures, data_dir: Path) -> Iterator[Measurement]:
    """Yield the accuracy of a linear classifier on each transfer task."""
    tasks = [read_transfer_task(data_dir, name) for name in measures.transfer]
    limits: dict[str, Any] = {"limit_train": measures.transfer_limit, "drop_repeated": measures.transfer_drop_repeated}
    results = evaluate_transfer(encode, tasks, **limits)
    for name, task in results.tasks.items():
        n = task.rows.get("test", task.rows.get("all"))
        yield measurement("transfer", name, "accuracy", task.accuracy, task.interval, n=n)
        for metric in ("f1", "majority", "repeated", "dropped", "unconverged"):
            if getattr(task, metric) is not None:
                yield measurement("transfer", name, metric, getattr(task, metric))
        for split, rows in task.rows.items():
            yield measurement("transfer", name, f"rows {split}", rows)
    yield measurement("transfer", "average", "accuracy", results.average, n=len(results.tasks))


def _retrieval(encoder: SentenceEncoder, measures: Measures, data_dir: Path, scores: Path) -> Iterator[Measurement]:
    """Yield retrieval metrics, and write the metric of each query to a file in the folder of `scores`."""
    names = [measures.retrieval] if isinstance(measures.retrieval, str) else measures.retrieval
    tasks = [_retrieval_task(below(name, data_dir), data_dir) for name in names]
    encode, encode_document = encode_functions(encoder)
    results = evaluate_retrieval(encode, tasks, encode_document=encode_document)
    for task_name, found in results.tasks.items():
        for name, metric in found.metrics.items():
            yield measurement("retrieval", task_name, name, metric.value, metric.interval, n=found.queries)
        yield measurement("retrieval", task_name, "candidates", found.candidates)
    values = {
        name: found.metrics[DIFFERED].values for name, found in results.tasks.items() if DIFFERED in found.metrics
    }
    save_queries(values, scores.with_name(QUERIES))


def _retrieval_task(source: str, data_dir: Path) -> RetrievalTask:
    """Read flickr30k, a BEIR folder or a file of groups as a retrieval task."""
    if source == "flickr30k":
        return replace(read_groups(data_dir / "flickr30k/test_2016.jsonl.gz"), name="flickr30k")
    opened = evaluation_source(source)
    return read_beir(opened) if opened.kind == "beir" else read_groups(opened)


def _nested(encoder: SentenceEncoder, measures: Measures, data_dir: Path) -> Iterator[Measurement]:
    """Yield the Spearman correlation of the encoder truncated to fewer layers and dimensions."""
    nested = measures.nested
    assert nested is not None
    tasks = select_tasks(nested.tasks, data_dir, measures.variant)
    for point in quality_curve(encoder, tasks, layers=nested.layers, dimensions=nested.dimensions):
        metric = f"spearman, {point.layers} layers, {point.dimensions} dimensions"
        yield measurement("nested", "+".join(nested.tasks), metric, point.mean)
