"""Memory of one device in a training step, by purpose, and the memory that a device has.

`Device` computes weights, gradients, optimizer state and communication buffers from the number of parameters and the
ZeRO stage. The formulas are from the documentation of torch and DeepSpeed, with the buffer sizes that accelerate sets.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from angle_llm.train.distributed import Processes

GIB = 2**30
MASTER_BYTES = 4
"""Bytes of the float32 copy that DeepSpeed keeps of each trained weight in ZeRO stages 1 and 2."""
LIVE_NUMBERS = 10**9
"""Maximum number of weights that ZeRO-3 keeps gathered (`stage3_max_live_parameters` of DeepSpeed)."""
CONTEXT = round(0.6 * GIB)
"""Bytes in use before the first tensor: CUDA context and workspaces, or the loaded libraries on a CPU."""
EXCHANGE_CONTEXT = round(0.4 * GIB)
"""Bytes of the NCCL buffers in a run with several GPUs."""
LOST = {"cuda": 0.05, "cpu": 0.3}
"""Fraction of the activations that allocators waste: measured on a CPU (docs/history), assumed on a GPU."""
LOSS_COPIES, LOSS_BLOCKS = 6, 64 * 2**20
"""Memory of a loss: matrices of the size of the embeddings, and bytes of similarity blocks. An upper bound of all terms with
48 to 11,444 texts and 384 to 4,096 dimensions."""


@dataclass(frozen=True)
class Sharding:
    """Number of processes, ZeRO stage and offloading of a run."""

    processes: int = 1
    zero: int = 0
    """ZeRO stage; 0 without ZeRO."""
    offload: str = "none"
    """State that ZeRO keeps in host memory: `none`, `optimizer` or `parameters` (the optimizer state and all weights)."""
    fsdp: bool = False
    """Whether FSDP partitions the frozen weights."""

    def __str__(self) -> str:
        if not self.zero:
            return f"{'FSDP, ' if self.fsdp else ''}processes: {self.processes}"
        return f"ZeRO-{self.zero}, processes: {self.processes}, offloaded: {self.offload}"

    def part(self, size: int, from_stage: int) -> int:
        """Return the bytes on one process of a tensor group of `size` bytes that ZeRO partitions from stage `from_stage`.

        Examples: optimizer state from stage 1, gradients from stage 2, weights from stage 3.
        """
        return -(-size // self.processes) if self.zero >= from_stage else size


@dataclass(frozen=True)
class Memory:
    """Peak memory of one device in bytes, by purpose."""

    base_weights: int
    """Frozen weights."""
    trained_weights: int
    """Weights of the adapter, or all weights if there is no adapter."""
    optimizer: int
    """AdamW state and temporary tensors of the update."""
    gradients: int
    activations: int
    """Saved and temporary tensors of the forward and backward passes."""
    embeddings: int
    """Embeddings of the batch, their gradient, and the tensors of the loss."""
    exchange: int
    """Buffers for gradient reduction and for gathered weights."""
    allowance: int
    """Estimate of memory outside tensors: device context, libraries and fragmentation."""

    @property
    def total(self) -> int:
        """Sum of all purposes in bytes."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Device:
    """The sizes that determine the memory of a training step on one device, activations excepted."""

    kind: str
    """Device type, `cuda` or `cpu`."""
    sharding: Sharding
    base_bytes: int
    """Bytes of the frozen weights, before partitioning."""
    trained_bytes: int
    """Bytes of the trained weights, before partitioning."""
    trained_numbers: int
    """Number of trained weights."""
    moment_bytes: int
    """Bytes of the two moments of AdamW, without DeepSpeed."""
    bucket_numbers: int
    """Number of elements in a gradient bucket of DeepSpeed."""
    embedding_bytes: int
    """Bytes of the embeddings in an optimizer step."""
    number_bytes: int = 2
    """Bytes per element of the base weights."""
    summed_bytes: int = 0
    """Maximum number of bytes of gradients that are summed over processes at a time, without DeepSpeed."""
    gathered_bytes: int = 0
    """Maximum number of bytes of the weights that FSDP gathers at a time."""

    def memory(self, activations: int) -> Memory:
        """Return the peak memory of a training step whose passes need `activations` bytes.

        The peak is in the passes or in the update. Gradients of an earlier batch or micro-batch count in the passes.
        """
        part, offload = self.sharding.part, self.sharding.offload
        has_weights, has_states = offload != "parameters", offload == "none"  # on the device
        context = CONTEXT + (EXCHANGE_CONTEXT if self.sharding.processes > 1 and self.kind == "cuda" else 0)
        base = -(-self.base_bytes // self.sharding.processes) if self.sharding.fsdp else part(self.base_bytes, 3)
        passes = Memory(
            base_weights=base if has_weights else 0,
            trained_weights=part(self.trained_bytes, 3) if has_weights else 0,
            optimizer=self._states if has_states else 0,
            gradients=part(self.trained_bytes, 2),
            activations=activations,
            embeddings=LOSS_COPIES * self.embedding_bytes + LOSS_BLOCKS,
            exchange=self._exchange,
            allowance=context + round(LOST[self.kind] * activations),
        )
        # With DeepSpeed on a GPU, AdamW updates all weights at once with a temporary copy.
        copies = part(self.trained_bytes, 1) if self.kind == "cuda" and has_states and self.sharding.zero else 0
        optimizer = passes.optimizer + copies
        update = replace(passes, optimizer=optimizer, activations=0, embeddings=0, allowance=context)
        return max(passes, update, key=lambda memory: memory.total)

    @property
    def _states(self) -> int:
        """Bytes of the optimizer state per process: two moments of AdamW, in float32 with DeepSpeed."""
        if not self.sharding.zero:
            return self.moment_bytes
        copies = MASTER_BYTES if self.sharding.zero < 3 else 0
        return self.sharding.part((8 + copies) * self.trained_numbers, 1)

    @property
    def _exchange(self) -> int:
        """Bytes of the buffers for gradient reduction and for gathered weights."""
        if not self.sharding.zero:  # DataParallelStrategy copies gradients to sum them
            return self.gathered_bytes + (self.summed_bytes if self.sharding.processes > 1 else 0)
        gathered = min(self.base_bytes + self.trained_bytes, self.number_bytes * LIVE_NUMBERS)
        return 4 * self.bucket_numbers + (gathered if self.sharding.zero == 3 else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that offloading needs per process."""
        weights = self.sharding.part(self.base_bytes + self.trained_bytes, 3)
        return {"none": 0, "optimizer": self._states, "parameters": self._states + weights}[self.sharding.offload]


def free_memory(processes: Processes, weights: float = math.inf) -> int | None:
    """Return the device memory in bytes that a rank can use, the minimum over ranks; None if unknown.

    The libraries and the model of the run, whose weights have `weights` bytes, count as free memory, because a forecast
    (`Memory`) includes them. Other objects of this process, such as an earlier model, do not.
    """
    processes.max(0)  # wait until all ranks have loaded their weights
    device = processes.device
    free = None
    if device.type == "cuda":
        context = CONTEXT + (EXCHANGE_CONTEXT if processes.world_size > 1 else 0)
        others = max(torch.cuda.memory_allocated(device) - weights, 0)
        free = round(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - others) + context
    elif device.type == "mps":
        others = max(torch.mps.current_allocated_memory() - weights, 0)
        free = round(torch.mps.recommended_max_memory() - others)
    elif device.type == "cpu" and (available := _available_memory()) is not None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", processes.world_size))
        # The memory of this process, without file pages, which `MemAvailable` includes.
        used = 1024 * sum(_kernel_number(_STATUS, name) for name in ("RssAnon:", "RssShmem:"))
        free = available // local + round(min(used, CONTEXT + weights))
    least = -processes.max(-(free or 0))  # the minimum over ranks; 0 if it is unknown on a rank
    return least or None


_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat"), "anon"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.stat"), "rss"),
)
"""Files with the memory limit and use of a container, and the key of the use: cgroup version 2, then version 1."""


def _available_memory() -> int | None:
    """Return the bytes that this machine or container can still allocate; None if the system does not report them."""
    if not _MEMINFO.is_file():
        return None
    available = 1024 * _kernel_number(_MEMINFO, "MemAvailable:")
    for limit, use, name in _CGROUPS:
        if limit.is_file() and (most := limit.read_text().strip()).isdecimal():
            available = min(available, int(most) - _kernel_number(use, name))
    return max(available, 0)


def _kernel_number(path: Path, name: str) -> int:
    """Return the number after `name` in a file of the Linux kernel; 0 without such a line."""
    lines = (line.split() for line in path.read_text().splitlines()) if path.is_file() else []
    return next((int(words[1]) for words in lines if words and words[0] == name), 0)
