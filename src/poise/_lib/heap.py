"""The heap of the C library."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
KEPT = 2**31 - 1  # bytes: the most that mallopt can be told
IN_HEAP = 32 << 20  # bytes of the largest block in the heap: glibc's own upper bound


def keep_freed_memory() -> bool:
    """Let the heap keep memory that is freed, for the next allocation. False: this C library cannot be told.

    By default glibc hands it back to the system when an update has freed its activations, and the system clears every
    page again at its first use in the next one.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, musl; Windows has no program to look into
        return False
    return bool(mallopt(MMAP_THRESHOLD, IN_HEAP) and mallopt(TRIM_THRESHOLD, KEPT))
