"""The device: whether Triton works, transfers, memory, accumulation, random numbers."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

# Parameters of glibc's mallopt
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_VALUE = 2**31 - 1  # the largest argument of mallopt
LARGEST_HEAP_BLOCK = 32 << 20  # bytes: glibc's own upper bound
PLANNED_SHARE = 0.8  # of the memory a run does not hold; the rest is for activations, other caches, fragmentation

_held: int | None = None  # bytes that the run holds, computed from its settings; None outside ``planned``


@cache
def has_triton() -> bool:
    """Whether Triton and the C compiler that builds its kernel launchers are installed."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    return find_spec("triton") is not None and compiler is not None


def suits_triton(values: Tensor) -> bool:
    """Whether poise's Triton kernels accept this tensor. The kernels need CUDA and do not support float64."""
    return values.is_cuda and values.dtype != torch.float64 and has_triton()


def send(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Copy values to the device. A plain ``.to(device)`` would block the host until the device finished its queue."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def free_bytes(device: torch.device) -> int:
    """Free memory: what CUDA reports, plus what torch has reserved but does not use; at most what this process may use.

    Inside ``planned``, the result is a fixed share of the memory that the run does not hold, whatever is free now.
    """
    if _held is not None:
        return max(0, int(PLANNED_SHARE * (total_bytes(device) - _held)))
    used = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - used
    return min(int(torch.cuda.mem_get_info(device)[0]) + unused, max(0, total_bytes(device) - used))


@contextmanager
def planned(held: int) -> Iterator[None]:
    """Within this context, memory decisions depend on the ``held`` bytes of the run, not on the memory that is free."""
    global _held
    before, _held = _held, held
    try:
        yield
    finally:
        _held = before


def is_planned() -> bool:
    """True inside ``planned``: decisions must be the same in every run of these settings."""
    return _held is not None


def total_bytes(device: torch.device) -> int:
    """The memory that this process may use on the device; 0 if the system does not report it."""
    if device.type == "cuda":
        share = torch.cuda.get_per_process_memory_fraction(device.index)
        return int(share * torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 0


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process use at most this share of a GPU's memory; ``total_bytes`` then returns that much."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device.index)


def keep_freed_memory() -> bool:
    """Let the host's heap keep freed memory for the next allocation. Return False if the C library cannot do this.

    By default glibc returns the memory to the system when an update frees its activations, and the system clears every
    page again when the next update touches it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, musl, Windows
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_HEAP_BLOCK) and mallopt(TRIM_THRESHOLD, LARGEST_VALUE))


def running_sum(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``rows.cumsum(-1)`` for (n, V), also in torch's deterministic mode, which refuses ``cumsum`` on CUDA.

    CUDA sums a single long row in varying order but several rows in a fixed order, so a single row is passed as two.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return rows.cumsum(-1, dtype=dtype)
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        several = rows if len(rows) > 1 else rows.expand(2, -1)
        return several.cumsum(-1, dtype=dtype)[: len(rows)]
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


def kth_value(values: Tensor, k: int) -> Tensor:
    """The k-th smallest of (n,) values. On CUDA, deterministic mode refuses ``kthvalue``, whose index may vary."""
    return values.sort().values[k - 1] if values.is_cuda else values.kthvalue(k).values


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """``out = a b`` or ``out += a b``, accumulated in the dtype of ``out``. Operands may be half precision."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)
    else:  # a CPU has no mixed product: convert the operands, which gives the same values
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(add), out=out)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """On exit, restore all global random number generators. A task or a reward may draw from them."""
    import numpy  # torch does not require it

    states = random.getstate(), numpy.random.get_state()  # noqa: NPY002 - user code may draw from it
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])  # noqa: NPY002
