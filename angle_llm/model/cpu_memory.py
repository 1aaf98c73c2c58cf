"""What a CPU's memory costs: freed blocks that come back empty, and kernels that are kept for every shape there ever was."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # torch's own, and oneDNN's below it
_KERNELS_KEPT = 128

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEPT = 1 << 30
# Where glibc's own adjusting ends once a process has freed a block of 32 MiB. Saying one threshold ends that adjusting for
# good, so these are what it is left with.
_USUAL_MMAP = 32 << 20
_USUAL_TRIM = 2 * _USUAL_MMAP


def bound_kernel_caches() -> None:
    """Has torch keep 128 of oneDNN's kernels in place of 1,024 in each of its caches; must come before the first product in
    bfloat16.

    Each size of a micro-batch needs kernels of its own, 5 to 13 MiB of them seen, and a large batch has as many sizes as
    micro-batches: memory grew with the batch (docs/LOG.md, "Where a cached step's memory went"). All layers share the kernels
    of a size. Variables of the environment that are set already stay. On x86 only, where it was looked at.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        for name in _KERNEL_CACHES:
            os.environ.setdefault(name, str(_KERNELS_KEPT))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within this, up to 1 GiB of freed memory is used again rather than given back to the system. After it, some later
    `free` gives all of it back, once more than 64 MiB are free.

    Else glibc gives the top of its heap back as soon as some MiB of it are free. A layer's temporaries are tens of MiB, so
    they came back page by page, emptied by the kernel: an eighth of the time of encoding with SmolLM2 in float32
    (docs/LOG.md). This is a setting of the process: it helps in the main thread, whose heap it is; the first of two that
    are within to leave ends it for both. Nothing is done without glibc, nor where its own variables have set it up.
    """
    mallopt = _mallopt()
    if (
        mallopt is None
        or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
        or any(name.startswith("MALLOC_") for name in os.environ)
    ):
        yield
        return
    if not mallopt(_MMAP_THRESHOLD, _KEPT):  # an older glibc takes no more than 32 MiB
        mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
        mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)


@cache
def _mallopt() -> Any:
    """glibc's, or None where there is none."""
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
