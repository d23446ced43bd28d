"""The small operations between the matrix products of a decoding step, in Triton: one kernel each.

The sums and norms are computed in float32, and rounded where transformers' own code rounds its results.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm_kernel(x, delta, weight, total, out, width, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(delta + row + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(total + row + at, values, mask=inside)
    wide = values.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (wide.to(x.dtype.element_ty).to(tl.float32) * scale).to(x.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(n, W) the sum of ``x`` and ``delta``, and its RMS norm times ``weight``."""
    rows, width = x.shape
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(rows,)](
            x, x if delta is None else delta, weight, total, out, width, epsilon,
            ADD=delta is not None, BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip
    return total, out


@triton.jit
def _silu_product_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (gate * up).to(out.dtype.element_ty), mask=inside)


def silu_product(gate_up: Tensor) -> Tensor:
    """(n, I) silu(gate) · up, from (n, 2·I): the gates, then the ups."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    with torch.cuda.device_of(gate_up):
        _silu_product_kernel[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out
