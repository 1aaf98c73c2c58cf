"""Measure training and encoding speed of a 7B LLaMA shape on this GPU, beside baselines. Not run on a GPU yet.

    python eval/gpu_speed.py --out speed.jsonl                    # all parts, one GPU of 80 GB, about 15 minutes (estimate)
    python eval/gpu_speed.py --out speed.jsonl --parts train      # one part, about 10 minutes
    python eval/gpu_speed.py --layers 2 --hidden 64 --heads 4 --intermediate 96 --batch 4 --steps 1    # smoke test, CPU

Parts:

* train: LoRA on a bfloat16 base. Kernels of a trie against packed texts and padded flash attention on the same pairs;
  cuDNN; token budgets; accumulated batches together or one by one.
* nf4: the same on a 4-bit base.
* encode: encoding of STS texts.
* bert: packed against padded texts.

Each row is written at once. If a row runs out of memory or its kernel is missing, the row has the reason, and the next row
runs. Weights are random because speed does not depend on them; token lengths are those of real texts with the prompt.

Utilisation counts the executed operations of the linear layers, relative to the peak in the data sheet of the device; for
an unknown device, to a large matrix product that is measured. Training plans batches in a thread, so the time of a step
excludes planning, which `plan_seconds` reports.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpu_bench import (  # first: it sets the allocator before torch is imported
    PADDED,
    TRIE,
    VARIANTS,
    Rows,
    ShapeSettings,
    Variant,
    compilations,
    draw_batches,
    random_bert,
    random_encoder,
    synchronize,
)

# isort: split
import torch
import tyro

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.cli import run_cli
from angle_llm.data.examples import load_examples
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.train import DataSource
from angle_llm.train.batches import PlannedBatch
from angle_llm.train.metrics import StepMeter, peak_flops
from angle_llm.train.step import group_step

Step = list[list[TextBatch]]
"""An optimizer step: a list of groups; the batches of a group are encoded together."""
KEPT = 10**9
"""Value of `graph_tokens` with which all activations are kept."""


@dataclass(frozen=True, kw_only=True)
class GpuSpeedSettings(ShapeSettings):
    """Parts, batches and token budgets of the measurements."""

    parts: tuple[str, ...] = ("train", "nf4", "encode", "bert")
    """Parts to run: train, nf4, encode, bert."""
    batch: int = 120
    """Number of triples of a training step; their activations must fit in memory."""
    accumulation: int = 8
    """Number of accumulated batches of a step; an accumulated batch has `batch` / 8 triples."""
    micro_batch_tokens: tuple[int, ...] = (8192, 4096, 16384)
    """Maximum tokens of a micro-batch in training. Comparisons use the first value."""
    encode_tokens: tuple[int, ...] = (16384, 8192, 32768)
    """Maximum tokens of a micro-batch in encoding. Comparisons use the first value."""
    sts: DataSource = field(default_factory=lambda: DataSource("starter:graded_pairs.tsv", score_range=(0, 5)))
    """Scored pairs whose texts are encoded."""
    profile: Path | None = None
    """File for a trace of a training step, for chrome://tracing or Perfetto; its longest operations are printed. None: no
    trace."""


@dataclass
class Bench:
    """Measures the training and encoding speed of an encoder, and adds the results to `rows`."""

    settings: GpuSpeedSettings
    rows: Rows
    encoder: SentenceEncoder
    base: str

    def __post_init__(self) -> None:
        self.device = self.encoder.device
        self.peak = peak_flops(self.device, torch.bfloat16)

    def train(self, what: str, steps: Sequence[Step], tokens: int, variant: Variant, graph_tokens: int = KEPT) -> None:
        """Measure optimizer steps, and add a result row with the speed."""
        self.rows.measure(
            lambda: self._trained(steps, tokens, variant, graph_tokens),
            variant.missing(self.device, training=True),
            what=what,
            base=self.base,
            variant=str(variant),
            micro_batch_tokens=tokens,
            graphs="kept" if graph_tokens else "encoded twice",
        )

    def encode(self, texts: Sequence[str], tokens: int, variant: Variant) -> None:
        """Measure the encoding of texts, and add a result row with the speed."""
        self.rows.measure(
            lambda: self._encoded(texts, tokens, variant),
            variant.missing(self.device, training=False),
            what="encode",
            base=self.base,
            variant=str(variant),
            micro_batch_tokens=tokens,
        )

    def _trained(self, steps: Sequence[Step], tokens: int, variant: Variant, graph_tokens: int) -> dict[str, Any]:
        """Run optimizer steps; return the median time and speed over all steps except the first."""
        encoder, before = self.encoder, compilations()
        encoder.model.zero_grad()
        encoder.model.train()
        trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=self.device.type == "cuda")
        meter, counts, results = StepMeter(encoder, self.peak), [], []
        with variant.used(encoder):
            for step in steps:
                started = time.perf_counter()
                work = planned(encoder, step, tokens)
                plan_seconds = time.perf_counter() - started
                synchronize(self.device)
                started = time.perf_counter()
                results = [
                    group_step(encoder.model, plan, batches, graph_tokens=graph_tokens, weight=1 / len(batches))
                    for plan, batches in work
                ]
                optimizer.step()
                optimizer.zero_grad()
                synchronize(self.device)
                seconds = time.perf_counter() - started
                counts.append({**meter.counts(results, seconds), "plan_seconds": plan_seconds})
        names = ("pairs_per_second", "computed_tokens_per_second", "computed_tokens", "utilisation", "seconds")
        return {
            **{name: statistics.median(count[name] for count in counts[1:]) for name in (*names, "plan_seconds")},
            "first_seconds": counts[0]["seconds"],
            "layout": results[0].plan.layout,
            "micro_batches": sum(len(result.plan.groups) for result in results),
            "compilations": compilations() - before,
            "loss": results[0].loss,
        }

    def _encoded(self, texts: Sequence[str], tokens: int, variant: Variant) -> dict[str, Any]:
        """Encode texts several times; return the median time and speed without the first time."""
        before = compilations()
        with variant.used(self.encoder):
            runs = [
                self.encoder.encode(texts, micro_batch_tokens=tokens, return_stats=True)[1]
                for _ in range(1 + self.settings.steps)
            ]
        middle = sorted(runs[1:], key=lambda stats: stats.seconds)[self.settings.steps // 2]
        forward = FlopsPerToken.of(self.encoder.model.backbone).forward
        return {
            "texts_per_second": middle.texts_per_second,
            "computed_tokens_per_second": middle.computed_tokens / middle.seconds,
            "computed_share": middle.computed_share,
            "utilisation": forward * middle.computed_tokens / middle.seconds / self.peak,
            "layout": middle.layout,
            "first_seconds": runs[0].seconds,
            "compilations": compilations() - before,
        }


def planned(encoder: SentenceEncoder, step: Step, tokens: int) -> list[tuple[Plan, list[PlannedBatch]]]:
    """Plan the micro-batches of each group (batches that are encoded together) of an optimizer step."""
    objective = AngleObjective()
    return [
        (
            encoder.plan([text for batch in group for text in batch.texts], tokens),
            [PlannedBatch(batch, objective, {}) for batch in group],
        )
        for group in step
    ]


def main(settings: GpuSpeedSettings) -> None:
    """Run the parts of --parts, and print result rows and a comparison with the target speeds."""
    if unknown := [part for part in settings.parts if part not in PARTS]:
        raise ValueError(f"--parts: expected some of {', '.join(PARTS)}; got {', '.join(unknown)}.")
    rows = Rows(settings)
    for part in settings.parts:
        rows.part(part, partial(PARTS[part], settings, rows))
    for row in aims(rows.found):
        rows.add(**row)


def train_part(settings: GpuSpeedSettings, rows: Rows) -> None:
    """Measure LoRA on a bfloat16 base by attention variant, token budget and accumulation; write a profiler trace."""
    bench = Bench(settings, rows, random_encoder(settings, rows.device), "bfloat16")
    bench.encoder.add_lora(settings.lora())
    steps = one_by_one(draw_batches(settings.data, settings.batch, settings.steps + 1))
    tokens, *others = settings.micro_batch_tokens
    for variant in VARIANTS:
        bench.train("LoRA", steps, tokens, variant)
    for budget in others:
        bench.train("LoRA", steps, budget, TRIE)
        bench.train("LoRA", steps, budget, PADDED)
    bench.train("LoRA", steps, tokens, TRIE, graph_tokens=0)
    small = draw_batches(settings.data, max(settings.batch // 8, 1), settings.accumulation * (settings.steps + 1))
    accumulated = [
        small[first : first + settings.accumulation] for first in range(0, len(small), settings.accumulation)
    ]
    bench.train("accumulated together", [[step] for step in accumulated], tokens, TRIE)
    bench.train("accumulated one by one", [[[batch] for batch in step] for step in accumulated], tokens, TRIE)
    if settings.profile is not None:
        path = settings.profile
        rows.measure(lambda: traced(bench.encoder, steps[0], tokens, path), what="trace", file=str(path))


def nf4_part(settings: GpuSpeedSettings, rows: Rows) -> None:
    """Measure the training speed of QLoRA (LoRA on a base in NF4)."""
    bench = Bench(settings, rows, random_encoder(settings, rows.device, bits=4), "NF4")
    bench.encoder.add_lora(settings.lora())
    steps = one_by_one(draw_batches(settings.data, settings.batch, settings.steps + 1))
    for tokens in settings.micro_batch_tokens:
        bench.train("LoRA", steps, tokens, TRIE)


def encode_part(settings: GpuSpeedSettings, rows: Rows) -> None:
    """Measure the speed of encoding the texts of STS pairs."""
    bench = Bench(settings, rows, random_encoder(settings, rows.device), "bfloat16")
    texts = TextBatch.from_examples(load_examples(settings.sts).examples).texts
    if settings.is_small:
        texts = texts[: 8 * settings.batch]
    tokens, *others = settings.encode_tokens
    for variant in VARIANTS:
        bench.encode(texts, tokens, variant)
    for budget in others:
        bench.encode(texts, budget, TRIE)


def bert_part(settings: GpuSpeedSettings, rows: Rows) -> None:
    """Measure the speed of LoRA on a BERT, with packed and with padded texts."""
    bench = Bench(settings, rows, random_bert(settings, rows.device), "BERT bfloat16")
    bench.encoder.add_lora(settings.lora())
    steps = one_by_one(draw_batches(settings.data, settings.batch, settings.steps + 1))
    tokens = settings.micro_batch_tokens[-1]
    for variant in (*(Variant("packed", kernel) for kernel in ("flex", "gathered")), PADDED):
        bench.train("LoRA", steps, tokens, variant)


PARTS: dict[str, Callable[[GpuSpeedSettings, Rows], None]] = {
    "train": train_part,
    "nf4": nf4_part,
    "encode": encode_part,
    "bert": bert_part,
}


def one_by_one(batches: Sequence[TextBatch]) -> list[Step]:
    """Return an optimizer step for each batch, with this batch alone."""
    return [[[batch]] for batch in batches]


def traced(encoder: SentenceEncoder, step: Step, tokens: int, path: Path) -> dict[str, Any]:
    """Write a profiler trace of a training step, and print its longest operations."""
    encoder.model.zero_grad()
    encoder.model.train()
    ((plan, batches),) = planned(encoder, step, tokens)
    for _ in range(2):  # the first step compiles
        with torch.profiler.profile() as record:  # of all devices
            group_step(encoder.model, plan, batches, graph_tokens=KEPT)
            synchronize(encoder.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    record.export_chrome_trace(str(path))
    unit = "cuda" if encoder.device.type == "cuda" else "cpu"
    print(record.key_averages().table(sort_by=f"self_{unit}_time_total", row_limit=20), flush=True)
    return {"bytes": path.stat().st_size}


def aims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return target speeds, measured values, and whether the targets are reached; None if a measurement is missing."""

    def best(name: str, base: str, what: str = "LoRA", layout: str = "") -> float | None:
        """Return the largest value of a column over the result rows with a base and layout."""
        values = [
            float(row[name])
            for row in rows
            if row.get("what") == what and row.get("base") == base and name in row and row["variant"].startswith(layout)
        ]
        return max(values, default=None)

    def ratio(one: float | None, other: float | None) -> float | None:
        return one / other if one is not None and other else None

    pairs = {layout: best("pairs_per_second", "bfloat16", layout=layout) for layout in ("trie", "packed", "padded")}
    nf4 = best("pairs_per_second", "NF4", layout="trie")
    values = [
        ("LoRA, share of the bfloat16 peak", best("utilisation", "bfloat16", layout="trie"), 0.4),
        ("LoRA, pairs/s of a trie to padded flash attention", ratio(pairs["trie"], pairs["padded"]), 1.5),
        ("LoRA, pairs/s of a trie to packed texts", ratio(pairs["trie"], pairs["packed"]), 1.2),
        ("QLoRA, pairs/s to those of LoRA", ratio(nf4, pairs["trie"]), 0.75),
        ("encoding STS, share of the bfloat16 peak", best("utilisation", "bfloat16", "encode", "trie"), 0.5),
    ]
    return [
        {"aim": what, "at_least": least, "value": value, "reached": None if value is None else value >= least}
        for what, value, least in values
    ]


if __name__ == "__main__":
    run_cli(lambda: main(tyro.cli(GpuSpeedSettings, description=__doc__)))
