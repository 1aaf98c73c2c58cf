"""From a step to a device: what it holds besides activations, alone or sharing with others (ZeRO, arXiv 1910.02054).

Arithmetic on what torch and DeepSpeed document. DeepSpeed's buffers are those of its `auto` sizes, which accelerate fills in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import nn

from angle_llm.forecast.step import StepMemory
from angle_llm.model import outline

GIB = 2**30
MASTER_BYTES = 4
"""Of each trained number: DeepSpeed's own float32 copy, stages 1 and 2."""
LIVE_NUMBERS = 10**9
"""ZeRO-3 keeps at most so many gathered numbers (`stage3_max_live_parameters`)."""
CONTEXT = {"cuda": round(0.6 * GIB), "cpu": round(0.6 * GIB)}
"""Bytes before the first tensor: CUDA's context and its libraries' workspaces; on a CPU, the libraries."""
EXCHANGE_CONTEXT = round(0.4 * GIB)
"""NCCL's buffers, where several GPUs take part."""
LOST = {"cuda": 0.05, "cpu": 0.3}
"""Share of activations that allocators lose: seen on a CPU (docs/history), allowed for on a GPU."""


@dataclass(frozen=True)
class Spread:
    """How a run is spread out."""

    processes: int = 1
    zero: int = 0
    """Stage of ZeRO; 0 for none."""
    offload: str = "none"
    """none, optimizer or parameters: what waits in the host's memory."""

    def __str__(self) -> str:
        if not self.zero:
            return "one process" if self.processes == 1 else f"data parallel, {self.processes} processes"
        away = {"none": "", "optimizer": ", optimizer offloaded", "parameters": ", optimizer and weights offloaded"}
        return f"ZeRO-{self.zero}, processes: {self.processes}{away[self.offload]}"

    def part(self, size: int, from_stage: int) -> int:
        """A process's part of what is divided from a stage of ZeRO on."""
        return -(-size // self.processes) if self.zero >= from_stage else size


@dataclass(frozen=True)
class Memory:
    """The memory of one device in the moment of a step that takes most, by what holds it, in bytes."""

    base_weights: int
    """Frozen weights."""
    trained_weights: int
    """The adapter, or all weights if there is none."""
    optimizer: int
    """AdamW's state, and what its update works with."""
    gradients: int
    activations: int
    """What the forward pass keeps and what either pass works with."""
    embeddings: int
    """The batch's embeddings, their gradient, and the loss."""
    exchange: int
    """Buffers in which processes exchange gradients or gather weights."""
    allowance: int
    """Not predicted but allowed for: context and libraries of the device, and what its allocator loses."""

    @property
    def tensors(self) -> int:
        """All but the allowance: what `torch.cuda.max_memory_allocated` tells."""
        return self.total - self.allowance

    @property
    def total(self) -> int:
        """What the device needs."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Device:
    """One device of a run: what it holds whatever the step's activations are."""

    kind: str
    """cuda or cpu."""
    spread: Spread
    base_bytes: int
    """Frozen weights, of all processes together."""
    trained_bytes: int
    trained_numbers: int
    exchange_numbers: int
    """Of a bucket in which DeepSpeed exchanges gradients."""
    embedding_bytes: int
    """Of the embeddings of a batch."""
    loss_bytes: int
    """At once while the loss and its gradient are computed, embeddings included."""
    accumulates: bool = False
    """Whether an optimizer step has several batches."""

    @classmethod
    def holding(
        cls,
        backbone: nn.Module,
        width: int,
        spread: Spread,
        kind: str,
        *,
        embeddings: int,
        loss: int,
        accumulates: bool,
    ) -> Device:
        """A device for an outline of hidden size `width`."""
        trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        trained_bytes = sum(parameter.nbytes for parameter in trained)
        return cls(
            kind=kind,
            spread=spread,
            base_bytes=outline.held_bytes(backbone) - trained_bytes,
            trained_bytes=trained_bytes,
            trained_numbers=sum(parameter.numel() for parameter in trained),
            exchange_numbers=width**2,
            embedding_bytes=embeddings,
            loss_bytes=loss,
            accumulates=accumulates,
        )

    def memory(self, step: StepMemory, *, cached: bool) -> Memory:
        """In the backward pass, the loss or the update: whichever takes most."""
        before = self.trained_bytes if cached or self.accumulates else 0
        waiting = 2 * self.embedding_bytes if cached else 0  # a kept step's are among its activations
        # AdamW updates all weights at once on a GPU, with one more of each; on a CPU one after another.
        update = self.trained_bytes if self.kind == "cuda" and not self.host_bytes else 0
        moments = [
            self._moment(step.gradients, step.peak - step.gradients, waiting, 0),
            self._moment(before, 0 if cached else step.kept, self.loss_bytes, 0),
            self._moment(self.trained_bytes, 0, 0, update),
        ]
        return max(moments, key=lambda memory: memory.total)

    def _moment(self, gradients: int, activations: int, embeddings: int, update: int) -> Memory:
        spread = self.spread
        allowance = CONTEXT[self.kind] + round(LOST[self.kind] * activations)
        if spread.processes > 1 and self.kind == "cuda":
            allowance += EXCHANGE_CONTEXT
        weights_here, states_here = spread.offload != "parameters", spread.offload == "none"
        return Memory(
            base_weights=spread.part(self.base_bytes, 3) * weights_here,
            trained_weights=spread.part(self.trained_bytes, 3) * weights_here,
            optimizer=self._states * states_here + spread.part(update, 1),
            gradients=spread.part(gradients, 2),
            activations=activations,
            embeddings=embeddings,
            exchange=self._exchange,
            allowance=allowance,
        )

    @property
    def _states(self) -> int:
        """AdamW's two averages; DeepSpeed's are in float32, and of its own copy in the first two stages."""
        if not self.spread.zero:
            return 2 * self.trained_bytes
        copies = MASTER_BYTES if self.spread.zero < 3 else 0
        return self.spread.part((8 + copies) * self.trained_numbers, 1)

    @property
    def _exchange(self) -> int:
        if not self.spread.zero:  # DistributedDataParallel copies gradients into buckets
            return self.trained_bytes if self.spread.processes > 1 else 0
        gathered = min(self.base_bytes + self.trained_bytes, 2 * LIVE_NUMBERS) if self.spread.zero == 3 else 0
        return 4 * self.exchange_numbers + gathered

    @property
    def host_bytes(self) -> int:
        """What one process keeps in the host's memory."""
        weights = self.spread.part(self.base_bytes + self.trained_bytes, 3)
        return {"none": 0, "optimizer": self._states, "parameters": self._states + weights}[self.spread.offload]
