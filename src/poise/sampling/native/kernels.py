"""Triton kernels for decoding: attention, drawing a token, and small operations between the matrix products.

A row's result depends only on that row. Sums and norms are computed in float32, and rounded where transformers' own
code rounds its results. Letters in shapes: see the package's docstring; V vocabulary.
"""
# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from poise._lib.logit_kernels import LOG2E, NEVER, finished
from poise.lm_head import Head
from poise.sampling.native.slot_cache import Rotation

# If few rows have many keys, one program per row and key head would leave most processors idle. The keys of a slot are
# then split between several programs, and a second kernel combines their results.
SHORT = 1024  # keys in a slot that a single program reads fast enough, even if most processors are idle
LEAST = 256  # the fewest keys of a slot that are worth another program; a multiple of the kernel's BLOCK
PROGRAMS = 3  # the most programs for each processor: with heads of width 128, three run at the same time


@triton.jit
def _attend_kernel(
    query, query_row, query_head, new_key, key_row, key_head, new_value, value_row, value_head,
    keys, values, length, used, out, scale, window, cosine, sine, query_weight, key_weight, epsilon,
    splits, least, tops, totals,
    HEADS: tl.constexpr, SHARING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, at = tl.arange(0, 16), tl.arange(0, PADDED)  # tl.dot takes at least 16 rows
    inside = at < WIDTH
    place = (own[:, None] < SHARING) & inside[None, :]
    query += row * query_row + (head * SHARING + own[:, None]) * query_head
    new_key += row * key_row + head * key_head
    q = tl.load(query + at[None, :], mask=place, other=0.0)
    k = tl.load(new_key + at, mask=inside, other=0.0)
    if NORM or ROTATE:
        q, k = q.to(tl.float32), k.to(tl.float32)
        q_factor, k_factor = tl.full([16], 1.0, tl.float32), 1.0
        if NORM:
            q_factor = tl.rsqrt(tl.sum(q * q, 1) / WIDTH + epsilon)
            k_factor = tl.rsqrt(tl.sum(k * k, 0) / WIDTH + epsilon)
            q = q * q_factor[:, None] * tl.load(query_weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            k = k * k_factor * tl.load(key_weight + at, mask=inside, other=0.0).to(tl.float32)
        if ROTATE:  # each element with its partner, half a head away
            half = WIDTH // 2
            partner, sign = tl.where(at < half, at + half, at - half), tl.where(at < half, -1.0, 1.0)
            other_q = tl.load(query + partner[None, :], mask=place, other=0.0).to(tl.float32)
            other_k = tl.load(new_key + partner, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                weight = tl.load(query_weight + partner, mask=inside, other=0.0).to(tl.float32)
                other_q = other_q * q_factor[:, None] * weight[None, :]
                other_k = other_k * k_factor * tl.load(key_weight + partner, mask=inside, other=0.0).to(tl.float32)
            c = tl.load(cosine + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
            s = tl.load(sine + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32) * sign
            q, k = q * c[None, :] + other_q * s[None, :], k * c + other_k * s
        q, k = q.to(keys.dtype.element_ty), k.to(keys.dtype.element_ty)
    v = tl.load(new_value + row * value_row + head * value_head + at, mask=inside, other=0.0)
    last = tl.load(used + row) - 1  # the place of the new key
    step = HEADS * WIDTH
    keys += row * length * step + head * WIDTH
    values += row * length * step + head * WIDTH
    begin, end = 0, last
    if WINDOW:
        begin = tl.maximum(last - window + 1, 0) // BLOCK * BLOCK
    part = 0
    if SPLIT:
        part = tl.program_id(2)
        size = tl.maximum(tl.cdiv(last - begin, splits * BLOCK) * BLOCK, least)
        begin += part * size
        end = tl.minimum(begin + size, last)
    if part == 0:
        tl.store(keys + last * step + at, k, mask=inside)
        tl.store(values + last * step + at, v, mask=inside)

    # The new key comes from registers, so no program waits for the store. It belongs to the first part; in other parts
    # its maximum is so low that it has no weight.
    top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    total = tl.full([16], 1.0, tl.float32)
    sums = tl.zeros([16, PADDED], tl.float32) + v.to(tl.float32)[None, :]
    if SPLIT:
        top = tl.where(part == 0, top, NEVER)
    for start in tl.range(begin, end, BLOCK, num_stages=3):
        position = start + tl.arange(0, BLOCK)
        seen = position < last
        if WINDOW:
            seen = seen & (position > last - window)
        old_k = tl.load(keys + position[None, :] * step + at[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
        old_v = tl.load(
            values + position[:, None] * step + at[None, :], mask=seen[:, None] & inside[None, :], other=0.0
        )
        scores = tl.where(seen[None, :], tl.dot(q, old_k) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        e, less = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        total = total * less + tl.sum(e, 1)
        sums = sums * less[:, None] + tl.dot(e.to(old_v.dtype), old_v)
        top = higher
    result = row * HEADS * SHARING + head * SHARING + own
    if SPLIT:
        result = result * splits + part
        tl.store(tops + result, top, mask=own < SHARING)
        tl.store(totals + result, total, mask=own < SHARING)
    else:
        sums = sums / total[:, None]
    tl.store(out + result[:, None] * WIDTH + at[None, :], sums.to(out.dtype.element_ty), mask=place)


@triton.jit
def _combine_kernel(
    sums, tops, totals, splits, out, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Combine the parts of one query head. A part without keys has the maximum NEVER, hence no weight."""
    head, at = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = at < WIDTH
    top, total = tl.full([1], NEVER, tl.float32), tl.zeros([1], tl.float32)
    result = tl.zeros([PADDED], tl.float32)
    for start in tl.range(0, splits, BLOCK):
        part = start + tl.arange(0, BLOCK)
        place, exists = head * splits + part, part < splits
        own_top = tl.load(tops + place, mask=exists, other=NEVER)
        own_total = tl.load(totals + place, mask=exists, other=0.0)
        own = tl.load(sums + place[:, None] * WIDTH + at[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(own_top, 0))
        weight, less = tl.exp2(own_top - higher), tl.exp2(top - higher)
        total = total * less + tl.sum(weight * own_total, 0)
        result = result * less + tl.sum(weight[:, None] * own, 0)
        top = higher
    tl.store(out + head * WIDTH + at, (result / total).to(out.dtype.element_ty), mask=inside)


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, used: Tensor, scale: float | None,
    window: int | None, rotation: Rotation | None = None,
) -> Tensor:  # fmt: skip
    """Store the new keys and values (n, G, D), and attend with the queries (n, H, D) to all keys of their slots.

    Slots are (S, length, G, D). ``used`` (n,) is the number of keys per slot, including the new one. Without
    ``rotation``, queries and keys must already be normed and rotated.
    """
    rows, heads, width = query.shape
    shared, rotation = keys.shape[2], rotation or Rotation()
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    splits, padded = split_count(query, keys), max(triton.next_power_of_2(width), 16)
    out = torch.empty((rows, heads, width), dtype=query.dtype, device=query.device)
    none = used  # a placeholder that a kernel without norm or rotation does not read
    sums, tops, totals = out, none, none
    if splits > 1:
        sums = torch.empty((rows, heads, splits, width), dtype=torch.float32, device=query.device)
        tops, totals = torch.empty((2, rows, heads, splits), dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        _attend_kernel[(rows, shared, splits)](
            query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1),
            value, value.stride(0), value.stride(1), keys, values, keys.shape[1], used, sums,
            (width**-0.5 if scale is None else scale) * LOG2E.value, window or 0,
            none if rotation.cosine is None else rotation.cosine, none if rotation.sine is None else rotation.sine,
            none if rotation.query_weight is None else rotation.query_weight,
            none if rotation.key_weight is None else rotation.key_weight, rotation.epsilon,
            splits, LEAST, tops, totals,
            HEADS=shared, SHARING=heads // shared, WIDTH=width, PADDED=padded, WINDOW=window is not None,
            NORM=rotation.query_weight is not None, ROTATE=rotation.cosine is not None, SPLIT=splits > 1,
            BLOCK=64 if width <= 128 else 32, num_warps=4,
        )  # fmt: skip
        if splits > 1:
            _combine_kernel[(rows * heads,)](
                sums, tops, totals, splits, out, WIDTH=width, PADDED=padded, BLOCK=64, num_warps=8
            )
    return out


def split_count(query: Tensor, keys: Tensor) -> int:
    """Return how many programs share the keys of a slot. It depends on shapes alone, because a CUDA graph fixes it."""
    rows, (length, shared) = len(query), keys.shape[1:3]
    if length <= SHORT:
        return 1
    return max(1, min(PROGRAMS * _processors(query.device) // (rows * shared), length // LEAST))


def suits(query: Tensor, keys: Tensor) -> bool:
    """Whether ``attend`` supports these shapes."""
    return query.shape[1] // keys.shape[2] <= 16 and keys.shape[3] <= 256


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _draw_kernel(
    product, stride, vocabulary, bias, points, step, tokens, logps, entropies, width,
    scale, softcap, inverse_temperature,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    product += row.to(tl.int64) * stride
    place = tl.load(step) * width + row

    top, best = NEVER * 1.0, 0
    sums, moments = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)  # Σ e and Σ e · (logit − largest)
    block = tl.arange(0, BLOCKS)  # for each block of the vocabulary: the largest logit so far, and Σ e relative to it
    tops, weights = tl.full([BLOCKS], NEVER, tl.float32), tl.zeros([BLOCKS], tl.float64)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = tl.load(product + column, mask=inside, other=NEVER, eviction_policy="evict_last").to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
        z = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
        highest = tl.max(z, 0)
        if GREEDY:  # the first of equal logits, as in torch
            first = tl.min(tl.where(z == highest, column, vocabulary), 0)
            best = tl.where(highest > top, first, best)
        higher = tl.maximum(top, highest)
        e, less = tl.exp2(z - higher), tl.exp2(top - higher)
        moments = less * (moments + sums * (top - higher)) + e * (z - higher)
        sums = sums * less + e
        top = higher
        if not GREEDY:
            tops = tl.where(block == start // BLOCK, higher, tops)
            weights = tl.where(block == start // BLOCK, tl.sum(e.to(tl.float64), 0), weights)
    total, moment = tl.sum(sums, 0), tl.sum(moments, 0)

    # Find where the cumulative distribution passes the point: first the block, then the token in it; never a token with
    # weight 0. Sums are float64, because in float32 they stop growing where probabilities are small. By rounding, the
    # point may exceed the sum of all weights; then the last token of its block with a weight above 0 is drawn.
    token = best
    if not GREEDY:
        weights *= tl.exp2(tops - top).to(tl.float64)
        goal = tl.load(points + place) * tl.sum(weights, 0)
        chosen = tl.min(tl.where((tl.cumsum(weights, 0) > goal) & (weights > 0), block, BLOCKS), 0)
        chosen = tl.where(chosen == BLOCKS, tl.max(tl.where(weights > 0, block, 0), 0), chosen)
        goal -= tl.sum(tl.where(block < chosen, weights, 0.0), 0)
        own_top = tl.max(tl.where(block == chosen, tops, NEVER), 0)
        column = chosen * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = tl.load(product + column, mask=inside, other=NEVER).to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
        z = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
        e = tl.exp2(z - own_top)
        reached = tl.cumsum(e.to(tl.float64), 0) * tl.exp2(own_top - top).to(tl.float64)
        token = tl.min(tl.where((reached > goal) & (e > 0) & inside, column, vocabulary), 0)
        token = tl.where(token == vocabulary, tl.max(tl.where((e > 0) & inside, column, 0), 0), token)

    x = tl.load(product + token).to(tl.float32)
    shift = tl.load(bias + token).to(tl.float32) if BIAS else 0.0
    z = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(logps + place, (z - top - tl.log2(total)) / LOG2E)
    tl.store(entropies + place, (tl.log2(total) - moment / total) / LOG2E)


def draw(
    product: Tensor, head: Head, greedy: bool, points: Tensor, step: Tensor, tokens: Tensor, logp: Tensor,
    entropy: Tensor,
) -> None:  # fmt: skip
    """Draw a token from each row of ``product`` (n, V), the head's weights times the hidden states.

    ``points``, ``tokens``, ``logp`` and ``entropy`` are (steps, S). The random numbers are row ``step`` of ``points``;
    the results are written to the first n columns of row ``step`` of the other tensors. The kernel reads each row of
    logits once and the drawn token's block twice, and writes no tensor of the logits' size.
    """
    rows, vocabulary = product.shape
    block = min(4096, triton.next_power_of_2(vocabulary))
    with torch.cuda.device(product.device):
        _draw_kernel[(rows,)](
            product, product.stride(0), vocabulary, points if head.bias is None else head.bias, points, step, tokens,
            logp, entropy, points.stride(0), float(head.scale), float(head.softcap or 1.0), 1 / head.temperature,
            BIAS=head.bias is not None, SOFTCAP=head.softcap is not None, GREEDY=greedy, BLOCK=block,
            BLOCKS=triton.next_power_of_2(triton.cdiv(vocabulary, block)), num_warps=8,
        )  # fmt: skip


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
    """Return the sum of ``x`` and ``delta``, and the sum's RMS norm times ``weight``, (n, W) each."""
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
    """Return silu(gate) · up, (n, I). ``gate_up`` (n, 2·I) holds the gates, then the ups."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    with torch.cuda.device_of(gate_up):
        _silu_product_kernel[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out
