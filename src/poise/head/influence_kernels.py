"""The functions of ``influence_elementwise.py`` as Triton kernels, each one pass over memory.

Imported only on a GPU; ``poise.head.influence_elementwise`` is the reference.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from poise._lib.logit_kernels import LOG2E, NEVER, finished
from poise.head.influence_elementwise import LAG, Rows, stored
from poise.lm_head import Head


@triton.jit(do_not_specialize=["start"])
def _walk_kernel(
    raw, out, stride, start, width, bias, targets, top, others, own, shrink, scale, softcap, inverse_temperature,
    LAG: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, UPDATE: tl.constexpr, WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    raw += row * stride
    out += row * stride
    column = tl.load(targets + row) - start  # outside of the slice for most rows
    here = (column >= 0) & (column < width)
    mine = tl.load(raw + column, mask=here, other=0.0).to(tl.float32)
    # The sums exclude the sampled token: its product is kept in `mine` and overwritten with NEVER. This saves a
    # comparison per element.
    tl.debug_barrier()
    tl.store(raw + column, NEVER, mask=here)
    tl.debug_barrier()

    before = tl.load(top + row)
    rest = tl.load(others + row)
    reference = before
    if UPDATE:
        bias_here = tl.load(bias + column, mask=here, other=0.0).to(tl.float32) if BIAS else 0.0
        mine = finished(mine, bias_here, scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, width, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(raw + at, mask=at < width, other=NEVER).to(tl.float32)
            shift = tl.load(bias + at, mask=at < width, other=0.0).to(tl.float32) if BIAS else 0.0
            z = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
            peaks = tl.maximum(peaks, z)
        peak = tl.maximum(tl.max(peaks, 0), tl.where(here, mine, float("-inf"))) / LOG2E
        reference = tl.where(peak > before + LAG, peak, before)

    base = reference * LOG2E
    norm = rest + tl.exp(tl.load(own + row) - before)
    if not UPDATE:
        base += tl.log2(norm)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(raw + at, mask=at < width, other=NEVER).to(tl.float32)
        shift = tl.load(bias + at, mask=at < width, other=0.0).to(tl.float32) if BIAS else 0.0
        z = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
        values = tl.exp2(z - base)
        sums += values
        if WRITE:
            tl.store(out + at, values.to(out.dtype.element_ty), mask=at < width)
    if UPDATE:
        less = tl.exp2((before - reference) * LOG2E)
        tl.store(top + row, reference)
        tl.store(others + row, rest * less + tl.sum(sums, 0))
        tl.store(shrink + row, less)
        tl.store(own + row, mine / LOG2E, mask=here)
    else:
        tl.debug_barrier()
        tl.store(out + column, (-rest / norm).to(out.dtype.element_ty), mask=here)


@triton.jit
def _rescale_kernel(pairs, left, right, height, width, stride, TALL: tl.constexpr, WIDE: tl.constexpr):
    i = tl.program_id(0) * TALL + tl.arange(0, TALL)
    j = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    down = tl.load(left + i, mask=i < height, other=1.0)
    across = tl.load(right + j, mask=j < width, other=1.0)
    if (tl.min(down, 0) != 1.0) | (tl.min(across, 0) != 1.0):  # they are at most 1
        at = pairs + i.to(tl.int64)[:, None] * stride + j[None, :]
        inside = (i < height)[:, None] & (j < width)[None, :]
        tl.store(at, tl.load(at, mask=inside) * down[:, None] * across[None, :], mask=inside)


@triton.jit(do_not_specialize=["first"])
def _columns_kernel(
    pairs, products, left_at_right, right_at_left, bias, targets, owner, top, others, own, sums,
    first, height, width, scale, softcap, inverse_temperature,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SELF_INCLUSIVE: tl.constexpr,
    ROUNDS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    here = j < width
    y_right = tl.load(targets + j, mask=here, other=-1)
    top_right = tl.load(top + j, mask=here, other=0.0)
    others_right = tl.load(others + j, mask=here, other=1.0)
    norm_right = others_right + tl.exp(tl.load(own + j, mask=here, other=0.0) - top_right)
    miss_right = others_right / norm_right
    bias_right = tl.load(bias + j, mask=here, other=0.0) if BIAS else top_right
    total = tl.zeros([WIDE], tl.float32)
    for turn in range(ROUNDS):
        i = (tl.program_id(0) * ROUNDS + turn) * TALL + tl.arange(0, TALL)
        there = i < height
        k = first + i
        y_left = tl.load(targets + k, mask=there, other=-1)
        top_left = tl.load(top + k, mask=there, other=0.0)
        others_left = tl.load(others + k, mask=there, other=1.0)
        norm_left = others_left + tl.exp(tl.load(own + k, mask=there, other=0.0) - top_left)
        miss_left = others_left / norm_left
        bias_left = tl.load(bias + k, mask=there, other=0.0) if BIAS else top_left

        inside = there[:, None] & here[None, :]
        at = i.to(tl.int64)[:, None] * width + j[None, :]
        theirs = tl.load(right_at_left + at, mask=inside, other=0.0).to(tl.float32)
        theirs = finished(theirs, bias_left[:, None], scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
        theirs = miss_left[:, None] * tl.exp2(theirs - (top_right * LOG2E)[None, :]) / norm_right[None, :]
        ours = tl.load(left_at_right + at, mask=inside, other=0.0).to(tl.float32)
        ours = finished(ours, bias_right[None, :], scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
        ours = miss_right[None, :] * tl.exp2(ours - (top_left * LOG2E)[:, None]) / norm_left[:, None]
        errors = tl.load(pairs + at, mask=inside, other=0.0) / norm_left[:, None] / norm_right[None, :]
        same = y_left[:, None] == y_right[None, :]
        errors += tl.where(same, miss_left[:, None] * miss_right[None, :], -theirs - ours)
        if not SELF_INCLUSIVE:
            own_response = tl.load(owner + k, mask=there, other=-1)[:, None] == tl.load(owner + j, mask=here)[None, :]
            errors = tl.where(own_response, 0.0, errors)
        total += tl.sum(tl.where(inside, errors * tl.load(products + at, mask=inside, other=0.0), 0.0), 0)
    tl.store(sums + tl.program_id(0) * width + j, total, mask=here)


@triton.jit
def _combine_kernel(
    parts, total, products, count, size, stride,
    SELF_INCLUSIVE: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, HEIGHT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < count)[:, None] & (at < size)[None, :]
    g = tl.load(parts + i.to(tl.int64)[:, None] * stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
    summed = tl.sum(g, 0)
    tl.store(total + at, summed.to(total.dtype.element_ty), mask=at < size)
    # Remove a response's own part before the product: it is far larger than the others, which rounding would destroy.
    partners = summed[None, :] if SELF_INCLUSIVE else summed[None, :] - g
    tl.store(products + tl.program_id(0) * HEIGHT + i, tl.sum(g * partners, 1))


def walk(raw: Tensor, head: Head, start: int, targets: Tensor, rows: Rows, *, update: bool, write: bool) -> Tensor:
    """See ``influence_elementwise.walk``. One program per row reads it twice: for the peak, then for the values."""
    shrink = torch.empty_like(rows.top)
    width = raw.shape[1]
    _walk_kernel[(len(raw),)](
        raw, stored(raw), raw.stride(0), start, width, raw if head.bias is None else head.bias[start:], targets,
        rows.top, rows.others, rows.own, shrink, *_numbers(head),
        LAG=LAG, **_flags(head), UPDATE=update, WRITE=write,
        BLOCK=min(triton.next_power_of_2(width), 4096), num_warps=8,
    )  # fmt: skip
    return shrink


def rescale(pairs: Tensor, left: Tensor, right: Tensor) -> None:
    """See ``influence_elementwise.rescale``. Tiles with factors of 1 are not read."""
    grid = (triton.cdiv(pairs.shape[0], 32), triton.cdiv(pairs.shape[1], 128))
    _rescale_kernel[grid](pairs, left, right, *pairs.shape, pairs.stride(0), TALL=32, WIDE=128)


def columns(
    pairs: Tensor,
    products: Tensor,
    left_at_right: Tensor,
    right_at_left: Tensor,
    head: Head,
    targets: Tensor,
    owner: Tensor,
    rows: Rows,
    first: int,
    self_inclusive: bool,
) -> Tensor:
    """See ``influence_elementwise.columns``. A program sums 128 tokens k for 64 k'; ``pairs`` is not overwritten."""
    height, width = pairs.shape
    sums = pairs.new_empty(triton.cdiv(height, 128), width)
    _columns_kernel[(len(sums), triton.cdiv(width, 64))](
        pairs, products, left_at_right, right_at_left, rows.top if head.bias is None else head.bias[targets].float(),
        targets, owner, rows.top, rows.others, rows.own, sums, first, height, width, *_numbers(head),
        **_flags(head), SELF_INCLUSIVE=self_inclusive, ROUNDS=4, TALL=32, WIDE=64,
    )  # fmt: skip
    return sums.sum(0)


def combine(parts: Tensor, self_inclusive: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See ``influence_elementwise.combine``. A program reads the same elements of every G_i."""
    count, width, d = parts.shape
    total = parts.new_empty(width, d, dtype=dtype)
    height = triton.next_power_of_2(count)
    block = max(64, 4096 // height)
    products = parts.new_empty(triton.cdiv(total.numel(), block), height, dtype=torch.float32)
    _combine_kernel[(len(products),)](
        parts, total, products, count, total.numel(), parts.stride(0),
        SELF_INCLUSIVE=self_inclusive, HEIGHT=height, BLOCK=block,
    )  # fmt: skip
    return total, products.sum(0)[:count]


def _numbers(head: Head) -> tuple[float, float, float]:
    return float(head.scale), float(head.softcap or 1.0), 1 / head.temperature


def _flags(head: Head) -> dict[str, bool]:
    return {"BIAS": head.bias is not None, "SOFTCAP": head.softcap is not None}
