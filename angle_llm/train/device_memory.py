"""Memory of one device in a training run, alone or with ZeRO (arXiv 1910.02054).

Arithmetic from the documentation of torch and DeepSpeed. DeepSpeed's buffers have the `auto` sizes that accelerate
sets.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from angle_llm.model.outline import held_bytes
from angle_llm.model.step_memory import StepMemory
from angle_llm.train.distributed import Processes

GIB = 2**30
MASTER_BYTES = 4
"""Bytes of DeepSpeed's float32 copy of each trained weight in stages 1 and 2."""
LIVE_NUMBERS = 10**9
"""Maximum number of gathered weights of ZeRO-3 (`stage3_max_live_parameters`)."""
CONTEXT = round(0.6 * GIB)
"""Bytes before the first tensor: CUDA context and workspaces; on a CPU the libraries."""
EXCHANGE_CONTEXT = round(0.4 * GIB)
"""Buffers of NCCL with several GPUs."""
LOST = {"cuda": 0.05, "cpu": 0.3}
"""Share of activations that allocators waste: measured on a CPU (docs/history), assumed on a GPU."""


@dataclass(frozen=True)
class Sharding:
    """Processes and ZeRO stage of a run."""

    processes: int = 1
    zero: int = 0
    """ZeRO stage; 0: none."""
    offload: str = "none"
    """none, optimizer or parameters: kept in host memory."""

    @classmethod
    def of(cls, processes: Processes) -> Sharding:
        """Return that of a launch."""
        zero = processes.deepspeed_config.get("zero_optimization", {})
        far = [zero.get(f"offload_{what}", {}).get("device", "none") != "none" for what in ("param", "optimizer")]
        offload = "parameters" if far[0] else "optimizer" if far[1] else "none"
        return cls(processes.world_size, processes.zero_stage, offload)

    def __str__(self) -> str:
        if not self.zero:
            return f"processes: {self.processes}"
        return f"ZeRO-{self.zero}, processes: {self.processes}, offloaded: {self.offload}"

    def part(self, size: int, from_stage: int) -> int:
        """Return the share of one process, if the stage partitions it."""
        return -(-size // self.processes) if self.zero >= from_stage else size


@dataclass(frozen=True)
class Memory:
    """Peak memory of one device by purpose, in bytes."""

    base_weights: int
    """Frozen weights."""
    trained_weights: int
    """Adapter weights, or all weights without an adapter."""
    optimizer: int
    """AdamW state and temporary tensors of its update."""
    gradients: int
    activations: int
    """Saved and temporary tensors of the forward and backward passes."""
    embeddings: int
    """Embeddings of the batch, their gradient, and the loss."""
    exchange: int
    """Buffers for gradient reduction and gathered weights."""
    allowance: int
    """Estimate, not forecast: device context, libraries, and fragmentation."""

    @property
    def tensors(self) -> int:
        """All but the allowance, as `torch.cuda.max_memory_allocated` reports it."""
        return self.total - self.allowance

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Device:
    """One device of a run: memory that does not depend on activations."""

    kind: str
    """cuda or cpu."""
    sharding: Sharding
    base_bytes: int
    """Frozen weights, before partitioning."""
    trained_bytes: int
    trained_numbers: int
    bucket_numbers: int
    """Elements of a gradient bucket of DeepSpeed."""
    embedding_bytes: int
    """Embeddings of a batch."""
    loss_bytes: int
    """Peak of the loss and its gradient, embeddings included."""
    accumulates: bool = False
    """Whether an optimizer step has several batches."""

    @classmethod
    def of(
        cls,
        backbone: nn.Module,
        width: int,
        sharding: Sharding,
        kind: str,
        *,
        embeddings: int,
        loss: int,
        accumulates: bool,
    ) -> Device:
        """Return a device for a model outline of hidden size `width`."""
        trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        size, numbers = sum(one.nbytes for one in trained), sum(one.numel() for one in trained)
        base = held_bytes(backbone) - size
        return cls(kind, sharding, base, size, numbers, width**2, embeddings, loss, accumulates)

    def memory(self, step: StepMemory, *, cached: bool) -> Memory:
        """Return the memory of the backward pass, the loss or the update, whichever is largest."""
        before = self.trained_bytes if cached or self.accumulates else 0
        pending = 2 * self.embedding_bytes if cached else 0  # a kept step's are among its activations
        # AdamW updates all weights at once on a GPU, with one more of each; on a CPU one after another.
        update = self.trained_bytes if self.kind == "cuda" and self.sharding.offload == "none" else 0
        moments = [
            self._moment(gradients=step.gradients, activations=step.peak - step.gradients, embeddings=pending),
            self._moment(gradients=before, activations=0 if cached else step.kept, embeddings=self.loss_bytes),
            self._moment(gradients=self.trained_bytes, update=update),
        ]
        return max(moments, key=lambda memory: memory.total)

    def _moment(self, *, gradients: int, activations: int = 0, embeddings: int = 0, update: int = 0) -> Memory:
        sharding = self.sharding
        weights_here, states_here = sharding.offload != "parameters", sharding.offload == "none"
        nccl = EXCHANGE_CONTEXT if sharding.processes > 1 and self.kind == "cuda" else 0
        return Memory(
            base_weights=sharding.part(self.base_bytes, 3) * weights_here,
            trained_weights=sharding.part(self.trained_bytes, 3) * weights_here,
            optimizer=self._states * states_here + sharding.part(update, 1),
            gradients=sharding.part(gradients, 2),
            activations=activations,
            embeddings=embeddings,
            exchange=self._exchange,
            allowance=CONTEXT + nccl + round(LOST[self.kind] * activations),
        )

    @property
    def _states(self) -> int:
        """AdamW's two moments; DeepSpeed keeps them in float32, with a copy of the weights in stages 1 and 2."""
        if not self.sharding.zero:
            return 2 * self.trained_bytes
        copies = MASTER_BYTES if self.sharding.zero < 3 else 0
        return self.sharding.part((8 + copies) * self.trained_numbers, 1)

    @property
    def _exchange(self) -> int:
        if not self.sharding.zero:  # gradients are copied to be summed (DataParallelStrategy)
            return self.trained_bytes if self.sharding.processes > 1 else 0
        gathered = min(self.base_bytes + self.trained_bytes, 2 * LIVE_NUMBERS) if self.sharding.zero == 3 else 0
        return 4 * self.bucket_numbers + gathered

    @property
    def host_bytes(self) -> int:
        """Host memory of one process."""
        weights = self.sharding.part(self.base_bytes + self.trained_bytes, 3)
        return {"none": 0, "optimizer": self._states, "parameters": self._states + weights}[self.sharding.offload]


def free_memory(processes: Processes) -> int | None:
    """Return the bytes that a rank can use on its device, including those it uses now; the minimum over ranks.

    Memory in use is included because a forecast (`Memory`) counts it: tensors, device context and NCCL. None if the
    memory of the device is unknown.
    """
    processes.max(0)  # all ranks have loaded their weights
    device = processes.device
    free = None
    if device.type == "cuda":
        context = CONTEXT + (EXCHANGE_CONTEXT if processes.world_size > 1 else 0)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) + context
    elif device.type == "cpu" and (available := _available_memory()) is not None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", processes.world_size))
        free = available // local + _own_memory()
    least = -processes.max(-(free or 0))
    return least or None


_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
_CGROUPS = (  # limit and use of a container: version 2, and version 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat"), "anon"),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.stat"), "rss"),
)


def _available_memory() -> int | None:
    """Return the bytes that this machine or container can still give; None if the system does not report them."""
    if not _MEMINFO.is_file():
        return None
    available = 1024 * _number(_MEMINFO, "MemAvailable:")
    for limit, use, name in _CGROUPS:
        if limit.is_file() and (most := limit.read_text().strip()).isdecimal():
            available = min(available, int(most) - _number(use, name))
    return max(available, 0)


def _own_memory() -> int:
    """Return the bytes that this process would free at its end; pages of mapped files count as available already."""
    return 1024 * sum(_number(_STATUS, name) for name in ("RssAnon:", "RssShmem:"))


def _number(path: Path, name: str) -> int:
    """Return the number after a name in a file of the kernel; 0 if it is not there."""
    lines = (line.split() for line in path.read_text().splitlines()) if path.is_file() else []
    return next((int(words[1]) for words in lines if words and words[0] == name), 0)
