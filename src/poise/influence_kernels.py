"""The steps of ``poise.influence_steps`` as Triton kernels: one pass over memory each. Same functions, same meaning.

Imported only when a GPU is used. ``TRITON_INTERPRET=1`` runs them on a CPU, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from poise.linear import Head
from poise.influence_steps import LAG, Rows, stored


def walk(raw: Tensor, head: Head, start: int, targets: Tensor, rows: Rows, *, update: bool, write: bool) -> Tensor:
    """See ``influence_steps.walk``. A program has one row, and reads it twice: for the peak, then for the values."""
    shrink = torch.empty_like(rows.top)
    width = raw.shape[1]
    _walk[(len(raw),)](
        raw, stored(raw), raw if head.bias is None else head.bias[start:], targets, rows.top, rows.others, rows.own,
        shrink, start, width, raw.stride(0), head.scale, head.softcap or 1.0, head.temperature,
        lag=LAG, has_bias=head.bias is not None, has_softcap=head.softcap is not None, update=update, write=write,
        block=min(triton.next_power_of_2(width), 4096), num_warps=8,
    )  # fmt: skip
    return shrink


def rescale(pairs: Tensor, left: Tensor, right: Tensor) -> None:
    """See ``influence_steps.rescale``. Tiles with nothing to do are not read."""
    grid = (triton.cdiv(pairs.shape[0], 32), triton.cdiv(pairs.shape[1], 128))
    _rescale[grid](pairs, left, right, *pairs.shape, pairs.stride(0), tall=32, wide=128)


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
    """See ``influence_steps.columns``. A program sums 128 tokens k for 64 tokens k'; ``pairs`` stays as it was."""
    height, width = pairs.shape
    sums = pairs.new_empty(triton.cdiv(height, 128), width)
    bias = rows.top if head.bias is None else head.bias[targets].float()
    _columns[(len(sums), triton.cdiv(width, 64))](
        pairs, products, left_at_right, right_at_left, bias, targets, owner, rows.top, rows.others, rows.own, sums,
        first, height, width, head.scale, head.softcap or 1.0, head.temperature,
        has_bias=head.bias is not None, has_softcap=head.softcap is not None, self_inclusive=self_inclusive,
        rounds=4, tall=32, wide=64,
    )  # fmt: skip
    return sums.sum(0)


def combine(parts: Tensor, self_inclusive: bool) -> tuple[Tensor, Tensor]:
    """See ``influence_steps.combine``. A program has the same elements of every G_i."""
    count, width, d = parts.shape
    total = parts.new_empty(width, d)
    height = triton.next_power_of_2(count)
    block = max(64, 4096 // height)
    products = parts.new_empty(triton.cdiv(total.numel(), block), height, dtype=torch.float32)
    _combine[(len(products),)](
        parts, total, products, count, total.numel(), parts.stride(0), self_inclusive=self_inclusive, height=height,
        block=block,
    )  # fmt: skip
    return total, products.sum(0)[:count]


@triton.jit
def _shape(logits, bias, scale, softcap, temperature, has_bias: tl.constexpr, has_softcap: tl.constexpr):
    if has_bias:
        logits += bias
    logits *= scale
    if has_softcap:
        logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)  # tanh
    return logits / temperature


@triton.jit(do_not_specialize=["start"])
def _walk(
    raw, out, bias, targets, top, others, own, shrink, start, width, stride, scale, softcap, temperature,
    lag: tl.constexpr, has_bias: tl.constexpr, has_softcap: tl.constexpr, update: tl.constexpr, write: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    raw += row.to(tl.int64) * stride
    out += row.to(tl.int64) * stride
    column = tl.load(targets + row) - start  # outside of the slice for most rows
    before = tl.load(top + row)
    rest = tl.load(others + row)
    reference = before
    if update:
        peaks = tl.full((block,), float("-inf"), tl.float32)
        for begin in range(0, width, block):
            at = begin + tl.arange(0, block)
            inside = at < width
            added = tl.load(bias + at, inside, 0.0).to(tl.float32) if has_bias else 0.0
            logits = tl.load(raw + at, inside, 0.0).to(tl.float32)
            logits = _shape(logits, added, scale, softcap, temperature, has_bias, has_softcap)
            peaks = tl.maximum(peaks, tl.where(inside, logits, float("-inf")))
        peak = tl.max(peaks, 0)
        reference = tl.where(peak > before + lag, peak, before)

    sums = tl.zeros((block,), tl.float32)
    found = tl.zeros((block,), tl.float32)
    for begin in range(0, width, block):
        at = begin + tl.arange(0, block)
        inside = at < width
        added = tl.load(bias + at, inside, 0.0).to(tl.float32) if has_bias else 0.0
        logits = tl.load(raw + at, inside, 0.0).to(tl.float32)
        logits = _shape(logits, added, scale, softcap, temperature, has_bias, has_softcap)
        values = tl.where(inside, tl.exp(logits - reference), 0.0)
        if update:
            found += tl.where(at == column, logits, 0.0)
            values = tl.where(at == column, 0.0, values)
            sums += values
        else:
            values = tl.where(at == column, -rest, values)
        if write:
            tl.store(out + at, values.to(out.dtype.element_ty), inside)
    if update:
        less = tl.exp(before - reference)
        tl.store(top + row, reference)
        tl.store(others + row, rest * less + tl.sum(sums, 0))
        tl.store(shrink + row, less)
        if (column >= 0) & (column < width):
            tl.store(own + row, tl.sum(found, 0))


@triton.jit
def _rescale(pairs, left, right, height, width, stride, tall: tl.constexpr, wide: tl.constexpr):
    i = tl.program_id(0) * tall + tl.arange(0, tall)
    j = tl.program_id(1) * wide + tl.arange(0, wide)
    down = tl.load(left + i, i < height, 1.0)
    across = tl.load(right + j, j < width, 1.0)
    if (tl.min(down, 0) != 1.0) | (tl.min(across, 0) != 1.0):
        at = pairs + i.to(tl.int64)[:, None] * stride + j[None, :]
        inside = (i < height)[:, None] & (j < width)[None, :]
        tl.store(at, tl.load(at, inside, 0.0) * down[:, None] * across[None, :], inside)


@triton.jit(do_not_specialize=["first"])
def _columns(
    pairs, products, left_at_right, right_at_left, bias, targets, owner, top, others, own, sums,
    first, height, width, scale, softcap, temperature,
    has_bias: tl.constexpr, has_softcap: tl.constexpr, self_inclusive: tl.constexpr,
    rounds: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(1) * wide + tl.arange(0, wide)
    here = j < width
    y_right = tl.load(targets + j, here, -1)
    top_right = tl.load(top + j, here, 0.0)
    others_right = tl.load(others + j, here, 1.0)
    norm_right = others_right + tl.exp(tl.load(own + j, here, 0.0) - top_right)
    miss_right = others_right / norm_right
    bias_right = tl.load(bias + j, here, 0.0) if has_bias else top_right
    total = tl.zeros((wide,), tl.float32)
    for turn in range(rounds):
        i = (tl.program_id(0) * rounds + turn) * tall + tl.arange(0, tall)
        there = i < height
        k = first + i
        y_left = tl.load(targets + k, there, -1)
        top_left = tl.load(top + k, there, 0.0)
        others_left = tl.load(others + k, there, 1.0)
        norm_left = others_left + tl.exp(tl.load(own + k, there, 0.0) - top_left)
        miss_left = others_left / norm_left
        bias_left = tl.load(bias + k, there, 0.0) if has_bias else top_left

        inside = there[:, None] & here[None, :]
        at = i.to(tl.int64)[:, None] * width + j[None, :]
        same = y_left[:, None] == y_right[None, :]
        theirs = tl.load(right_at_left + at, inside, 0.0).to(tl.float32)
        theirs = _shape(theirs, bias_left[:, None], scale, softcap, temperature, has_bias, has_softcap)
        theirs = miss_left[:, None] * tl.exp(theirs - top_right[None, :]) / norm_right[None, :]
        ours = tl.load(left_at_right + at, inside, 0.0).to(tl.float32)
        ours = _shape(ours, bias_right[None, :], scale, softcap, temperature, has_bias, has_softcap)
        ours = miss_right[None, :] * tl.exp(ours - top_left[:, None]) / norm_left[:, None]
        errors = tl.load(pairs + at, inside, 0.0) / norm_left[:, None] / norm_right[None, :]
        errors += tl.where(same, miss_left[:, None] * miss_right[None, :], -theirs - ours)
        if not self_inclusive:
            own_response = tl.load(owner + k, there, -1)[:, None] == tl.load(owner + j, here, -2)[None, :]
            errors = tl.where(own_response, 0.0, errors)
        total += tl.sum(tl.where(inside, errors * tl.load(products + at, inside, 0.0), 0.0), 0)
    tl.store(sums + tl.program_id(0) * width + j, total, here)


@triton.jit
def _combine(
    parts, total, products, count, size, stride, self_inclusive: tl.constexpr, height: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, height)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = (i < count)[:, None] & (at < size)[None, :]
    g = tl.load(parts + i.to(tl.int64)[:, None] * stride + at[None, :], inside, 0.0).to(tl.float32)
    summed = tl.sum(g, 0)
    tl.store(total + at, summed.to(total.dtype.element_ty), at < size)
    # A response's own part is left out here, not taken off the end result, where it is far larger than the rest.
    partners = summed[None, :] + tl.zeros_like(g) if self_inclusive else summed[None, :] - g
    tl.store(products + tl.program_id(0) * height + i, tl.sum(g * partners, 1))
