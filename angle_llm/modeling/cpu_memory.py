"""What a CPU's memory costs: freed blocks that come back empty, and kernels that are kept for every shape there ever was.

Elsewhere than on Linux with glibc the first is left as it is.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEPT = 1 << 30
# Where glibc's own adjusting ends once a process has freed a block of 32 MiB. Saying one threshold ends that adjusting, so
# these are what it is left with.
_USUAL_MMAP = 32 << 20
_USUAL_TRIM = 2 * _USUAL_MMAP

_KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # torch's own, and oneDNN's below it
_KERNELS_KEPT = 128


def bound_kernel_caches() -> None:
    """Has torch keep 128 of oneDNN's kernels, not 1,024 of each of its caches; must come before the first product in
    bfloat16.

    Each size of a micro-batch needs kernels of its own, 5 to 13 MiB of them seen, and a large batch has as many sizes as
    micro-batches, so memory grew by gigabytes (docs/LOG.md). A size needs about 30, the same in every layer. Variables of
    the environment that are set already stay.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KERNELS_KEPT))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within this, up to 1 GiB of freed memory is used again rather than given back to the system; after it, what the next
    `free` finds above 64 MiB is given back.

    glibc gives the top of its heap back as soon as some MiB of it are free. A layer's temporaries are tens of MiB, so they
    came back page by page, emptied by the kernel: an eighth of the time of encoding with SmolLM2 in float32 (docs/LOG.md).
    For the whole process, whatever its other threads do.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
    mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)


@cache
def _mallopt() -> Any:
    """glibc's, or None where there is none."""
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
