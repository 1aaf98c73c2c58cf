"""A device `gpu` for machines without one: it computes on the CPU, and accepts no tensor of another device.

Operations fail where they would fail on a GPU: a tensor of the host among those of the device, except where torch
allows it (copies, numbers, index tensors). Values are those of a CPU, so a whole training step can be compared.
`separate_device` is a context that counts kernels, copies to the device, and points where the host waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh", "aten::alias")
_SIZES_FROM_VALUES = ("aten::nonzero", "aten::unique", "aten::_unique", "aten::masked_select")
_VALUES = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operations that take index tensors of the host, and copy them."""
_COPIES = ("aten::_to_copy", "aten::copy_")


@dataclass
class DeviceWork:
    """Counts of operations on the device, by name."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Operations that compute on the device."""
    copies: Counter[str] = field(default_factory=Counter)
    """Copies from the host to the device, also implicit ones of index tensors."""
    waits: Counter[str] = field(default_factory=Counter)
    """Operations after which the host has a value, or the size of a result, from the device."""
    launched_before_waits: list[int] = field(default_factory=list)
    """Number of operations that were launched between the record of an event and the wait for it, of each event."""

    def __str__(self) -> str:
        return f"{self.kernels.total()} kernels, copies {dict(self.copies)}, waits {dict(self.waits)}"


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=gpu(),
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        """Return the values; torch refuses this for other classes of tensors."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(DeviceWork(), func, args, kwargs or {})


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, work: DeviceWork) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(self.work, func, args, kwargs or {})


_MODES: list[_Mode] = []


class _Event:
    """An event of the device: a point in its queue of operations."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.record(None)

    def record(self, _: object) -> None:
        self.launched = _MODES[-1].work.kernels.total()

    def elapsed_time(self, _: object) -> float:
        return 0.0

    def synchronize(self) -> None:
        work = _MODES[-1].work
        work.waits["event"] += 1
        work.launched_before_waits.append(work.kernels.total() - self.launched)


class _Module:
    """What torch calls on the module of a device."""

    Event = _Event
    current_stream = staticmethod(lambda _: None)
    is_initialized = is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda *_: None)
    manual_seed_all = _is_in_bad_fork = staticmethod(lambda *_: None)


@cache
def gpu() -> torch.device:
    """Return the device; registers it with torch."""
    _setup_privateuseone_for_python_backend("gpu", _Module())
    return torch.device("gpu:0")


@contextmanager
def separate_device() -> Iterator[DeviceWork]:
    """Yield the counts of operations inside this context; tensors can be made on `gpu()` only here."""
    work = DeviceWork()
    gpu()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes its values on the host, and copies them visibly
    mode = _Mode(work)
    _MODES.append(mode)
    try:
        with mode:
            yield work
    finally:
        _MODES.pop()
        torch._C._set_only_lift_cpu_tensors(before)


def move(model: nn.Module) -> None:
    """Move weights and buffers of a model to the device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = DeviceTensor(parameter.detach())
                module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = DeviceTensor(buffer)


def _compute(work: DeviceWork, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.name().partition(".")[0]
    leaves, form = tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    device = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
    wanted = kwargs.get("device")
    to_device = wanted is not None and torch.device(wanted).type == "gpu"
    if not device and not to_device:
        return func(*args, **kwargs)
    on_device = to_device or (bool(device) and wanted is None and name not in _VALUES)
    if name in _COPIES:
        target, source = (args[0], args[1]) if name == "aten::copy_" else (to_device or wanted is None, args[0])
        into = isinstance(target, DeviceTensor) if name == "aten::copy_" else target
        if into and not isinstance(source, DeviceTensor):
            work.copies[name] += 1
        elif not into and isinstance(source, DeviceTensor) and not (kwargs.get("non_blocking") or True in args[2:]):
            work.waits[name] += 1
        on_device = bool(into)
    elif len(device) < len(given):
        others = [tensor for tensor in given if not isinstance(tensor, DeviceTensor)]
        if name in _INDEXING and isinstance(args[0], DeviceTensor):
            work.copies[name] += 1
        elif any(tensor.ndim for tensor in others):
            raise RuntimeError(
                f"{name}: expected all tensors on the device, got {[(str(t.device), tuple(t.shape)) for t in given]}"
            )
    elif name.startswith((*_SIZES_FROM_VALUES, *_VALUES)):
        work.waits[name] += 1
    if name in _INDEXING and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
        work.waits[f"{name} by a mask"] += 1
    if on_device and name not in _COPIES and not name.startswith(_NO_KERNEL) and not _is_view(func):
        work.kernels[name] += 1
    held = [leaf.held if isinstance(leaf, DeviceTensor) else leaf for leaf in leaves]
    held_args, held_kwargs = tree_unflatten(held, form)
    if wanted is not None:
        held_kwargs = {**held_kwargs, "device": "cpu", **({"pin_memory": False} if "pin_memory" in held_kwargs else {})}
    result = func(*held_args, **held_kwargs)
    if not on_device:
        return result
    wrapped = tree_map_only(Tensor, DeviceTensor, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _is_view(func: Any) -> bool:
    """Return whether the results share memory with an argument that is not written."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
