"""Strategies that distribute an optimizer step over processes. Every strategy computes the same update.

`DataParallelStrategy` (one or several processes): every rank holds all weights and back-propagates its texts. Then the
gradients are summed over ranks. torch's DDP would sum them inside the backward pass. With a sum afterwards, the ranks
first check that no rank ran out of memory, and may have different numbers of backward passes.

`ZeroStrategy` (DeepSpeed ZeRO): optimizer state (stage 1), gradients (2) and weights (3) are partitioned over ranks.

`FsdpStrategy` (FSDP2 of torch): the frozen base is partitioned over ranks. Every rank holds the whole adapter, which is
trained as in `DataParallelStrategy`.

State is read and loaded as full tensors by name, so a checkpoint does not depend on the strategy that wrote it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import AdamW

from angle_llm.device import is_gpu, is_out_of_memory, is_partitioned
from angle_llm.model.heads import EmbeddingModel
from angle_llm.model.layers.depth import LayerStack
from angle_llm.model.layers.lora import without_adapter
from angle_llm.settings.parsing import SettingsError, need_library
from angle_llm.settings.train import OptimizerSettings
from angle_llm.train.distributed import PASSES, Processes
from angle_llm.train.token_budget import guard_ranks

Named = Iterable[tuple[str, Tensor]]
"""Tensors with their names, as (name, tensor)."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments of Adam in an optimizer state."""
SUM_BUFFER = 64 * 2**20
"""Number of gradient elements after which a new buffer begins, for the sum over ranks."""
CHECKED_AT_ONCE = 4 * 2**20
"""Number of elements of a weight whose checksum is computed at a time: its float64 copies are not in the memory forecast."""
FIRST_FACTOR, GROWTH_UPDATES = 2.0**16, 2000
"""Factor of a `GradientScale` at the start of a run, and number of updates after which it doubles, as in `torch.amp`."""


@dataclass(frozen=True)
class GradientScale:
    """Factor of the gradient in the backward pass of a float16 model (Micikevicius et al. 2018, arXiv 1710.03740).

    float16 rounds numbers below 3e-8 to 0. The factor is a power of two, so it changes no other number.
    """

    factor: float = FIRST_FACTOR
    updates: int = 0
    """Number of updates since the factor changed."""

    def after(self, *, overflow: bool) -> GradientScale:
        """Return the scale of the next step."""
        doublings, updates = divmod(self.updates + 1, GROWTH_UPDATES)
        return GradientScale(self.factor / 2) if overflow else GradientScale(self.factor * 2**doublings, updates)


class SingleProcess:
    """Strategy that accumulates gradients in a single process, without an optimizer; base class of all strategies."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    def backward(self, scalar: Tensor) -> None:
        """Back-propagate a scalar, and add the gradients to the `grad` of the parameters of this rank."""
        scalar.backward()  # type: ignore[no-untyped-call]

    def guard_ranks(self) -> AbstractContextManager[None]:
        """Return a context manager that re-raises an out-of-memory error of one rank on all ranks.

        With a single process, errors are not changed.

        Raises:
            RankMemoryError: on every rank. The caller may repeat the step.
        """
        return nullcontext()


class DataParallelStrategy(SingleProcess):
    """Strategy with all weights on every rank: backward passes, optimizer steps, and state for checkpoints.

    Also used for a training run with a single process.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, processes: Processes) -> None:
        super().__init__(processes)
        self.model = self._placed(model)
        """Model that maps a micro-batch to embeddings. All ranks must call the model equally often."""
        self.weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        """Trainable weights by name, in the order of the optimizer's parameters."""
        self.shapes = {name: parameter.shape for name, parameter in self.weights.items()}
        """Full shapes of the trainable weights by name. Under ZeRO-3, a weight in memory has another shape."""
        half = any(parameter.dtype == torch.float16 for parameter in model.parameters())
        self.scale = GradientScale() if half and not processes.zero_stage else None
        """Scale of the gradient in the next step, equal on all ranks; None: not scaled."""
        self._max_norm = settings.max_gradient_norm
        options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        if settings.name == "adamw_8bit":
            bitsandbytes: Any = importlib.import_module("bitsandbytes")
            self.optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(list(self.weights.values()), **options)
        else:
            fused = True if is_gpu(processes.device) and not processes.zero_stage else None
            self.optimizer = AdamW(self.weights.values(), fused=fused, **options)

    def _placed(self, model: nn.Module) -> nn.Module:
        """Move the model to the device of this process."""
        return model.to(self.processes.device)

    def backward(self, scalar: Tensor) -> None:
        super().backward(scalar if self.scale is None else scalar * self.scale.factor)

    def guard_ranks(self) -> AbstractContextManager[None]:
        return guard_ranks(self.processes.max)

    def update(self, learning_rate: float) -> float | None:
        """Take an optimizer step with the gradients of all ranks; return the gradient norm before clipping.

        If the norm is not finite, no weight changes, except with ZeRO, where weights may change. The result is then None if
        half the factor of `scale`, which the next step uses, can prevent this.
        """
        self._sum_gradients()
        scale = self.scale
        if scale is not None:
            for weight in self.weights.values():
                if weight.grad is not None:
                    weight.grad.div_(scale.factor)
        norm = float(nn.utils.clip_grad_norm_(self.weights.values(), self._max_norm))
        overflow = not math.isfinite(norm)
        if not overflow:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        if scale is not None:
            self.scale = scale.after(overflow=overflow)
        self.optimizer.zero_grad()
        return None if overflow and scale is not None and scale.factor > 1 else norm

    def _sum_gradients(self) -> None:
        """Replace gradients by their sum over ranks. A few large buffers are faster than hundreds of small messages."""
        if self.processes.world_size == 1:
            return
        buffers: list[list[Tensor]] = [[]]
        for parameter in self.weights.values():
            if parameter.grad is None:  # unused on this rank, but another rank may use it
                parameter.grad = torch.zeros_like(parameter)
            if sum(gradient.numel() for gradient in buffers[-1]) >= SUM_BUFFER:
                buffers.append([])
            buffers[-1].append(parameter.grad)
        for gradients in buffers:
            flat = self.processes.sum(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, part in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
            del flat, part  # before the next buffer

    def zero_grad(self) -> None:
        """Discard the gradients."""
        self.optimizer.zero_grad()

    def full_weights(self) -> dict[str, Tensor]:
        """Return the trainable weights as full CPU tensors; empty on all ranks but 0. All ranks must call this method."""
        full = {}
        for name, weight in self.weights.items():
            with self._gathered([weight]):  # on every device, so one at a time
                if self.processes.is_main:
                    full[name] = weight.detach().cpu().contiguous()
        return full

    def gather_params(self) -> Any:
        """Return a context manager in which rank 0 can read the trainable weights in full (ZeRO-3 partitions them)."""
        return nullcontext()

    def _gathered(self, weights: list[nn.Parameter], rank: int | None = None) -> Any:
        """Return a context manager in which weights partitioned by ZeRO-3 are complete on the device of every rank.

        Changes that `rank` makes inside the context are kept; None: no changes are kept.
        """
        return nullcontext()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer state as full CPU tensors, such as WEIGHT/exp_avg, WEIGHT/exp_avg_sq and WEIGHT/step.

        The result is empty before the first optimizer step, and on all ranks but 0. All ranks must call this method.
        """
        if not self.processes.is_main:
            return {}
        shared = not isinstance(self.optimizer, AdamW)  # the tables of AdamW8bit are one tensor for all weights
        return {
            f"{name}/{key}": torch.as_tensor(value).to("cpu", copy=shared).contiguous()
            for name, parameter in self.weights.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load_state(self, weights: Named, optimizer: Named) -> None:
        """Load full trainable weights by name, and an optimizer state as returned by `optimizer_state`."""
        with torch.no_grad():
            for name, tensor in weights:
                self.weights[name].copy_(tensor)
        number_of = {name: number for number, name in enumerate(self.weights)}
        numbered: dict[int, dict[str, Tensor]] = {}
        for full_name, tensor in optimizer:
            name, _, key = full_name.rpartition("/")
            numbered.setdefault(number_of[name], {})[key] = tensor.clone()  # not a view of a file that may be removed
        if isinstance(self.optimizer, AdamW):
            groups = self.optimizer.state_dict()["param_groups"]  # their values come from the settings
            self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
            return
        for position, parameter in enumerate(self.weights.values()):  # AdamW8bit reads only its own form of a state
            items = numbered.get(position, {})
            self.optimizer.state[parameter] = {
                key: int(tensor) if key == "step" else tensor.to(parameter.device) for key, tensor in items.items()
            }

    def check_replicas(self) -> None:
        """Check that all ranks have the same trainable weights, by a checksum. ZeRO-3 skips this check.

        Raises:
            RemoteRankError: on every rank; names the rank with different weights.
        """
        if self.processes.world_size == 1:
            return
        total = 0.0
        for number, parameter in enumerate(self.weights.values(), 1):
            for block in torch.split(parameter.detach().flatten(), CHECKED_AT_ONCE):
                values = (block.cpu() if block.device.type == "mps" else block).double()  # MPS has no float64
                total += number * float(values.sum() + values.pow(2).sum())
        self.processes.check_equal("checksum of the trainable weights", f"{total:.17g}")


class PartitionedStrategy(DataParallelStrategy):
    """Base class of strategies that communicate in forward or backward passes, so a step cannot be repeated."""

    @contextmanager
    def guard_ranks(self) -> Iterator[None]:
        """Name the rank and the remedy in an out-of-memory error.

        The error is raised on this rank only; the run ends.

        Raises:
            RuntimeError: on the rank that failed. No step can be repeated.
        """
        try:
            with self.processes.operations.running(PASSES):
                yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The other ranks wait in a collective operation of their forward or backward pass.
            raise RuntimeError(
                f"rank {self.processes.rank} ran out of memory: {error}. ZeRO and FSDP cannot repeat a step or an evaluation: "
                "resume with --resume auto and a smaller --micro-batch-tokens, after a training step also --graph-tokens."
            ) from error

    def _broadcast_buffers(self, model: nn.Module) -> None:
        """Set all buffers of a model to the buffers of rank 0, on the device of this process."""
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for name, buffer in self.processes.broadcast(buffers if self.processes.is_main else None):
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffer


class FsdpStrategy(PartitionedStrategy):
    """Strategy with FSDP2 of torch for an adapter: the frozen base is partitioned over ranks, layer by layer.

    The weights of a layer are gathered when the layer runs, and freed after it. The adapter is not partitioned: gradients,
    optimizer state, checkpoints and updates are equal to those of `DataParallelStrategy`.
    """

    def _placed(self, model: EmbeddingModel) -> nn.Module:  # type: ignore[override]
        """Partition the frozen weights of rank 0 over all ranks. A device holds one whole layer at a time."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        backbone: Any = without_adapter(model.backbone)
        try:
            layers = LayerStack.of(backbone).layers
        except ValueError as error:
            raise SettingsError(
                f"FSDP partitions a model layer by layer; {type(backbone).__name__} has no single list of its layers. Use ZeRO-3."
            ) from error
        mesh = init_device_mesh(self.processes.device.type, (self.processes.world_size,))
        for module in (backbone.get_input_embeddings(), *layers, model):  # `model`: the remaining weights
            self._broadcast_weights(module)
            trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
        self._broadcast_buffers(model)
        return model

    def _broadcast_weights(self, module: nn.Module) -> None:
        """Set the weights of a module that are not partitioned yet to those of rank 0, on the device of this process."""
        for owner in module.modules():
            for name, weight in owner._parameters.items():
                if weight is None or is_partitioned(weight):
                    continue
                device = self.processes.device
                empty = weight.is_meta  # on all ranks but 0: see `load_encoder`
                values = torch.empty_like(weight, device=device) if empty else weight.detach().to(device)
                distributed.broadcast(values, src=0)
                owner._parameters[name] = nn.Parameter(values, requires_grad=weight.requires_grad)


class ZeroStrategy(PartitionedStrategy):
    """Strategy with DeepSpeed ZeRO: optimizer state, gradients and weights are partitioned over ranks, by stage."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings, processes: Processes) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):  # stage 3, on all ranks but 0
            model.to_empty(device="cpu")  # takes no memory: pages are mapped when they are written
        super().__init__(model, settings, processes)
        config = processes.deepspeed_config
        config["gradient_clipping"] = settings.max_gradient_norm
        config["train_batch_size"] = processes.world_size  # DeepSpeed requires it: 1 text, 1 accumulation step
        for dtype in ("bf16", "fp16"):
            config.pop(dtype, None)  # DeepSpeed would round the adapter; the settings choose the dtype of the base
        self.stage = processes.zero_stage
        if self.stage == 3:
            # Partition the model on the CPU: the engine would first move the whole model to the device.
            from deepspeed.runtime.zero import Init

            Init(module=model, config_dict_or_path=config)  # sends the weights of rank 0 to all ranks
            self._broadcast_buffers(model)
        self.model, _ = processes.accelerator.prepare(model, self.optimizer)
        self._engine: Any = self.model  # with the methods of DeepSpeed
        self._zero: Any = self._engine.optimizer

    def _placed(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged; DeepSpeed moves it to the device."""
        return model

    def backward(self, scalar: Tensor) -> None:
        self._engine.backward(scalar * self.processes.world_size)  # DeepSpeed takes the mean over ranks

    def update(self, learning_rate: float) -> float:
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    @contextmanager
    def gather_params(self) -> Iterator[None]:
        full = self.full_weights() if self.stage == 3 else {}
        full_of = {self.weights[name]: nn.Parameter(tensor) for name, tensor in full.items()}
        owners = [
            (module, name, weight)
            for module in self.model.modules()
            for name, weight in module._parameters.items()
            if weight in full_of
        ]
        try:
            for module, name, weight in owners:
                module._parameters[name] = full_of[weight]
            yield
        finally:
            for module, name, weight in owners:
                module._parameters[name] = weight

    def _gathered(self, weights: list[nn.Parameter], rank: int | None = None) -> Any:
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters(weights, modifier_rank=rank, enabled=self.stage == 3)

    def optimizer_state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        states = [self._state[part] for part in self._parts if part in self._state]
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.weights.items() if states else ():
            for key in MOMENTS:
                full = safe_get_full_optimizer_state(parameter, key)  # on every device, so one tensor at a time
                if self.processes.is_main:
                    tensors[f"{name}/{key}"] = full.view(self.shapes[name]).cpu().contiguous()
            if self.processes.is_main:
                tensors[f"{name}/step"] = states[0]["step"].cpu().clone()
        return tensors

    def load_state(self, weights: Named, optimizer: Named) -> None:
        for name, tensor in weights:
            parameter = self.weights[name]
            with torch.no_grad(), self._gathered([parameter], rank=0):
                parameter.copy_(tensor)
            self._set(parameter, tensor)
        for full_name, tensor in optimizer:
            name, _, key = full_name.rpartition("/")
            if not self._state:  # DeepSpeed creates the state in the first step
                for part in self._parts:
                    self._state[part] = {key: torch.zeros_like(part) for key in MOMENTS}
                if self.stage < 3:
                    self._zero._lazy_init_hp_params_optimizer_state()
            if key in MOMENTS:
                self._set(self.weights[name], tensor, key)
            else:
                for state in self._state.values():
                    state[key] = tensor.clone()

    def _set(self, parameter: nn.Parameter, full: Tensor, key: str | None = None) -> None:
        """Set this rank's partition of a weight from the full tensor.

        With `key`, `exp_avg` or `exp_avg_sq`, set this rank's partition of this optimizer moment of the weight instead.
        """
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if self.stage == 3:
            # DeepSpeed's own setter fails for a size that is not divisible by the number of ranks.
            part, _ = self._zero._get_fp32_opt_state_partition(
                parameter, release_swap_buffers=False, optim_state_key=key
            )
            padded = nn.functional.pad(full.flatten(), (0, part.numel() * self.processes.world_size - full.numel()))
            part.data.copy_(padded[part.numel() * self.processes.rank :][: part.numel()])
        elif key is None:
            safe_set_full_fp32_param(parameter, full)
        else:
            safe_set_full_optimizer_state(parameter, full, key)

    def check_replicas(self) -> None:
        if self.stage < 3:
            super().check_replicas()

    @property
    def _parts(self) -> list[Tensor]:
        """Flat float32 partitions of the weights on this rank; the keys of the optimizer state (`_state`)."""
        zero = self._zero
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups  # type: ignore[no-any-return]

    @property
    def _state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Optimizer state of this rank: its flat weight partition → moments and step count."""
        return self._zero.optimizer.state  # type: ignore[no-any-return]


def check_optimizer(settings: OptimizerSettings, processes: Processes) -> None:
    """Raise an error if the optimizer is not installed, or cannot be used with ZeRO."""
    if settings.name == "adamw_8bit":
        need_library("bitsandbytes", "--optimizer.name adamw_8bit", "quantization")
        if processes.zero_stage:
            raise SettingsError("--optimizer.name adamw_8bit: ZeRO supports adamw only, whose state it partitions.")


def make_strategy(model: nn.Module, optimizer: OptimizerSettings, processes: Processes) -> DataParallelStrategy:
    """Return the strategy that the launcher selected, ZeRO, FSDP or data parallel, and move the model to its device."""
    strategy = FsdpStrategy if processes.uses_fsdp else ZeroStrategy if processes.zero_stage else DataParallelStrategy
    return strategy(model, optimizer, processes)
