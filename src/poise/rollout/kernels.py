"""A token for each row of logits, by one Triton kernel: ``Sampling.draw`` where no token is left out.

A row's logits are read twice, the second time out of the cache, and nothing of their size is written.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from poise._kernels import LOG2E, NEVER, finished
from poise.linear import Head


@triton.jit
def _draw_kernel(
    product, stride, vocabulary, bias, points, step, tokens, logps, entropies, width,
    scale, softcap, inverse_temperature,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    product += row.to(tl.int64) * stride
    place = tl.load(step) * width + row

    top, total, moment, best = NEVER * 1.0, 0.0, 0.0, 0
    for start in tl.range(0, vocabulary, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = tl.load(product + column, mask=inside, other=NEVER, eviction_policy="evict_last").to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
        z, _ = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)
        highest = tl.max(z, 0)
        if GREEDY:  # of equals the first, as torch has it
            first = tl.min(tl.where(z == highest, column, vocabulary), 0)
            best = tl.where(highest > top, first, best)
        higher = tl.maximum(top, highest)
        e = tl.exp2(z - higher)
        less = tl.exp2(top - higher)
        moment = less * (moment + total * (top - higher)) + tl.sum(e * (z - higher), 0)  # of e, around the largest
        total = total * less + tl.sum(e, 0)
        top = higher

    token = best
    if not GREEDY:  # where the distribution function passes the point, and never where it does not rise
        goal = tl.load(points + place) * total
        token, last, start, reached = vocabulary, 0, 0, 0.0
        while (start < vocabulary) & (token == vocabulary):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            x = tl.load(product + column, mask=inside, other=NEVER).to(tl.float32)
            shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
            z, _ = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)
            e = tl.exp2(z - top)
            token = tl.min(tl.where((reached + tl.cumsum(e, 0) > goal) & (e > 0), column, vocabulary), 0)
            last = tl.maximum(last, tl.max(tl.where(e > 0, column, 0), 0))
            reached += tl.sum(e, 0)
            start += BLOCK
        token = tl.where(token == vocabulary, last, token)  # rounding: the point lies behind the sum of all

    x = tl.load(product + token).to(tl.float32)
    shift = tl.load(bias + token).to(tl.float32) if BIAS else 0.0
    z, _ = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(logps + place, (z - top - tl.log2(total)) / LOG2E)
    tl.store(entropies + place, (tl.log2(total) - moment / total) / LOG2E)


def draw(
    product: Tensor, head: Head, greedy: bool, points: Tensor, step: Tensor, tokens: Tensor, logp: Tensor,
    entropy: Tensor,
) -> None:  # fmt: skip
    """From ``W h`` (n, V) and row ``step`` of points (steps, slots) to the same row of the last three, first n places.

    A sequence's draw depends on its own row alone, whatever stands beside it.
    """
    rows, vocabulary = product.shape
    block = min(4096, triton.next_power_of_2(vocabulary))
    with torch.cuda.device(product.device):
        _draw_kernel[(rows,)](
            product, product.stride(0), vocabulary, points if head.bias is None else head.bias, points, step, tokens,
            logp, entropy, points.stride(0), float(head.scale), float(head.softcap or 1.0), 1 / head.temperature,
            BIAS=head.bias is not None, SOFTCAP=head.softcap is not None, GREEDY=greedy, BLOCK=block, num_warps=8,
        )  # fmt: skip
