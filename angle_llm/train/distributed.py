"""The processes of a run: how they were launched, and the values they exchange.

A run with one process uses the same code; every exchange then returns its input. Rank 0, the main process, writes all
files and sends what it reads to the other ranks, which do not need its disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from angle_llm.settings_io import SettingsError

Value = TypeVar("Value")

STALE_LOCK_SECONDS = 1800
"""Age above which a compilation lock of DeepSpeed is removed as that of a killed process."""


class RemoteRankError(RuntimeError):
    """Another rank failed, or its inputs differ from those of rank 0."""


@dataclass(frozen=True)
class Processes:
    """This process among the processes of its run. Every rank must call the same methods in the same order."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the model and of exchanged tensors."""
    local_rank: int = 0
    """Rank on this machine."""
    accelerator: Any = field(default=None, compare=False, repr=False)
    """The `accelerate.Accelerator` of the launch; needed by DeepSpeed only."""

    @classmethod
    def start(cls) -> Processes:
        """Connect to the other processes that the launcher started.

        Raises:
            SettingsError: if the launcher selects a strategy that is not supported.
            RuntimeError: from torch, if the processes cannot connect.
        """
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        with_deepspeed = _flag(os.environ, "ACCELERATE_USE_DEEPSPEED")
        several = with_deepspeed or int(os.environ.get("WORLD_SIZE", "1")) > 1
        on_cpu = _flag(os.environ, "ACCELERATE_USE_CPU") or (several and not torch.accelerator.is_available())
        backend = "gloo" if on_cpu else "nccl" if torch.cuda.is_available() else None
        accelerator = Accelerator(
            # True would turn DeepSpeed off; False without a GPU would not connect the processes.
            cpu=on_cpu and not with_deepspeed,
            mixed_precision="no",  # the settings choose the dtype, not the launcher
            deepspeed_plugin=_deepspeed_plugin() if with_deepspeed else None,
            # ProcessWatch detects a lost process; a rank that writes or reads data may take long.
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(days=1))] if several else [],
        )
        state: Any = accelerator.state
        if with_deepspeed:
            # Otherwise transformers would partition the weights while it loads them, and probes could not run the
            # model.
            state.deepspeed_plugin.dschf = None
        device = torch.device("cpu") if state.device.type == "cpu" else state.device  # Accelerate may number CPUs
        processes = cls(state.process_index, state.num_processes, device, state.local_process_index, accelerator)
        check_launch(accelerator.distributed_type.value, processes.deepspeed_config, os.environ)
        return processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of DeepSpeed; 0 without DeepSpeed."""
        plugin = self.accelerator and self.accelerator.state.deepspeed_plugin
        return int(plugin.zero_stage) if plugin else 0

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration; empty without DeepSpeed."""
        return self.accelerator.state.deepspeed_plugin.deepspeed_config if self.zero_stage else {}

    def load_device(self, bits: int | None) -> torch.device:
        """Return the device on which a model is loaded. ZeRO-3 partitions weights from the CPU: no device ever holds
        all of them. Quantised weights are packed layer by layer on the device that uses them."""
        return torch.device("cpu") if self.zero_stage == 3 and bits is None else self.device

    def __str__(self) -> str:
        zero = self.deepspeed_config.get("zero_optimization", {})
        offload = any(
            zero.get(f"offload_{what}", {}).get("device", "none") != "none" for what in ("optimizer", "param")
        )
        strategy = f", ZeRO-{self.zero_stage}{' with offload' if offload else ''}" if self.zero_stage else ""
        strategy = strategy or (", data parallel" if self.world_size > 1 else "")
        return f"process {self.rank} of {self.world_size} on {self.device}{strategy}"

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up the tensors of all ranks in place; every rank gets the same bits."""
        if self.world_size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def max(self, number: int) -> int:
        """Return the largest number of all ranks."""
        if self.world_size == 1:
            return number
        tensor = torch.tensor([number], device=self.device)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, by rank; for small values."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], Value], *, each_machine: bool = False) -> Value:
        """Call `make` on rank 0 and return its value, a small one, on every rank.
        With `each_machine`, the first rank of every machine calls it.

        Raises:
            RemoteRankError: on the other ranks, if it fails on one.
        """
        if self.world_size == 1:
            return make()
        values: list[Any] = [None]
        problem = ""
        try:
            if (self.local_rank if each_machine else self.rank) == 0:
                values = [make()]
        except BaseException as error:
            problem = f"rank {self.rank} failed: {type(error).__name__}: {error}"
            raise
        finally:
            problems = list(filter(None, self.gather(problem)))
        if problems:
            raise RemoteRankError(problems[0])
        distributed.broadcast_object_list(values, src=0)
        return cast(Value, values[0])

    def broadcast(self, tensors: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors of rank 0 (the other ranks pass None) one after the other, on the device."""
        shapes = self.from_main(lambda: {name: (one.shape, one.dtype) for name, one in (tensors or {}).items()})
        for name, (shape, dtype) in shapes.items():
            tensor = tensors[name] if tensors is not None else torch.empty(shape, dtype=dtype)
            on_device = tensor.to(self.device).contiguous()
            if self.world_size > 1:
                distributed.broadcast(on_device, src=0)
            yield name, on_device

    def check_equal(self, what: str, value: object) -> None:
        """Check that a value is the same on every rank.

        Raises:
            RemoteRankError: on every rank; names the rank that differs.
        """
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RemoteRankError(
                    f"{what} differs between ranks: rank {rank} has {other}, rank 0 has {values[0]}. Use the same files, "
                    "packages and settings on every machine."
                )


def check_launch(kind: str, deepspeed_config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Refuse a launch that would not train as requested. `kind` is Accelerate's distributed type.

    Raises:
        SettingsError: with the reason and a supported alternative.
    """
    fsdp = _flag(environment, "ACCELERATE_USE_FSDP")  # without a GPU, `kind` does not show it
    if fsdp or not (kind in ("NO", "DEEPSPEED") or kind.startswith("MULTI_")):
        raise SettingsError(
            f"the launcher selects {'FSDP' if fsdp else kind}, which is not supported. To partition weights, use ZeRO-3: "
            "accelerate launch --config_file deepspeed_configs/zero3.yaml."
        )
    if _flag(environment, "ACCELERATE_USE_DEEPSPEED") and _flag(environment, "ACCELERATE_USE_CPU"):
        raise SettingsError(
            "the launcher selects DeepSpeed and the CPU, and Accelerate then turns DeepSpeed off. Set use_cpu: false in the "
            "config file and omit --cpu; to keep a run off the GPUs, set CUDA_VISIBLE_DEVICES=''."
        )
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise SettingsError("the launcher selects torch.compile, which is not supported: use --dynamo_backend no.")
    if any(deepspeed_config.get(dtype, {}).get("enabled") is True for dtype in ("bf16", "fp16")):
        raise SettingsError(
            "the DeepSpeed config enables bf16 or fp16, which would round the adapter and its optimizer state. Remove that "
            "section: model.dtype sets the dtype of the base, the adapter stays float32."
        )
    if "pipeline" in deepspeed_config or any(deepspeed_config.get(f"{one}_parallel") for one in ("tensor", "sequence")):
        raise SettingsError(
            "the DeepSpeed config selects tensor, pipeline or sequence parallelism, but every rank encodes its own texts. "
            "Remove that section. To partition weights, use ZeRO-3."
        )


def _flag(environment: Mapping[str, str], name: str) -> bool:
    """Return whether a variable of the launcher is true, as Accelerate reads it."""
    return environment.get(name, "false").lower() in ("y", "yes", "t", "true", "on", "1")


def _deepspeed_plugin() -> Any:
    """Return the plugin of the launcher's config file or flags, with the values that every run needs."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in folder.glob("**/deepspeed*/lock"):  # DeepSpeed would wait for it without limit
        if time.time() - lock.stat().st_mtime > STALE_LOCK_SECONDS:
            raise RuntimeError(f"{lock} is the lock of a compilation that was killed. Remove it and start again.")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # read on import
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero3_init_flag=False)
    plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=1,  # micro-batches are made by `model.micro_batches`
        gradient_accumulation_steps=1,
        managed_gradient_accumulation=False,  # any number of backward passes, then one step
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,  # torch's AdamW also with offload: same numbers, nothing to compile
    )
    if plugin.zero_stage != 2:  # with any number of backward passes, DeepSpeed documents overlap for stage 2 only
        plugin.deepspeed_config["zero_optimization"]["overlap_comm"] = False
    return plugin
