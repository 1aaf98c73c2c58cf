"""Check training on this GPU, and measure its speed and memory beside other libraries.

    python eval/gpu_check.py --out check.jsonl    # 7B shape, one GPU of 80 GB; no row starts after 10 minutes
    python eval/gpu_check.py --out check.jsonl --parts train peers    # some parts
    python eval/gpu_check.py --layers 2 --hidden 64 --heads 4 --intermediate 96 --batch 4 --steps 1    # smoke test, CPU

Parts, in this order:

* plain: two layers in float32, padded texts, layers of the libraries: losses of the GPU equal the CPU and decrease.
* trial: compile FlexAttention with the heads of the model, and compare it with plain attention.
* fast: embeddings and gradients of the fast path (tries, packed texts, fused layers; batches kept and encoded twice;
  activation checkpointing) equal the plain path, on a bfloat16 base, an NF4 base and a BERT; the loss decreases; new text
  lengths do not compile again.
* train: speed of LoRA on a bfloat16 base with tries, packed and padded texts.
* peers: sentence-transformers on the same triples, padded, and on a GPU without padding (FlashAttention-2).
* trainer: `angle-llm train` with the published settings and a quarter of the layers, stopped by SIGTERM and resumed.
* memory: a run with the token budgets that training chooses; its peak is within the forecast.
* nf4: speed and memory on an NF4 base.
* encode: speed of encoding STS texts.
* unsloth: Unsloth on the same triples, if installed. It is last, because its import changes transformers.

Each row is printed at once. If a row runs out of memory or its library is missing, the row has the reason, and the next
row runs. The exit code is 1 if a check fails, or a row of angle_llm has an error other than out of memory. Weights are
random, because speed does not depend on them.

Utilisation counts the executed operations of the linear layers, relative to the peak in the data sheet of the device; for
an unknown device, to a large matrix product that is measured. As in a run, a thread plans the batches of the next step;
the time of a step includes waiting for it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from gpu_bench import (  # first: it sets the allocator before torch is imported
    GIB,
    GpuSettings,
    Rows,
    compilations,
    free_memory,
    match_layout,
    random_encoder,
    synchronize,
)

# isort: split
import torch
import tyro
from gpu_peers import measure_peer, sentence_transformer, unsloth_model
from gpu_programs import published_run
from torch import Tensor

from angle_llm import AngleObjective, SentenceEncoder, TextBatch
from angle_llm.cli import run_cli
from angle_llm.data.examples import load_examples
from angle_llm.data.mixture import Mixture
from angle_llm.memory import device_memory
from angle_llm.memory.budget import StepForecast, best_budget
from angle_llm.memory.device_memory import Sharding
from angle_llm.model.layers.lora import without_adapter
from angle_llm.model.layers.quantized_layers import Bits
from angle_llm.model.layout.flex import AttentionShape, flex_problem
from angle_llm.model.layout.micro_batches import Plan
from angle_llm.model.meta_model import meta_backbone
from angle_llm.model.pipeline import prefetch
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.train import TrainSettings
from angle_llm.train.batches import BatchPlanner, PlannedGroup, StepSchedule
from angle_llm.train.distributed import Processes
from angle_llm.train.metrics import StepMeter, peak_flops
from angle_llm.train.step import StepResult, boundary_step, group_step
from angle_llm.train.token_budget import TokenBudget

SAME_LOSS = 1e-3
"""Largest relative difference of float32 losses between GPU and CPU, which add in another order."""
SAME_GRADIENT = 0.02
"""Tolerance for equal gradients: largest 1 − cosine, and largest relative difference of norms. They differ by bfloat16
rounding and the order of sums."""
SAME_ROWS = 0.01
"""Tolerance for equal embeddings: largest 1 − cosine."""
MOST_COMPILATIONS = 4
"""Maximum number of graphs compiled after the trials, for calls that differ from those of a trial in more than length."""
KEPT = 10**9
"""Value of `graph_tokens` with which all activations are kept."""
UNKNOWN_PEAK = float("inf")
"""Peak operations per second of a device without a data sheet; its utilisation is 0."""
LAYOUTS = ("trie", "packed", "padded")
"""Layouts of micro-batches, the one with the fewest tokens first."""


def main(settings: GpuSettings) -> bool:
    """Run the parts of --parts, print a row for each measurement, and return whether no check and no row of angle_llm fails."""
    if unknown := [part for part in settings.parts if part not in PARTS]:
        raise ValueError(f"--parts: expected some of {', '.join(PARTS)}; got {', '.join(unknown)}.")
    rows = Rows(settings)
    for part in settings.parts:
        rows.part(part, partial(PARTS[part], settings, rows))
    for row in aims(rows.found):
        rows.add(**row)
    checked = [row for row in rows.found if "check" in row and "skipped" not in row]
    failed = [f"{row['check']} ({row.get('base', '')})" for row in checked if not row.get("holds")]
    speeds = [row for row in rows.found if row.get("what") in ("LoRA", "encode", "trace") and "check" not in row]
    failed += [f"{row['what']} ({row.get('variant', '')})" for row in speeds if "error" in row]
    skipped = sum("skipped" in row for row in rows.found)
    hold = sum(bool(row.get("holds")) for row in checked)
    summary = f"{hold} of {len(checked)} checks hold, {skipped} rows skipped"
    print(summary + (f"; not: {', '.join(failed)}" if failed else ""))
    return not failed


def plain_part(settings: GpuSettings, rows: Rows) -> None:
    """Train a small plain model on the CPU and on the GPU from equal weights, and compare the losses."""
    small = replace(settings, layers=2, batch=min(settings.batch, 16))
    if not settings.is_small:
        small = replace(small, hidden=1024, heads=8, intermediate=2816)

    def run() -> dict[str, Any]:
        losses = []
        for device in (torch.device("cpu"), rows.device):
            encoder = random_encoder(small, torch.device("cpu"), dtype=torch.float32, plain=True)
            encoder.model.to(device)
            losses.append(train(small, encoder))
        expected, found = losses
        worst = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
        return {"cpu": expected, "losses": found, "holds": worst <= SAME_LOSS and found[-1] < found[0]}

    rows.measure(run, check="plain path trains as on the CPU", base="float32")


def trial_part(settings: GpuSettings, rows: Rows) -> None:
    """Check that texts are in one sequence (a trie, or packed) if and only if FlexAttention works on the device."""

    def run() -> dict[str, Any]:
        heads, width, problem = settings.heads, settings.hidden // settings.heads, None
        causal = not settings.bidirectional
        if rows.device.type == "cuda":
            kv_heads = settings.kv_heads or heads
            shape = AttentionShape(heads, kv_heads, width, None, width**-0.5, causal=causal, shares=causal)
            problem = flex_problem(shape, torch.bfloat16, "highest", rows.device)
        layouts = random_encoder(replace(settings, layers=2), rows.device).layouts
        holds = (problem is None) == (layouts.layout == ("trie" if causal else "packed"))
        return {"problem": problem, "layout": layouts.layout, "reason": layouts.reason, "holds": holds}

    rows.measure(run, check="layout follows the trial of FlexAttention", base="bfloat16")


def fast_part(settings: GpuSettings, rows: Rows) -> None:
    """Compare embeddings and gradients of the fast path with the plain path, for each base."""
    bases: list[tuple[str, Bits | None]] = [("bfloat16", None), ("NF4", 4), ("BERT", None)]
    for base, bits in bases:
        rows.part(f"fast, {base}", partial(compare, settings, rows, base, bits))
    reason = None if rows.device.type == "cuda" else "a CPU does not compile FlexAttention"
    rows.measure(partial(count_compilations, settings, rows.device), reason, check="new text lengths do not compile")


def compare(settings: GpuSettings, rows: Rows, base: str, bits: Bits | None) -> None:
    """Compare every layout of an encoder with the plain path, and check that the loss decreases."""
    make = partial(random_encoder, settings, rows.device, bits, bert=base == "BERT")
    _, *expected = computed(settings, make(plain=True), "padded", cached=True)  # which needs less memory
    encoder = make()

    def compared(layout: str, cached: bool, checkpointing: bool) -> dict[str, Any]:
        plan, rows_ND, gradient = computed(settings, encoder, layout, cached=cached, checkpointing=checkpointing)
        values = {
            "rows": float((1 - torch.cosine_similarity(rows_ND, expected[0])).max()),
            "distance": float(1 - torch.cosine_similarity(gradient, expected[1], dim=0)),
            "lengths": float(gradient.norm() / expected[1].norm()),
        }
        holds = values["rows"] <= SAME_ROWS and values["distance"] <= SAME_GRADIENT and plan.layout == layout
        holds = holds and abs(values["lengths"] - 1) <= SAME_GRADIENT
        return {"layout": plan.layout, "micro_batches": len(plan.groups), **values, "holds": holds}

    cases = [(layout, False, False) for layout in reversed(LAYOUTS)]
    best = encoder.layouts.layout
    for layout, cached, checkpointing in [*cases, (best, True, False), (best, False, True)]:
        how = ", encoded twice" if cached else ", checkpointing" if checkpointing else ""
        work = partial(compared, layout, cached, checkpointing)
        rows.measure(work, missing(encoder, layout), check=f"{layout}{how} equals the plain path", base=base)

    def falls() -> dict[str, Any]:
        losses = train(settings, encoder)
        return {"losses": losses, "holds": losses[-1] < losses[0]}

    rows.measure(falls, check="loss falls", base=base)


def count_compilations(settings: GpuSettings, device: torch.device) -> dict[str, Any]:
    """Compute gradients for batches of many lengths, and count the compiled graphs of FlexAttention."""
    encoder = random_encoder(replace(settings, layers=2), device)
    examples, before = settings.examples, compilations()
    for count in range(20):
        batch = TextBatch.from_examples(examples[count : 3 * count + 1])
        gradient_of(encoder, encoder.plan(batch.texts, 1024), batch, cached=count % 2 == 0)
    made = compilations() - before
    return {"compilations": made, "holds": made <= MOST_COMPILATIONS}


def train_part(settings: GpuSettings, rows: Rows) -> None:
    """Measure the training speed of LoRA on a bfloat16 base by layout; with --profile, write a trace of a step."""
    encoder = random_encoder(settings, rows.device)
    for layout in LAYOUTS:
        measure_training(settings, rows, encoder, layout, "bfloat16")
    if settings.profile is not None:
        path = settings.profile
        rows.measure(lambda: traced(settings, encoder, path), what="trace", file=str(path))


def memory_part(settings: GpuSettings, rows: Rows) -> None:
    """Train LoRA on a bfloat16 base with the chosen token budgets, and compare the peak memory with the forecast."""
    measure_budget(settings, rows, random_encoder(settings, rows.device), "bfloat16")


def nf4_part(settings: GpuSettings, rows: Rows) -> None:
    """Measure speed and memory of QLoRA (LoRA on an NF4 base)."""
    encoder = random_encoder(settings, rows.device, bits=4)
    measure_training(settings, rows, encoder, encoder.layouts.layout, "NF4")
    measure_budget(settings, rows, encoder, "NF4")


def encode_part(settings: GpuSettings, rows: Rows) -> None:
    """Measure the speed of encoding the texts of STS pairs by layout, and compare it with the peak of the device."""
    encoder = random_encoder(settings, rows.device, adapted=False)
    texts = TextBatch.from_examples(load_examples(settings.sts).examples).texts
    texts = texts[: 8 * settings.batch] if settings.is_small else texts
    per_second = (peak_flops(rows.device, torch.bfloat16) or UNKNOWN_PEAK) / FlopsPerToken.of(
        encoder.model.backbone
    ).forward

    def run(layout: str) -> dict[str, Any]:
        with_this = with_layout(encoder, layout)
        runs = [with_this.encode(texts, return_stats=True)[1] for _ in range(1 + settings.steps)]
        middle = sorted(runs[1:], key=lambda stats: stats.seconds)[settings.steps // 2]
        return {
            "texts_per_second": middle.texts / middle.seconds,
            "computed_share": middle.computed_tokens / middle.logical_tokens,
            "utilisation": middle.computed_tokens / middle.seconds / per_second,
            "layout": with_this.plan(texts, settings.micro_batch_tokens).layout,
            "first_seconds": runs[0].seconds,
        }

    for layout in LAYOUTS:
        rows.measure(partial(run, layout), missing(encoder, layout), what="encode", base="bfloat16", variant=layout)


def missing(encoder: SentenceEncoder, layout: str) -> str | None:
    """Return why an encoder cannot compute a layout; None if it can."""
    possible = LAYOUTS.index(layout) >= LAYOUTS.index(encoder.layouts.layout)
    return None if possible else encoder.layouts.reason


def with_layout(encoder: SentenceEncoder, layout: str) -> SentenceEncoder:
    """Return an encoder with the same weights that plans micro-batches in a layout that it can compute."""
    named: Any = layout
    encoder = encoder.changed(layouts=replace(encoder.layouts, layout=named, reason="as requested"))
    match_layout(encoder)
    return encoder


def planned(settings: GpuSettings, encoder: SentenceEncoder) -> tuple[TextBatch, Plan]:
    """Return the first batch of the data and its micro-batches, small so that there are several."""
    batch = TextBatch.from_examples(settings.examples[: settings.batch])
    return batch, encoder.plan(batch.texts, settings.micro_batch_tokens // 4)


def train(settings: GpuSettings, encoder: SentenceEncoder) -> list[float]:
    """Train 3 steps on the same batch with the layout of the encoder, and return the losses."""
    match_layout(encoder)
    batch, plan = planned(settings, encoder)
    encoder.model.checkpoint_activations(enabled=False)
    trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    encoder.model.train()
    losses = []
    for _ in range(3):
        losses.append(boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=KEPT).loss)
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def computed(
    settings: GpuSettings, encoder: SentenceEncoder, layout: str, *, cached: bool, checkpointing: bool = False
) -> tuple[Plan, Tensor, Tensor]:
    """Encode a batch in a layout; return its plan, the embeddings (N, D) and the gradient of the adapter."""
    encoder = with_layout(encoder, layout)
    encoder.model.checkpoint_activations(enabled=checkpointing)
    batch, plan = planned(settings, encoder)
    rows_ND = encoder.encode(batch.texts, micro_batch_tokens=settings.micro_batch_tokens // 4)
    return plan, torch.from_numpy(rows_ND), gradient_of(encoder, plan, batch, cached=cached)


def gradient_of(encoder: SentenceEncoder, plan: Plan, batch: TextBatch, *, cached: bool) -> Tensor:
    """Return the gradient of all adapter weights as a vector on the CPU. `cached`: encode the batch twice."""
    encoder.model.train()
    boundary_step(encoder.model, plan, batch, AngleObjective(), graph_tokens=0 if cached else KEPT)
    found = sorted((name, one.grad) for name, one in encoder.model.named_parameters() if one.grad is not None)
    vector = torch.cat([gradient.flatten().cpu() for _, gradient in found]).double()
    encoder.model.zero_grad()
    return vector


def planner_of(
    settings: GpuSettings, encoder: SentenceEncoder, accumulation: int = 1
) -> tuple[TrainSettings, BatchPlanner, TokenBudget]:
    """Return the settings of a training run, its planner, and a budget that keeps all activations."""
    run = TrainSettings(batch_size=settings.batch, accumulation=accumulation, epochs=1000, lora=settings.lora())
    data = Mixture.of(settings.examples)
    budget = TokenBudget(settings.micro_batch_tokens, KEPT)
    return run, BatchPlanner(encoder, data, [AngleObjective()], 1), budget


def measure_training(settings: GpuSettings, rows: Rows, encoder: SentenceEncoder, layout: str, base: str) -> None:
    """Add a row with the training speed in a layout; activations of a batch are kept."""

    def run() -> dict[str, Any]:
        with_this = with_layout(encoder, layout)
        return training_speed(settings, with_this, *planner_of(settings, with_this))[0]

    rows.measure(run, missing(encoder, layout), what="LoRA", base=base, variant=layout)


def training_speed(
    settings: GpuSettings, encoder: SentenceEncoder, run: TrainSettings, planner: BatchPlanner, budget: TokenBudget
) -> tuple[dict[str, Any], list[StepResult]]:
    """Run optimizer steps; return medians of time and speed over all steps except the first, and all results."""
    device, before = encoder.device, compilations()
    encoder.model.checkpoint_activations(enabled=budget.activation_checkpointing)
    encoder.model.train()
    trainable = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=device.type == "cuda")
    meter, counts = StepMeter(encoder, peak_flops(device, torch.bfloat16) or UNKNOWN_PEAK), []
    found: list[StepResult] = []
    steps = islice(planner.steps(StepSchedule(planner.data.draws, run).after(0), budget), 1 + settings.steps)
    with ThreadPoolExecutor(max_workers=1) as worker:
        started = time.perf_counter()
        for _, groups in prefetch(steps, worker):
            results = backward(encoder, groups, budget)
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            seconds = time.perf_counter() - started
            counts.append(meter.counts(results, seconds, checkpointing=budget.activation_checkpointing))
            found += results
            started = time.perf_counter()
    names = ("pairs_per_second", "computed_tokens_per_second", "computed_tokens", "utilisation", "seconds")
    return {
        **{name: median(count[name] for count in counts[1:]) for name in names},
        "first_seconds": counts[0]["seconds"],
        "layout": found[0].plan.layout,
        "compilations": compilations() - before,
        "loss": found[0].loss,
    }, found


def backward(encoder: SentenceEncoder, groups: Sequence[PlannedGroup], budget: TokenBudget) -> list[StepResult]:
    """Compute the gradient of an optimizer step, as the trainer does."""
    weight, graph_tokens = 1 / sum(len(group.batches) for group in groups), budget.graph_tokens
    return [
        group_step(encoder.model, group.plan, group.batches, graph_tokens=graph_tokens, weight=weight)
        for group in groups
    ]


def measure_budget(settings: GpuSettings, rows: Rows, encoder: SentenceEncoder, base: str) -> None:
    """Add a row with speed and peak memory with the token budget that a run chooses."""
    work = partial(chosen_budget, settings, encoder)
    rows.measure(work, check="peak memory is within the forecast", what="LoRA", base=base, variant="chosen budget")


def chosen_budget(settings: GpuSettings, encoder: SentenceEncoder) -> dict[str, Any]:
    """Return speed, forecast and peak memory with the token budget that a run chooses, as `choose_budget` does."""
    device = encoder.device
    config, planner, _ = planner_of(settings, encoder, settings.accumulation)
    free = device_memory.free_memory(Processes(device=device)) or 0
    backbone = meta_backbone(without_adapter(encoder.model.backbone).config, encoder.dtype, config.lora)
    costs = StepForecast.of(config, encoder, backbone, planner.data, planner.losses, Sharding(), device.type)
    choice = best_budget(config, costs, free)
    budget = choice.budget
    match_layout(encoder)
    free_memory(device)
    speed, results = training_speed(settings, encoder, config, planner, budget)
    needs = []
    for result in results:
        micro = max(group.computed_tokens for group in result.plan.groups)
        needs.append(costs.memory(micro if result.cached else result.plan.computed_tokens, budget))
    expected = max(need.total - need.allowance for need in needs)
    ratio = torch.cuda.max_memory_allocated(device) / expected if device.type == "cuda" else None
    holds = choice.fits and (ratio is None or ratio <= 1 + settings.tolerance)
    sizes = {"free_gib": free / GIB, "chosen_gib": choice.forecast_bytes / GIB, "step_gib": expected / GIB}
    return {"budget": str(budget), **sizes, "ratio": ratio, **speed, "holds": holds}


def traced(settings: GpuSettings, encoder: SentenceEncoder, path: Path | None = None) -> dict[str, Any]:
    """Return the milliseconds of the longest kernels of a training step (on a CPU: operations), and of all together.

    With `path`, a trace of the profiler is written too.
    """
    match_layout(encoder)
    run, planner, budget = planner_of(settings, encoder)
    ((_, groups),) = islice(planner.steps(StepSchedule(planner.data.draws, run).after(0), budget), 1)
    encoder.model.checkpoint_activations(enabled=False)
    encoder.model.train()
    on_gpu = encoder.device.type == "cuda"
    with torch.profiler.profile() as record:  # of all devices
        backward(encoder, groups, budget)
        synchronize(encoder.device)
    encoder.model.zero_grad()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record.export_chrome_trace(str(path))
    kernels: Counter[str] = Counter()
    for event in record.key_averages():
        # The operations of torch have the time of the kernels that they launch, which are events themselves.
        if on_gpu == (event.device_type == torch.profiler.DeviceType.CUDA) and not event.is_user_annotation:
            microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            kernels[event.key[:60]] += microseconds / 1000
    longest = {name: round(milliseconds, 2) for name, milliseconds in kernels.most_common(16)}
    return {"kernel_ms": round(kernels.total(), 1), "kernels": longest}


def peers_part(settings: GpuSettings, rows: Rows) -> None:
    """Measure the training speed of sentence-transformers, without padding (only on a GPU) and padded."""
    for unpadded in (True, False) if rows.device.type == "cuda" else (False,):
        make, variant = partial(sentence_transformer, unpadded=unpadded), "unpadded" if unpadded else "padded"
        measure_peer(settings, rows, "sentence_transformers", make, variant=variant)


def trainer_part(settings: GpuSettings, rows: Rows) -> None:
    """Train with the published settings through `angle-llm train`, with a quarter of the layers; stop the run and resume it."""
    small = replace(settings, layers=max(2, settings.layers // 4))
    with TemporaryDirectory() as folder:
        work = partial(published_run, small, rows.device, Path(folder))
        rows.measure(work, check="a run resumes after SIGTERM", base="bfloat16", layers=small.layers)


def unsloth_part(settings: GpuSettings, rows: Rows) -> None:
    """Measure the training speed of Unsloth."""
    measure_peer(settings, rows, "unsloth", unsloth_model)


PARTS: dict[str, Callable[[GpuSettings, Rows], None]] = {
    "plain": plain_part,
    "trial": trial_part,
    "fast": fast_part,
    "train": train_part,
    "peers": peers_part,
    "trainer": trainer_part,
    "memory": memory_part,
    "nf4": nf4_part,
    "encode": encode_part,
    "unsloth": unsloth_part,
}


def aims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return target speeds, measured values, and whether the targets are reached; None if a measurement is missing."""

    def best(name: str, **about: Any) -> float | None:
        """Return the largest value of a column over the rows with the values `about`."""
        values = [row[name] for row in rows if name in row and about.items() <= row.items()]
        return max(values, default=None)

    ours = {"what": "LoRA", "base": "bfloat16"}
    pairs = best("pairs_per_second", **ours)
    others = best("pairs_per_second", what="sentence_transformers", unpadded=True)
    values = [
        ("share of the bfloat16 peak", best("utilisation", **ours), 0.4),
        ("pairs/s to sentence-transformers without padding", pairs / others if pairs and others else None, 1.5),
    ]
    return [
        {"aim": what, "at_least": least, "value": value, "reached": None if value is None else value >= least}
        for what, value, least in values
    ]


if __name__ == "__main__":
    run_cli(lambda: sys.exit(not main(tyro.cli(GpuSettings, description=__doc__))))
