"""How an update is spread over processes. Two ways compute the same one.

`DataParallelStrategy` (one process, or data parallel): each process holds all weights and back-propagates its texts; one
sum over processes follows. torch's DDP would sum inside the backward pass; a sum after it lets the processes first agree
that none ran out of memory, and needs no matching number of backward passes.

`ZeroStrategy` (DeepSpeed ZeRO): optimizer state (stage 1), gradients (2) and weights (3) are divided among processes.

State goes in and out as whole tensors by name, so a checkpoint is the same whoever wrote it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from angle_llm.config import OptimizerSettings
from angle_llm.train.distributed import Launch, Processes
from angle_llm.train.memory import MemoryShortError, is_out_of_memory

if TYPE_CHECKING:
    from accelerate import Accelerator

Value = TypeVar("Value")
Named = Iterable[tuple[str, Tensor]]

MOMENTS = ("exp_avg", "exp_avg_sq")
SUMMED_AT_ONCE = 64 * 2**20
"""Numbers of the buffer that gradients are summed in."""


class StepStrategy(ABC):
    """What a step needs of the way its update is spread."""

    processes: Processes

    @abstractmethod
    def backward(self, scalar: Tensor) -> None:
        """Adds this process's part of the gradient."""

    @abstractmethod
    def guard_oom(self, work: Callable[[], Value]) -> Value:
        """Does a part of a step.

        Raises:
            MemoryShortError: if memory ran out; where it says so in all processes, the step may be tried again.
        """


class Strategy(StepStrategy):
    """What a training run needs."""

    name: str
    model: nn.Module
    """Maps a micro-batch to rows. Every process must call it equally often."""

    @abstractmethod
    def update(self, rate: float) -> float:
        """Takes the step that the gradients of all processes ask for; returns their norm before clipping.

        A norm that is not finite is returned too, and then no weight has changed (partitioned: may have).
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Drops what `backward` has added."""

    @abstractmethod
    def gather_params(self) -> Any:
        """A context in which the trainable weights are there in full, to be read."""

    @abstractmethod
    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state on the main process's CPU: NAME/exp_avg, NAME/exp_avg_sq, NAME/step. Empty before the first
        step, and in the other processes."""

    @abstractmethod
    def load_state(self, weights: Named, optimizer: Named) -> None:
        """Puts back weights and what `optimizer_tensors` gave, one after the other."""

    @abstractmethod
    def check_replicas(self) -> None:
        """Refuses to go on if what every process holds a copy of differs.

        Raises:
            RemoteRankError: naming the process.
        """


class SingleProcess(StepStrategy):
    """One process that only adds gradients up; somebody else takes the step."""

    def __init__(self, model: nn.Module) -> None:
        self.processes = Processes.alone(next(model.parameters()).device)

    def backward(self, scalar: Tensor) -> None:
        scalar.backward()  # type: ignore[no-untyped-call]

    def guard_oom(self, work: Callable[[], Value]) -> Value:
        return work()


class DataParallelStrategy(Strategy):
    """One process, or each with all weights."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        processes: Processes,
    ) -> None:
        self.name = "one process" if processes.count == 1 else "data parallel"
        self.model = model
        self.processes = processes
        self._weights = weights
        self._most = settings.max_gradient_norm
        self.optimizer = adamw(weights, settings, fused=processes.device.type == "cuda")

    def backward(self, scalar: Tensor) -> None:
        scalar.backward()  # type: ignore[no-untyped-call]

    def guard_oom(self, work: Callable[[], Value]) -> Value:
        short = ""
        try:
            value = work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            short = str(error) or "out of memory"  # the error itself keeps every tensor of its frames alive
        if self.processes.highest(bool(short)):
            raise MemoryShortError(short or "another process ran out of memory")
        return value

    def update(self, rate: float) -> float:
        self._sum_gradients()
        norm = float(nn.utils.clip_grad_norm_(self._weights.values(), self._most))
        if norm == norm and norm != float("inf"):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norm

    def _sum_gradients(self) -> None:
        """A few buffers, not hundreds of small messages."""
        if self.processes.count == 1:
            return
        waiting: list[Tensor] = []
        for parameter in self._weights.values():
            if parameter.grad is None:  # it has no part in the loss here; elsewhere it may
                parameter.grad = torch.zeros_like(parameter)
            waiting.append(parameter.grad)
            if sum(gradient.numel() for gradient in waiting) >= SUMMED_AT_ONCE:
                self._sum_together(waiting)
                waiting = []
        self._sum_together(waiting)

    def _sum_together(self, gradients: list[Tensor]) -> None:
        if not gradients:
            return
        flat = self.processes.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @contextmanager
    def gather_params(self) -> Iterator[None]:
        yield

    def optimizer_tensors(self) -> dict[str, Tensor]:
        if not self.processes.is_main:
            return {}
        names = list(self._weights)  # the optimizer numbers its parameters in the order they were given
        numbered: dict[int, dict[str, Tensor]] = self.optimizer.state_dict()["state"]
        return {
            f"{names[number]}/{key}": tensor.cpu().contiguous()
            for number, items in numbered.items()
            for key, tensor in items.items()
        }

    def load_state(self, weights: Named, optimizer: Named) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                self._weights[name].copy_(tensor)
        number = {name: number for number, name in enumerate(self._weights)}
        numbered: dict[int, dict[str, Tensor]] = {}
        for full_name, tensor in optimizer:
            name, _, key = full_name.rpartition("/")
            numbered.setdefault(number[name], {})[key] = tensor.clone()  # not a view of a file that will be removed
        groups = self.optimizer.state_dict()["param_groups"]  # they come from the settings
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    def check_replicas(self) -> None:
        self.processes.check_same("trainable weights", checksum(self._weights))


class ZeroStrategy(Strategy):
    """DeepSpeed ZeRO, through Accelerate."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        processes: Processes,
        accelerator: Accelerator,
    ) -> None:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_clipping"] = settings.max_gradient_norm
        config["train_batch_size"] = processes.count  # times 1 and 1, as it insists
        for dtype in ("bf16", "fp16"):
            config.pop(dtype, None)  # they would round the adapter; the settings choose the base's dtype
        self.stage = int(accelerator.state.deepspeed_plugin.zero_stage)
        self.name = f"ZeRO-{self.stage}"
        self.processes = processes
        self._weights = weights
        if self.stage == 3:
            # Divided where it was loaded: the engine would first put the whole model on the device.
            from deepspeed.runtime.zero import Init

            Init(module=model, config_dict_or_path=config)
            for module in model.modules():  # it moves weights alone
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(processes.device)
        engine, _ = accelerator.prepare(model, adamw(weights, settings))
        self.model = self._engine = engine
        self._zero: Any = engine.optimizer

    def backward(self, scalar: Tensor) -> None:
        self._engine.backward(scalar * self.processes.count)  # it takes the mean over processes

    def guard_oom(self, work: Callable[[], Value]) -> Value:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # Others wait inside their forward or backward for this process: nobody can start over.
            raise RuntimeError(
                f"process {self.processes.rank} ran out of memory: {error}. Under ZeRO a step cannot be tried again: go on "
                "with --resume auto and smaller --micro-batch-tokens and --graph-tokens."
            ) from error

    def update(self, rate: float) -> float:
        for group in self._zero.param_groups:
            group["lr"] = rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def zero_grad(self) -> None:
        self._engine.zero_grad()

    def gather_params(self) -> Any:
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters(list(self._weights.values()), enabled=self.stage == 3)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        states = [self._state[part] for part in self._parts if part in self._state]
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._weights.items() if states else ():
            for key in MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, key)  # one at a time: it lies on every device
                if self.processes.is_main:
                    tensors[f"{name}/{key}"] = whole.view(self._shape(parameter)).cpu().contiguous()
            if self.processes.is_main:
                tensors[f"{name}/step"] = states[0]["step"].cpu().clone()
        return tensors

    def load_state(self, weights: Named, optimizer: Named) -> None:
        from deepspeed.runtime.zero import GatheredParameters

        for name, tensor in weights:
            parameter = self._weights[name]
            with torch.no_grad(), GatheredParameters([parameter], modifier_rank=0, enabled=self.stage == 3):
                parameter.copy_(tensor)
            self._set(parameter, tensor)
        for full_name, tensor in optimizer:
            name, _, key = full_name.rpartition("/")
            if not self._state:
                self._make_moments()
            if key in MOMENTS:
                self._set(self._weights[name], tensor, key)
            else:
                for state in self._state.values():
                    state[key] = tensor.clone()

    def _make_moments(self) -> None:
        """They come into being at the first step only."""
        for part in self._parts:
            self._state[part] = {key: torch.zeros_like(part) for key in MOMENTS}
        if self.stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def _set(self, parameter: nn.Parameter, whole: Tensor, key: str | None = None) -> None:
        """This process's share of a weight, or of one of its moments."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if self.stage == 3:
            # DeepSpeed's own setter fails for a size that the number of processes does not divide.
            share, _ = self._zero._get_fp32_opt_state_partition(
                parameter, release_swap_buffers=False, optim_state_key=key
            )
            padded = nn.functional.pad(whole.flatten(), (0, share.numel() * self.processes.count - whole.numel()))
            share.data.copy_(padded[share.numel() * self.processes.rank :][: share.numel()])
        elif key is None:
            safe_set_full_fp32_param(parameter, whole)
        else:
            safe_set_full_optimizer_state(parameter, whole, key)

    def check_replicas(self) -> None:
        if self.stage < 3:
            self.processes.check_same("trainable weights", checksum(self._weights))

    @property
    def _parts(self) -> list[Tensor]:
        """This process's flat shares of the weights, which the optimizer knows."""
        parts: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat if self.stage == 3 else self._zero.single_partition_of_fp32_groups
        )
        return parts

    @property
    def _state(self) -> dict[Tensor, dict[str, Tensor]]:
        state: dict[Tensor, dict[str, Tensor]] = self._zero.optimizer.state
        return state

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        shape: torch.Size = parameter.ds_shape if self.stage == 3 else parameter.shape  # type: ignore[attr-defined]
        return shape


def adamw(weights: Mapping[str, nn.Parameter], settings: OptimizerSettings, *, fused: bool = False) -> AdamW:
    """The optimizer of every strategy."""
    return AdamW(
        weights.values(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True if fused else None
    )


def checksum(weights: Mapping[str, nn.Parameter]) -> str:
    """Tells weights apart that have drifted: sums of their values and squares, by tensor."""
    total = 0.0
    for number, parameter in enumerate(weights.values(), 1):
        values = parameter.detach()
        values = (values.cpu() if values.device.type == "mps" else values).double()  # MPS has no float64
        total += number * float(values.sum() + values.pow(2).sum())
    return f"{total:.17g}"


def make_strategy(model: nn.Module, optimizer: OptimizerSettings, launch: Launch) -> Strategy:
    """Puts the model on its device and returns the strategy that the launcher selected."""
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not launch.zero_stage:
        return DataParallelStrategy(model.to(launch.processes.device), weights, optimizer, launch.processes)
    return ZeroStrategy(model, weights, optimizer, launch.processes, launch.accelerator)
