"""`angle-llm plan`: forecast memory and work of a training run without loading weights."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from angle_llm.settings.parsing import settings_to_dict
from angle_llm.settings.plan import PlanSettings

if TYPE_CHECKING:
    from angle_llm.memory.run_forecast import Forecast


def plan_main(settings: PlanSettings) -> None:
    """Print the forecast of a training run, and write it as JSON to the file of `--json`."""
    from angle_llm.memory.run_forecast import forecast

    result = forecast(settings)
    print(render(settings, result))
    if settings.json is not None:
        from angle_llm.io import plain, write_json

        content = {"settings": settings_to_dict(replace(settings, json=None)), **asdict(result)}
        for name in ("expected", "at_budget"):
            content[name]["total"] = getattr(result, name).total
        write_json(Path(settings.json).expanduser(), plain(content))


def render(settings: PlanSettings, result: Forecast) -> str:
    """Return the forecast as text: model, run, tokens, memory by part, and token budgets."""
    from angle_llm.memory.device_memory import Sharding

    work = result.work
    bits = f", linear layers in {settings.model.bits} bits" if settings.model.bits else ""
    half = ", products in bfloat16" if settings.autocasts else ""
    cached = (
        f"{work.cached_groups} of {work.sampled_groups} are encoded twice (larger than graph_tokens)"
        if work.cached_groups
        else "none is encoded twice"
    )
    per_step = settings.accumulation * settings.batch_size
    lines = [
        f"model       {settings.model.path}: {result.architecture}, {settings.loaded_model.dtype}{bits}{half}",
        f"parameters  {result.parameters:,}, trained {result.trainable:,} ({result.trainable / result.parameters:.2%})",
        f"run         {work.examples:,} examples, {work.steps:,} steps of {per_step:,} examples",
        f"tokens      {work.logical_tokens:,} in the texts, {work.computed_tokens:,} computed "
        f"({work.computed_tokens / work.logical_tokens:.0%}, layout {work.layout}), {work.operations:.3g} operations",
        f"batches     at most {work.largest_group:,} tokens per process in {work.sampled_groups} sampled groups; {cached}",
        f"budgets     {result.budget}",
        f"devices     {settings.device_kind}, {Sharding(settings.processes, settings.zero, settings.offload)}",
        "",
        f"{'GiB on one device':26}{'expected':>10}{'full budget':>14}",
    ]
    expected, full = asdict(result.expected), asdict(result.at_budget)
    for part, size in expected.items():
        if size or full[part]:
            lines.append(f"  {part.replace('_', ' '):24}{_gib(size):>10}{_gib(full[part]):>14}")
    lines.append(f"  {'total':24}{_gib(result.expected.total):>10}{_gib(result.at_budget.total):>14}")
    if result.host_bytes:
        lines.append(f"  {'host, per process':24}{_gib(result.host_bytes):>10}")
    lines.append(
        f"\nActivations: {result.step.kept / result.step.tokens / 2**20:.3g} MiB per computed token. The allowance "
        "(device context, libraries, fragmentation) is an estimate."
    )
    if result.choice is not None:
        assert settings.memory is not None
        needed = f"{_gib(result.choice.forecast_bytes)} of {settings.memory:g} GiB in the largest step"
        if result.choice.fits:
            budget = result.budget
            always = " --activation-checkpointing always" if budget.activation_checkpointing else ""
            lines += [
                f"\nThese budgets fit ({needed}). To set them yourself:",
                f"  --micro-batch-tokens {budget.micro_batch_tokens} --graph-tokens {budget.graph_tokens}{always}",
            ]
        else:
            bits = "--model.bits 4, " if settings.model.bits != 4 and settings.lora.rank and settings.zero < 3 else ""
            zero = ", or --zero with more --processes" if settings.device_kind == "cuda" else ""
            lines.append(
                f"\nThe run does not fit ({needed}): the memory without activations is "
                f"{_gib(result.expected.total - result.expected.activations)} GiB. Try {bits}a smaller --lora.rank or "
                f"--model.max-length{zero}."
            )
    return "\n".join(lines)


def _gib(size: int) -> str:
    """Return a number of bytes in GiB, as text."""
    return f"{size / 2**30:.2f}"
