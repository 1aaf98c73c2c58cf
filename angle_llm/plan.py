"""`angle-llm plan`: forecast memory and work of a training run without loading weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from angle_llm.config import STRICT, SettingsError, TrainSettings


@dataclass(frozen=True, config=STRICT)
class PlanSettings(TrainSettings):
    """The settings of a training run, and of where it is to run."""

    memory: float | None = None
    """GiB of one device: the largest micro_batch_tokens and graph_tokens that fit are proposed."""
    processes: int = 1
    """Processes of the run, one for each device."""
    zero: Literal[0, 1, 2, 3] = 0
    """Stage of DeepSpeed's ZeRO: 1 divides the optimizer's state among the processes, 2 gradients too, 3 weights too."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What ZeRO keeps in the host's memory: the optimizer's state, or with stage 3 the weights as well."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where it is to run: what is kept for the backward pass depends on the kernels."""
    sample: int = 2048
    """Examples, in whole batches, that are tokenised and planned; what the run computes is extrapolated from them."""
    json: str | None = None
    """A file to write the forecast to; its sizes are in bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("processes", "sample"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if self.memory is not None and self.memory <= 0:
            raise SettingsError(f"memory is a positive number of GiB, got {self.memory}.")
        if self.offload != "none" and self.zero == 0:
            raise SettingsError(f"offload {self.offload} needs ZeRO. Set zero to 1, 2 or 3, or offload to none.")
        if self.offload == "parameters" and self.zero != 3:
            raise SettingsError(f"offload parameters needs zero 3, got {self.zero}. Or set offload to optimizer.")
        if self.zero == 3 and self.model.bits is not None:
            raise SettingsError(
                f"ZeRO-3 cannot divide a base held in {self.model.bits} bits. Set zero to 2, or leave model.bits away."
            )


def plan_main(settings: PlanSettings) -> None:
    """Print the forecast; write it as JSON with `--json`."""
    from angle_llm.forecast.plan import forecast, shown, write_forecast

    found = forecast(settings)
    print(shown(settings, found))
    if settings.json is not None:
        write_forecast(settings, found, Path(settings.json).expanduser())
