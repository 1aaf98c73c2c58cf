"""`angle-llm plan`: forecast memory and work of a training run without loading weights.

The model is built without weights (`model/meta_model`), and the batches of the first steps are planned as in training.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from angle_llm.data.mixture import Mixture, load_mixture
from angle_llm.data.store import cache_folder
from angle_llm.io import plain, write_json
from angle_llm.memory.budget import BudgetChoice, StepForecast, advice, best_budget, first_steps
from angle_llm.memory.device_memory import GIB, Memory, Sharding
from angle_llm.model.layers.depth import cut_layers
from angle_llm.model.layers.lora import count_parameters, without_adapter
from angle_llm.model.layers.quantized_layers import bits_text
from angle_llm.model.layout.micro_batches import LayoutSupport
from angle_llm.model.layout.support import probe_layouts
from angle_llm.model.meta_model import meta_backbone, stored_dtype, tiny_encoder_copy
from angle_llm.model.saved_lora import lora_of_run
from angle_llm.model.source.backbone import state_sizes
from angle_llm.model.source.resolve import resolve_model
from angle_llm.model.source.weights import FlopsPerToken
from angle_llm.settings.parsing import settings_to_dict
from angle_llm.settings.train import PlanSettings
from angle_llm.train.batches import BatchPlanner, StepSchedule
from angle_llm.train.loading import check_partition
from angle_llm.train.objectives import checked_data, make_losses, task_of
from angle_llm.train.token_budget import TokenBudget, budget_of, check_checkpointing, default_budget


@dataclass(frozen=True)
class Work:
    """Number of steps, tokens and operations of a run; tokens and operations are extrapolated from its first steps."""

    examples: int
    """Number of examples in the dataset."""
    steps: int
    """Number of optimizer steps."""
    logical_tokens: int
    """Tokens of all texts, repeated texts included."""
    computed_tokens: int
    """Tokens of the first forward passes, padding included. Repeated forward passes are not counted."""
    operations: float
    """Floating-point operations of the linear layers."""
    sampled_groups: int
    """Number of sampled groups. A group is the batches of a step that `graph_tokens` allows to encode together."""
    cached_groups: int
    """Number of sampled groups that use gradient caching, which encodes them twice."""
    largest_group: int
    """Maximum number of tokens that one process computes in a group."""
    kept_tokens: int
    """Maximum number of tokens whose activations one process keeps: a group, or a micro-batch with gradient caching."""
    layout: str
    """Layout of the first group: `trie`, `packed` or `padded`."""


@dataclass(frozen=True)
class Forecast:
    """Memory and work of a training run."""

    architecture: str
    """Model type in the configuration, such as `llama`."""
    parameters: int
    """Number of all parameters."""
    trainable: int
    """Number of trained parameters."""
    work: Work
    budget: TokenBudget
    """Token budget from the settings; missing values are chosen for `memory`, or the defaults without `memory`."""
    choice: BudgetChoice | None
    """Token budget chosen for `memory` and whether it fits; None without `memory`."""
    kept_per_token: float
    """Bytes of activations that the encoder keeps per computed token."""
    expected: Memory
    """Memory of the device in the largest sampled step."""
    at_budget: Memory
    """Memory of the device in the largest step that the budget allows."""
    host_bytes: int
    """Host memory of one process, if the run offloads to it; else 0."""


def plan_main(settings: PlanSettings) -> None:
    """Print the forecast of a training run, and write it as JSON to the file of `--json`."""
    result = forecast(settings)
    print(render(settings, result))
    if settings.json is not None:
        content = {"settings": settings_to_dict(replace(settings, json=None)), **asdict(result)}
        for name in ("expected", "at_budget"):
            content[name]["total"] = getattr(result, name).total
        write_json(Path(settings.json).expanduser(), plain(content))


def forecast(settings: PlanSettings) -> Forecast:
    """Forecast the memory and the work of a run from its configuration, tokenizer and data.

    Raises:
        SettingsError, DataError, ArtifactError, ValueError, FileNotFoundError: as the training run, except for a
            backbone with states between its layers that are not available.
    """
    # 1. Settings and data, as in `fine_tune`.
    losses = make_losses(settings)
    source = resolve_model(settings.model.path, attention=settings.model.attention)
    check_partition(source, settings, "FSDP" if settings.fsdp else "ZeRO-3" if settings.zero == 3 else None)
    settings = replace(settings, lora=lora_of_run(source, settings.model, settings.lora))
    data = checked_data(losses, load_mixture(settings.data, cache_folder()))

    # 2. The encoder: a tiny copy that plans micro-batches, and the backbone without weights.
    encoder, config = tiny_encoder_copy(source, settings.loaded_model)
    layouts = LayoutSupport("padded", "as requested")
    if settings.layout == "auto":
        causal = encoder.model.options.causal
        device = torch.device(settings.device_kind)
        layouts = probe_layouts(encoder.model.backbone, encoder.pooling, causal=causal, device=device, trains=True)
    if settings.activation_checkpointing == "always":
        check_checkpointing(encoder)
    dtype = stored_dtype(config, settings.loaded_model.dtype)
    lora = settings.lora if settings.lora.rank else None
    backbone = meta_backbone(config, dtype, lora, divided=settings.zero == 3)
    if source.card is not None and source.card.layers:
        cut_layers(backbone, source.card.layers)
    head = task_of(settings).planned_head(encoder, backbone)
    encoder = encoder.changed(layouts=layouts, model=encoder.model.changed(head))
    if not source.dense:
        losses[0].check_width(state_sizes(without_adapter(backbone))[0])

    # 3. The token budget.
    sharding = Sharding(settings.processes, settings.zero, settings.offload, settings.fsdp)
    step_forecast = StepForecast.of(settings, encoder, backbone, data, losses, sharding, settings.device_kind)
    choice = None if settings.memory is None else best_budget(settings, step_forecast, round(settings.memory * GIB))
    budget = default_budget(settings, budget_of(settings.device_kind)) if choice is None else choice.budget

    # 4. The first steps with this budget.
    planner = BatchPlanner(encoder, data, losses, settings.processes)
    work = _work(settings, planner, budget, FlopsPerToken.of(backbone, head.passes))
    expected = step_forecast.memory(work.kept_tokens, budget)
    trainable, parameters = count_parameters(backbone)
    return Forecast(
        architecture=config.model_type,
        parameters=parameters,
        trainable=trainable,
        work=work,
        budget=budget,
        choice=choice,
        kept_per_token=step_forecast.costs(checkpointing=budget.activation_checkpointing).kept_per_token,
        expected=expected,
        at_budget=max(step_forecast.full(budget), expected, key=lambda memory: memory.total),
        host_bytes=step_forecast.device.host_bytes,
    )


def _work(settings: PlanSettings, planner: BatchPlanner, budget: TokenBudget, flops: FlopsPerToken) -> Work:
    """Return the work of a run, extrapolated from its first steps."""
    # The first steps, and their share of the examples that the run draws.
    data: Mixture = planner.data
    schedule = StepSchedule(data.draws, settings)
    sampled = list(first_steps(planner, settings, budget))
    epochs, more_steps = divmod(schedule.steps, schedule.steps_per_epoch)
    last_epoch = islice(schedule.after(0), more_steps)
    drawn = epochs * sum(data.draws.counts) + sum(len(batch) for _, batches in last_epoch for batch in batches)
    share = sum(len(indices) for batches, _ in sampled for indices in batches) / drawn
    # Groups that keep their activations, and groups with gradient caching (by the rule of `train/step`).
    plans = [group.plan for _, groups in sampled for group in groups]
    cached = [plan for plan in plans if plan.largest_share > budget.graph_tokens]
    kept = [plan.largest_share for plan in plans if plan.largest_share <= budget.graph_tokens]
    kept += [micro_batch.computed_tokens for plan in cached for micro_batch in plan.groups]
    # Tokens and operations of the run.
    computed = sum(plan.computed_tokens for plan in plans) / share
    encoded_again = sum(plan.computed_tokens for plan in cached) / share
    recomputed = computed if budget.activation_checkpointing else 0  # by activation checkpointing
    return Work(
        examples=len(data),
        steps=schedule.steps,
        logical_tokens=round(sum(plan.logical_tokens for plan in plans) / share),
        computed_tokens=round(computed),
        operations=computed * (flops.forward + flops.backward) + (encoded_again + recomputed) * flops.forward,
        sampled_groups=len(plans),
        cached_groups=len(cached),
        largest_group=max(plan.largest_share for plan in plans),
        kept_tokens=max(kept),
        layout=plans[0].layout,
    )


def render(settings: PlanSettings, result: Forecast) -> str:
    """Return the forecast as text: model, run, tokens, memory by part, and token budgets."""
    # Model, run and budgets.
    work = result.work
    bits = f", linear layers in {bits_text(settings.model.bits)}" if settings.model.bits else ""
    autocast = ", products in bfloat16" if settings.autocasts else ""
    cached = "none is encoded twice"
    if work.cached_groups:
        cached = f"{work.cached_groups} of {work.sampled_groups} are encoded twice (larger than graph_tokens)"
    per_step = settings.accumulation * settings.batch_size
    lines = [
        f"model       {settings.model.path}: {result.architecture}, {settings.loaded_model.dtype}{bits}{autocast}",
        f"parameters  {result.parameters:,}, trained {result.trainable:,} ({result.trainable / result.parameters:.2%})",
        f"run         {work.examples:,} examples, {work.steps:,} steps of {per_step:,} examples",
        f"tokens      {work.logical_tokens:,} in the texts, {work.computed_tokens:,} computed "
        f"({work.computed_tokens / work.logical_tokens:.0%}, layout {work.layout}), {work.operations:.3g} operations",
        f"batches     at most {work.largest_group:,} tokens per process in {work.sampled_groups} sampled groups; {cached}",
        f"budgets     {result.budget}",
        f"devices     {settings.device_kind}, {Sharding(settings.processes, settings.zero, settings.offload, settings.fsdp)}",
        "",
        f"{'GiB on one device':26}{'expected':>10}{'full budget':>14}",
    ]
    # Memory by purpose.
    at_budget = vars(result.at_budget)
    parts = {name.replace("_", " "): (size, at_budget[name]) for name, size in vars(result.expected).items()}
    parts["total"] = (result.expected.total, result.at_budget.total)
    lines += [f"  {name:24}{_gib(size):>10}{_gib(full):>14}" for name, (size, full) in parts.items() if size or full]
    if result.host_bytes:
        lines.append(f"  {'host, per process':24}{_gib(result.host_bytes):>10}")
    lines.append(
        f"\nActivations: {result.kept_per_token / 2**20:.3g} MiB per computed token. The allowance (device context, libraries, "
        "fragmentation) is an estimate."
    )
    # Whether the run fits.
    if result.choice is not None:
        needed = f"{_gib(result.choice.forecast_bytes)} of {settings.memory:g} GiB in the largest step"
        budget = result.budget
        checkpointing = " --activation-checkpointing always" if budget.activation_checkpointing else ""
        flags = (
            f"  --micro-batch-tokens {budget.micro_batch_tokens} --graph-tokens {budget.graph_tokens}{checkpointing}"
        )
        if result.choice.fits:
            lines += [f"\nThese budgets fit ({needed}). To set them yourself:", flags]
        else:
            without = _gib(result.expected.total - result.expected.activations)
            lines.append(
                f"\nThe run does not fit ({needed}): the memory without activations is {without} GiB. To fit it, "
                f"{advice(settings)}."
            )
    return "\n".join(lines)


def _gib(size: int) -> str:
    """Return a number of bytes in GiB, as text."""
    return f"{size / GIB:.2f}"
