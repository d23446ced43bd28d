"""Accumulation in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """``out = a b`` or ``out += a b``; operands may be half precision, accumulation is in the dtype of ``out``."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)
    else:  # a CPU has no mixed product: convert the operands, which gives the same values
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(add), out=out)
