"""From ``W h`` to a logit, for Triton kernels: what ``Head.finish`` does in plain torch."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)  # a logit of no probability


@triton.jit
def finished(x, bias, scale, softcap, inverse_temperature, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """The logit in units of log 2, and its derivative in its own units, with respect to the product ``W h``."""
    if BIAS:
        x = x + bias
    slope = scale * inverse_temperature
    if SOFTCAP:
        t = 2 * tl.sigmoid(2 * (x * scale) / softcap) - 1  # tanh
        z = t * (softcap * inverse_temperature * LOG2E)
        z = tl.where(x > 0.9 * NEVER, z, NEVER)  # or it would be lifted up
        slope = slope * (1 - t * t)
    else:
        z = x * (slope * LOG2E)
    return z, slope
