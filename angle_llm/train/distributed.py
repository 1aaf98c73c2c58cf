"""The processes of a run: who is who, and the few things they say to one another.

A run of one process is the same code: it has nobody to talk to. Whatever is written is written by the main process, rank 0;
what it reads it tells the others, so that they need not see its disk.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from angle_llm.config import SettingsError, TrainSettings

if TYPE_CHECKING:
    from accelerate import Accelerator


Value = TypeVar("Value")


class RemoteRankError(RuntimeError):
    """Another process of the run has failed, or is not where this one is."""


@dataclass(frozen=True)
class Processes:
    """A process among those of its run. Every method but the properties is for all of them to call, in the same order."""

    rank: int
    count: int
    device: torch.device
    """Where what they exchange lies."""
    local_rank: int = 0
    """Its number on its machine."""

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Processes:
        """A run of one process."""
        return cls(0, 1, torch.device(device))

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds up the processes' tensors of one shape, in place; all get the same bits."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    def highest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.count == 1:
            return number
        tensor = torch.tensor([number], device=self.device)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: Value) -> list[Value]:
        """Everybody's value, by rank; small things."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], Value]) -> Value:
        """What the main process makes, and tells the others.

        Raises:
            RemoteRankError: in the others, if it fails there.
        """
        if self.count == 1:
            return make()
        told: list[Any] = [None, None]
        try:
            if self.is_main:
                told = [make(), None]
        except BaseException as error:
            told = [None, f"{type(error).__name__}: {error}"]
            raise
        finally:
            distributed.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise RemoteRankError(f"process 0 could not go on: {told[1]}")
        value: Value = told[0]
        return value

    def once_a_machine(self, work: Callable[[], None]) -> None:
        """Has the first process of every machine do something; the others wait until it is done.

        Raises:
            RemoteRankError: where it was not done, if it failed somewhere.
        """
        problem = None
        try:
            if self.local_rank == 0:
                work()
        except Exception as error:
            problem = f"process {self.rank} could not go on: {error}"
            raise
        finally:
            problems = [one for one in self.gather(problem) if one]
        if problems:
            raise RemoteRankError(problems[0])

    def tensors_from_main(self, tensors: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """Named tensors that the main process holds (the others pass None), one after the other, on the device of all."""
        shapes = self.from_main(lambda: {name: (one.shape, one.dtype) for name, one in (tensors or {}).items()})
        for name, (shape, dtype) in shapes.items():
            tensor = tensors[name] if tensors is not None else torch.empty(shape, dtype=dtype)
            on_device = tensor.to(self.device).contiguous()
            if self.count > 1:
                distributed.broadcast(on_device, src=0)
            yield name, on_device

    def check_same(self, what: str, value: object) -> None:
        """Refuses to go on if a process holds another value than the main one.

        Raises:
            RemoteRankError: in all of them, naming the process.
        """
        for rank, other in enumerate(values := self.gather(value)):
            if other != values[0]:
                raise RemoteRankError(
                    f"process {rank} has other {what} than process 0 ({other}; {values[0]}). Give every process the same "
                    "files, packages and settings."
                )


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
            # A lost process is noticed by ProcessWatch; one that writes or tokenises may take its time.
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


def deepspeed_config() -> dict[str, Any]:
    """What every DeepSpeed run here has in common; a config file says the rest."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    return {
        "train_micro_batch_size_per_gpu": 1,  # micro-batches are made here; DeepSpeed only counts with it
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # any number of backward passes, then a step
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, offloaded too: the same numbers, and nothing to compile
    }


def _check_compiled() -> None:
    """A compilation of DeepSpeed's that was killed leaves a lock for which every later start would wait, for ever."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in folder.glob("**/deepspeed*/lock"):
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            raise RuntimeError(f"{lock} was left by a compilation that was killed. Remove it, and start again.")


class Refusal(NamedTuple):
    """A case that cannot work."""

    holds: Callable[[TrainSettings, Launch], bool]
    why: str
    instead: str


TABLE: list[Refusal] = [
    Refusal(
        lambda settings, launch: settings.model.bits is not None and importlib.util.find_spec("bitsandbytes") is None,
        "model.bits needs the package bitsandbytes, which is not installed",
        "pip install 'angle_llm[quantization]', or leave model.bits out",
    ),
    Refusal(
        lambda settings, launch: launch.other_strategy is not None,
        "the launcher asks for FSDP, Megatron-LM or another way of dividing a model, and this would be data parallel without "
        "a word",
        "divide weights with ZeRO-3, as in accelerate launch --config_file deepspeed_configs/zero3.yaml",
    ),
    Refusal(
        lambda settings, launch: launch.compiles,
        "the launcher asks for torch.compile, and micro-batches of every shape would be compiled one by one",
        "launch with --dynamo_backend no",
    ),
    Refusal(
        lambda settings, launch: launch.casts,
        "the DeepSpeed config enables bf16 or fp16, which would round the adapter and its optimizer state too",
        "take that section out: model.dtype is the dtype of the base, and the adapter stays float32",
    ),
    Refusal(
        lambda settings, launch: launch.splits_layers,
        "the DeepSpeed config asks for tensor, pipeline or sequence parallelism, under which processes do not hold texts of "
        "their own",
        "take that section out: ZeRO-3 divides weights, and gradient caching bounds the activations",
    ),
]


def check_can_work(settings: TrainSettings, launch: Launch) -> None:
    """Refuses settings that cannot work the way the run was launched.

    Raises:
        SettingsError: with the reason, and the nearest thing that works.
    """
    for refusal in TABLE:
        if refusal.holds(settings, launch):
            raise SettingsError(f"{refusal.why}. Instead: {refusal.instead}.")
