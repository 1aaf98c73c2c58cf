"""How this process was launched: alone, as one of several, under DeepSpeed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from angle_llm.config import OptimizerSettings
from angle_llm.train.processes import Processes
from angle_llm.train.strategy import Partitioned, Replicated, Spread, deepspeed_config

if TYPE_CHECKING:
    from accelerate import Accelerator


STALE_SECONDS = 1800
"""Age of a lock behind which nobody compiles any more."""


@dataclass(frozen=True)
class Launch:
    """The processes of this run, as Accelerate found them."""

    accelerator: Accelerator

    @classmethod
    def join(cls, run_dir: Path) -> Launch:
        """Meets the other processes.

        Raises:
            RuntimeError: from torch, if they do not come.
        """
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
        several = with_deepspeed or int(os.environ.get("WORLD_SIZE", "1")) > 1
        no_device = several and not torch.accelerator.is_available()
        backend = "gloo" if no_device else "nccl" if torch.cuda.is_available() else None
        accelerator = Accelerator(
            # Said to a DeepSpeed run, this would turn DeepSpeed off; not said without a GPU, processes would not meet.
            cpu=no_device and not with_deepspeed,
            mixed_precision="no",  # the settings choose the dtype, not the launcher
            deepspeed_plugin=_deepspeed_plugin() if with_deepspeed else None,
            # A lost process is the heartbeat's business; one that writes or tokenises may take its time.
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(days=1))] if several else [],
            log_with="tensorboard",
            project_dir=run_dir,
        )
        if with_deepspeed:
            # Else transformers would divide the weights while it loads them, and no probe could run the model.
            accelerator.state.deepspeed_plugin.dschf = None
        return cls(accelerator)

    @cached_property
    def processes(self) -> Processes:
        """This process among the others."""
        state: Any = self.accelerator.state
        device = torch.device("cpu") if state.device.type == "cpu" else state.device  # Accelerate may number CPUs
        return Processes(state.process_index, state.num_processes, device, state.local_process_index)

    @property
    def zero_stage(self) -> int:
        """What DeepSpeed divides among processes; 0 without DeepSpeed."""
        plugin = self.accelerator.state.deepspeed_plugin
        return 0 if plugin is None else int(plugin.zero_stage)

    @property
    def offloads(self) -> bool:
        """Whether DeepSpeed keeps optimizer state or weights in the host's memory."""
        zero = self._config.get("zero_optimization", {})
        return any(zero.get(f"offload_{what}", {}).get("device", "none") != "none" for what in ("optimizer", "param"))

    @property
    def compiles(self) -> bool:
        """Whether the launcher asks for torch.compile."""
        return os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"

    @property
    def other_strategy(self) -> str | None:
        """A way of dividing a model that the launcher asks for and that is not known here."""
        kind: str = self.accelerator.distributed_type.value
        if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":  # without a GPU it would not even engage
            return "FSDP"
        return None if kind in ("NO", "DEEPSPEED") or kind.startswith("MULTI_") else kind

    @property
    def casts(self) -> bool:
        """Whether the DeepSpeed config would round what is trained."""
        return any(self._config.get(dtype, {}).get("enabled") is True for dtype in ("bf16", "fp16"))

    @property
    def splits_layers(self) -> bool:
        """Whether the DeepSpeed config has processes work on one text together."""
        return (
            any(self._config.get(f"{what}_parallel") for what in ("tensor", "sequence")) or "pipeline" in self._config
        )

    @property
    def _config(self) -> dict[str, Any]:
        """DeepSpeed's; empty without it."""
        plugin = self.accelerator.state.deepspeed_plugin
        return {} if plugin is None else plugin.deepspeed_config

    def loads_on(self, bits: int | None) -> torch.device:
        """Where a model is loaded: weights that will be divided need never be in one device's memory together. Those in bits
        are packed where they will be used, layer by layer."""
        return torch.device("cpu") if self.zero_stage == 3 and bits is None else self.processes.device

    def spread(self, model: nn.Module, optimizer: OptimizerSettings) -> Spread:
        """Puts the model in place and spreads its update."""
        weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self.zero_stage:
            return Replicated(model.to(self.processes.device), weights, optimizer, self.processes)
        return Partitioned(model, weights, optimizer, self.processes, self.accelerator)

    def __str__(self) -> str:
        processes = self.processes
        what = (
            f"ZeRO-{self.zero_stage}{' with offload' if self.offloads else ''}" if self.zero_stage else "data parallel"
        )
        return f"process {processes.rank} of {processes.count} on {processes.device}" + (
            f", {what}" if processes.count > 1 or self.zero_stage else ""
        )


def _deepspeed_plugin() -> Any:
    """That of the launcher's config file or flags, with what every run here has in common."""
    _check_compiled()
    common = deepspeed_config()  # before DeepSpeed is imported: it names the device
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero3_init_flag=False)
    plugin.deepspeed_config.update(common)
    if plugin.zero_stage != 2:  # with backward passes in any number, DeepSpeed can overlap in stage 2 alone
        plugin.deepspeed_config["zero_optimization"]["overlap_comm"] = False
    return plugin


def _check_compiled() -> None:
    """A compilation of DeepSpeed's that was killed leaves a lock for which every later start would wait, for ever."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in folder.glob("**/deepspeed*/lock"):
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            raise RuntimeError(f"{lock} was left by a compilation that was killed. Remove it, and start again.")
