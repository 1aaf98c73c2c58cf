"""Devices: copies to a GPU, evaluation mode, trials of compiled functions, memory errors, and memory settings of a CPU.

Measured for the memory settings (docs/history): with fewer cached kernels, the peak memory of a training step of 4,096
triples is 3,168 MiB instead of 4,338. With reuse of freed memory, encoding in float32 takes 12 % less CPU time.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from angle_llm.io import log

GPU_TYPES = {"cuda"}
"""Device types for which code written for a GPU runs. The tests add a type that computes on the CPU."""


def is_gpu(device: torch.device) -> bool:
    """Return whether code written for a GPU runs on a device: fused kernels, pinned copies, TF32."""
    return device.type in GPU_TYPES


def unused_gpu() -> str:
    """Return a message if the machine has a GPU that torch cannot use; empty if it has no GPU, or it is hidden."""
    uses_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("y", "yes", "t", "true", "on", "1")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or uses_cpu
    if is_hidden or torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return ""
    return (
        f"nvidia-smi is installed, but torch {torch.__version__} finds no GPU. If this machine has one, install the torch build "
        "for its driver (pytorch.org), or set CUDA_VISIBLE_DEVICES='' to compute on the CPU."
    )


def emulates_bfloat16(device: torch.device) -> bool:
    """Return whether a device computes bfloat16 without hardware for it, as NVIDIA GPUs before Ampere (T4, V100) do."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0)


def limit_memory(device: torch.device) -> None:
    """Make allocations fail when a GPU is full, for drivers that move tensors to host memory instead (Windows, WSL2).

    Otherwise training would become many times slower instead of using a smaller token budget. The limit is the memory that
    is free now or reserved by torch.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = min(free + torch.cuda.memory_reserved(device), total)
        torch.cuda.set_per_process_memory_fraction(usable / total, device)


def is_partitioned(weight: Tensor) -> bool:
    """Return whether ZeRO-3 (empty tensor) or FSDP (distributed tensor) has partitioned a weight over ranks."""
    return not weight.numel() or hasattr(weight, "device_mesh")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device. A copy from the CPU to a GPU is asynchronous."""
    if is_gpu(device) and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def time_mark(device: torch.device) -> Any:
    """Mark the present point in the work of a device, for `start_copy_to_cpu`: seconds, or an event of a GPU."""
    if not is_gpu(device):
        return time.perf_counter()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def start_copy_to_cpu(tensor: Tensor, started: Any) -> Callable[[], tuple[Tensor, float]]:
    """Start to copy a tensor to the CPU; return a function that waits, and returns the copy and the seconds since a mark."""
    if not is_gpu(tensor.device):
        result = tensor.cpu(), time.perf_counter() - started
        return lambda: result
    copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
    ended = time_mark(tensor.device)

    def wait() -> tuple[Tensor, float]:
        ended.synchronize()
        return copy, started.elapsed_time(ended) / 1000

    return wait


_MEMORY_MESSAGES = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def matmul_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Set the precision of float32 matrix products on a GPU: `high` (TF32, about 8 times as fast) or `highest`.

    See `torch.set_float32_matmul_precision`. The environment variable NVIDIA_TF32_OVERRIDE=0 prevents TF32.
    """
    if not is_gpu(device):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a memory allocation failed.

    torch raises a plain RuntimeError on a CPU, so the message is compared.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in _MEMORY_MESSAGES
    )


def release_cached_memory() -> None:
    """Give memory that torch has cached back to the GPU."""
    torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Set a model to evaluation mode and disable gradients inside this context; yield the device of the model."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: weights that ZeRO-3 gathers in it could not be trained afterwards
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest relative difference |one - other| / |other| over the rows of two tensors (…, D).

    The result is infinite if the shapes differ.
    """
    if one.shape != other.shape:
        return math.inf
    first, second = one.cpu().double(), other.cpu().double()  # MPS has no float64
    return float(((first - second).norm(dim=-1) / second.norm(dim=-1).clamp(min=1e-30)).max())


def largest(values: Iterable[float]) -> float:
    """Return the largest value, NaN if there is one: `max` can lose a NaN."""
    # The device is set because a forecast runs in a context with the device meta.
    return float(torch.tensor(list(values), dtype=torch.float64, device="cpu").max())


def trial_problem(differences: Iterable[float], tolerance: float) -> str | None:
    """Return why a compiled function cannot be used: an error, or a difference above `tolerance`; None if neither.

    Iterating over `differences` runs the compiled and the original function, and yields the relative differences of
    their results. An out-of-memory error is raised, not returned.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the compiler are no failure
            worst = largest(differences)
    except Exception as error:  # compilers and drivers can fail in any way
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error!s:.300}"
    if not worst <= tolerance:  # true for NaN, too
        return f"its results differ from the original by {worst:.1e}, more than {tolerance:.0e}"
    return None


def compiled_if_equal(
    name: str,
    function: Callable[..., Any],
    results: Callable[[Callable[..., Any]], Iterable[Tensor]],
    tolerance: float,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function compiled by `torch.compile`, or the function itself if compilation fails or results differ.

    The second case logs a warning with `name`. `results(function)` yields results of the compiled or the original function
    for the same inputs, `tolerance` is their largest relative difference, and `options` are for `torch.compile`.
    """
    import torch._dynamo  # slow to import

    if torch._dynamo.config.disable:
        return function
    # The limit also counts models of other sizes. torch.compile has no such option in torch 2.9.
    compiled: Callable[..., Any] = torch._dynamo.config.patch(recompile_limit=64)(torch.compile(function, **options))
    pairs = zip(results(compiled), results(function), strict=True)  # the functions run when `trial_problem` iterates
    problem = trial_problem((relative_difference(*pair) for pair in pairs), tolerance)
    if problem is None:
        return compiled
    log(f"warning: {name} not compiled: {problem}")
    return function


def bound_kernel_caches() -> None:
    """Limit the kernel caches of oneDNN and of torch on a CPU to 128 kernels instead of 1,024; x86 only.

    Every new micro-batch shape needs kernels of 5 to 13 MiB, which all layers share. So memory would grow with the number
    of shapes. Environment variables that are already set are unchanged. Call this function before the first matrix product
    in bfloat16.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
            os.environ.setdefault(name, "128")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEPT = 1 << 30
# glibc adjusts its limits until a limit is set. These are the values it reaches after a process has freed 32 MiB.
_USUAL_MMAP = 32 << 20
_USUAL_TRIM = 2 * _USUAL_MMAP


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep up to 1 GiB of freed memory in the process inside this context, instead of returning it to the system.

    By default, glibc keeps only a few MiB of freed memory. The temporary tensors of a layer take tens of MiB, so the system
    would map pages again for every layer. The limits belong to the process: they apply in the main thread, and the first of
    two concurrent contexts that exits resets them. The context has no effect without glibc, or if an environment variable
    sets limits of glibc.
    """
    mallopt = _mallopt()
    has_limits = any(name.startswith("MALLOC_") for name in os.environ)
    has_limits |= "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or has_limits:
        yield
        return
    if not mallopt(_MMAP_THRESHOLD, _KEPT):  # an older glibc accepts at most 32 MiB
        mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
        mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)


@cache
def _mallopt() -> Any:
    """Return the C function `mallopt` of glibc, which sets limits of malloc; None without glibc."""
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
