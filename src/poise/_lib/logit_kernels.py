"""Compute a logit from ``W h`` in Triton kernels; ``Head.finish`` does the same in plain torch."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)  # a logit of probability 0


@triton.jit
def finished(x, bias, scale, softcap, inverse_temperature, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """The logit in units of log 2, and the logit's derivative (natural units) with respect to ``W h``."""
    if BIAS:
        x = x + bias
    slope = scale * inverse_temperature
    if SOFTCAP:
        t = 2 * tl.sigmoid(2 * (x * scale) / softcap) - 1  # tanh
        z = t * (softcap * inverse_temperature * LOG2E)
        z = tl.where(x > 0.9 * NEVER, z, NEVER)  # the soft-cap must not raise this logit
        slope = slope * (1 - t * t)
    else:
        z = x * (slope * LOG2E)
        z = tl.where(z < NEVER, NEVER, z)  # -inf would become 0 · inf = NaN in a mean; NaN stays NaN
    return z, slope
