"""`angle-llm plan`: forecast memory and work of a training run without loading weights.

The model is built without weights (`model.outline`), batches are planned as in training, and the largest step is run on
the meta device, where its tensors are counted (`model.step_memory`).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from angle_llm.config import TrainSettings
from angle_llm.settings_io import Positive, PositiveFloat, SettingsError, settings_class, settings_to_dict

if TYPE_CHECKING:
    from angle_llm.forecast import Forecast


@settings_class
class PlanSettings(TrainSettings):
    """Settings of a training run, and the devices it is planned for."""

    memory: PositiveFloat | None = None
    """Free memory of one device in GiB; unset budgets are chosen for it as in a run. None:
    micro_batch_tokens 8192 (2048 on a CPU) and graph_tokens 16384."""
    processes: Positive = 1
    """Number of processes, one per device."""
    zero: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: 1 partitions the optimizer state, 2 also gradients, 3 also weights."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What ZeRO keeps in host memory: the optimizer state, or with stage 3 also the weights."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Planned device; attention kernels differ in what they keep for the backward pass. auto: cuda if available, else
    cpu. Name cuda to plan a GPU run on a machine without one."""
    sample: Positive = 2048
    """Number of examples that are tokenised and planned; the work of the run is extrapolated from them."""
    json: str | None = None
    """Also write the forecast to this JSON file, sizes in bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload != "none" and self.zero == 0:
            raise SettingsError(f"--offload {self.offload} needs ZeRO. Set --zero 1, 2 or 3, or --offload none.")
        if self.offload == "parameters" and self.zero != 3:
            raise SettingsError(f"--offload parameters needs --zero 3, got {self.zero}. Or set --offload optimizer.")
        if self.zero == 3 and self.model.bits is not None:
            raise SettingsError(
                f"--zero 3 cannot partition a base quantised to {self.model.bits} bits. Set --zero 2, or omit model.bits."
            )

    @property
    def device_kind(self) -> str:
        """cuda or cpu."""
        import torch

        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


def plan_main(settings: PlanSettings) -> None:
    """Print the forecast; write it as JSON with `--json`."""
    from angle_llm.forecast import forecast

    found = forecast(settings)
    print(render(settings, found))
    if settings.json is not None:
        from angle_llm.io import plain, write_json

        content = {"settings": settings_to_dict(replace(settings, json=None)), **asdict(found)}
        for name in ("expected", "at_budget"):
            content[name]["total"] = getattr(found, name).total
        write_json(Path(settings.json).expanduser(), plain(content))


def render(settings: PlanSettings, found: Forecast) -> str:
    """Return the forecast as text."""
    from angle_llm.train.device_memory import Sharding

    work = found.work
    bits = f", linear layers in {settings.model.bits} bits" if settings.model.bits else ""
    half = ", products in bfloat16" if settings.autocasts else ""
    cached = (
        f"{work.cached_groups} of {work.sampled_groups} are encoded twice (larger than graph_tokens)"
        if work.cached_groups
        else "none is encoded twice"
    )
    lines = [
        f"model       {settings.model.path}: {found.architecture}, {settings.loaded_model.dtype}{bits}{half}",
        f"parameters  {found.parameters:,}, trained {found.trainable:,} ({found.trainable / found.parameters:.2%})",
        f"run         {work.examples:,} examples, {work.steps:,} steps of {settings.accumulation} × {settings.batch_size}",
        f"tokens      {work.logical_tokens:,} in the texts, {work.computed_tokens:,} computed "
        f"({work.computed_tokens / work.logical_tokens:.0%}, layout {work.layout}), {work.operations:.3g} operations",
        f"batches     at most {work.largest_group:,} tokens per process in {work.sampled_groups} sampled groups; {cached}",
        f"budgets     {found.budget}",
        f"devices     {settings.device_kind}, {Sharding(settings.processes, settings.zero, settings.offload)}",
        "",
        f"{'GiB on one device':26}{'expected':>10}{'full budget':>14}",
    ]
    expected, full = asdict(found.expected), asdict(found.at_budget)
    for part, size in expected.items():
        if size or full[part]:
            lines.append(f"  {part.replace('_', ' '):24}{_gib(size):>10}{_gib(full[part]):>14}")
    lines.append(f"  {'total':24}{_gib(found.expected.total):>10}{_gib(found.at_budget.total):>14}")
    if found.host_bytes:
        lines.append(f"  {'host, per process':24}{_gib(found.host_bytes):>10}")
    lines.append(
        f"\nActivations: {found.step.kept / found.step.tokens / 2**20:.3g} MiB per computed token. The allowance "
        "(device context, libraries, fragmentation) is an estimate."
    )
    if found.choice is not None:
        assert settings.memory is not None
        needed = f"{_gib(found.choice.forecast_bytes)} of {settings.memory:g} GiB in the largest step"
        if found.choice.fits:
            budget = found.budget
            always = " --activation-checkpointing always" if budget.activation_checkpointing else ""
            lines += [
                f"\nA run on this device chooses these budgets ({needed}). To set them yourself:",
                f"  --micro-batch-tokens {budget.micro_batch_tokens} --graph-tokens {budget.graph_tokens}{always}",
            ]
        else:
            bits = "--model.bits 4, " if settings.model.bits != 4 and settings.lora.rank and settings.zero < 3 else ""
            zero = ", or --zero with more --processes" if settings.device_kind == "cuda" else ""
            lines.append(
                f"\nThe run does not fit ({needed}): the memory without activations is "
                f"{_gib(found.expected.total - found.expected.activations)} GiB. Try {bits}a smaller --lora.rank or "
                f"--model.max-length{zero}."
            )
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
