"""Sums in float32, whatever is summed."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In what sums are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """``out = a b`` or ``out += a b``; operands may be of half precision, sums are in out's."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)
    else:  # no such product on a CPU: the same values, by way of float32
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(add), out=out)
