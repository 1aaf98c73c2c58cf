"""Settings of `angle-llm plan`."""

from __future__ import annotations

from typing import Literal

from angle_llm.settings.parsing import Positive, PositiveFloat, SettingsError, settings_class
from angle_llm.settings.train import TrainSettings


@settings_class
class PlanSettings(TrainSettings):
    """Settings of `angle-llm plan`: a training run, and the devices for which memory is forecast."""

    memory: PositiveFloat | None = None
    """Free memory of a device in GiB, for which unset token budgets are chosen as in a training run. None:
    micro_batch_tokens 8192 (2048 on a CPU) and graph_tokens 16384."""
    processes: Positive = 1
    """Number of training processes, with one device per process."""
    zero: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: 1 partitions the optimizer state, 2 also gradients, 3 also weights."""
    fsdp: bool = False
    """Whether FSDP partitions the frozen weights."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Training state that ZeRO keeps in host memory. optimizer: the optimizer state. parameters: also the weights
    (stage 3)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Kind of device; attention kernels of a GPU and of a CPU need different memory in training. auto: cuda if
    available, else cpu. Set cuda to plan a GPU run on a machine without a GPU."""
    json: str | None = None
    """Also write the forecast to this JSON file, sizes in bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp and self.zero:
            raise SettingsError(f"--fsdp excludes --zero {self.zero}. Omit one of them.")
        if self.offload != "none" and self.zero == 0:
            raise SettingsError(f"--offload {self.offload} needs ZeRO. Set --zero 1, 2 or 3, or --offload none.")
        if self.offload == "parameters" and self.zero != 3:
            raise SettingsError(f"--offload parameters needs --zero 3, got {self.zero}. Or set --offload optimizer.")

    @property
    def device_kind(self) -> str:
        """Device type of the planned run: `cuda` or `cpu`."""
        import torch

        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"
