"""The row pass in Triton: one program reads a token's logits and overwrites them with their gradient.

``poise.head.rows`` is the reference in plain torch. This module repeats a token's loss, metrics and derivatives by
hand; tests/gpu compares every setting with ``poise.objective``.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from poise._lib.logit_kernels import LOG2E, NEVER, finished
from poise.head.rows import TALLY
from poise.lm_head import Head
from poise.objective import KL_ESTIMATORS, Settings
from poise.surrogates import Cispo, Clip, Dppo, Gspo, KlCov, LpReg, Sapo, Surrogate, Terms

COLUMNS = tl.constexpr(len(TALLY))
STATISTICS, OBJECTIVE, UPSTREAM = 0, 1, 2  # a pass computes logp and entropy, or one of two gradients
SURROGATES = (Clip, Cispo, Gspo, Sapo, Dppo, KlCov, LpReg)  # a surrogate's index here is its number in the kernel


@triton.jit
def _log1p(x):
    small = x * (1 - x * (0.5 - x * (1 / 3 - x * 0.25)))
    return tl.where(x < 0.01, small, tl.log(1 + x))


@triton.jit
def _excess(x):
    """exp(x) − 1 − x; for small x, where the difference would cancel, by a series."""
    series = x * x * 0.5 * (1 + x * (1 / 3 + x * (1 / 12 + x * (1 / 60 + x * (1 / 360)))))
    return tl.where(tl.abs(x) < 0.3, series, tl.exp(x) - 1 - x)


@triton.jit
def _clipped(ratio, advantage, low, high, dual):
    """The clipped value, its derivative with respect to log r, and whether the token is held back below or above."""
    rising = (advantage > 0) & (ratio <= 1 + high)
    falling = (advantage < 0) & (ratio >= 1 - low) & (ratio <= dual)
    slope = tl.where(rising | falling, advantage * ratio, 0.0)
    clipped = tl.minimum(tl.maximum(ratio, 1 - low), 1 + high)
    value = tl.minimum(ratio * advantage, clipped * advantage)
    value = tl.where(advantage < 0, tl.maximum(value, dual * advantage), value)
    return value, slope, (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)


@triton.jit
def _pull(gap):
    """k3 of a gap to a target, and its derivative with respect to the gap."""
    near = tl.minimum(tl.maximum(gap, -5.0), 5.0)
    inverse = tl.exp(-near)
    slope = tl.where((tl.abs(gap) <= 5) & (inverse - 1 + gap <= 10), 1 - inverse, 0.0)
    return tl.minimum(_excess(-near), 10.0), slope


@triton.jit
def _surrogate(logp, row, held, old, advantage, sequence, chosen, target, a, b, c, SURROGATE: tl.constexpr):
    """The surrogate's value, its derivative with respect to logp, and whether the token is held back below or above.

    ``a``, ``b`` and ``c`` are the surrogate's settings (``_constants``). ``held`` is the log-ratio, clamped to ±20.
    """
    ratio = tl.exp(held)
    low, high = ratio < 0, ratio < 0
    if SURROGATE == 1:  # cispo
        value = tl.minimum(tl.maximum(ratio, a), b) * advantage
        slope, low, high = value, ratio < a, ratio > b
    elif SURROGATE == 2:  # gspo
        value, slope, low, high = _clipped(tl.exp(tl.load(sequence + row)), advantage, a, b, c)
    elif SURROGATE == 3:  # sapo
        tau = tl.where(advantage > 0, a, b)
        shut = tl.exp(-tau * (ratio - 1))
        gate = 1 / (1 + shut)
        value, slope = advantage * 4 / tau * gate, advantage * 4 * gate * gate * shut * ratio
    elif SURROGATE == 4:  # dppo
        change = tl.exp(old) * (ratio - 1)
        low, high = (change < -a) & (advantage < 0), (change > a) & (advantage > 0)
        slope = tl.where(low | high, 0.0, tl.minimum(ratio, b) * advantage)
        square = tl.where(advantage != 0, c, 0.0)
        value, slope = slope - square * held * held, slope - 2 * square * held
    elif SURROGATE == 5:  # kl-cov
        penalty = a * tl.load(chosen + row)
        sign = tl.where(held > 0, 1.0, tl.where(held < 0, -1.0, 0.0))
        value, slope = ratio * advantage - penalty * tl.abs(held), ratio * advantage - penalty * sign
    elif SURROGATE == 6:  # lp-reg
        value, slope, low, high = _clipped(ratio, advantage, a, b, float("inf"))
        penalty = c * tl.load(chosen + row)
        distance, pull = _pull(tl.where(penalty > 0, logp - tl.load(target + row), 0.0))
        value, slope = value - penalty * distance, slope - penalty * pull
    else:
        value, slope, low, high = _clipped(ratio, advantage, a, b, c)
    return value, slope, low, high


@triton.jit
def _objective(
    logp, row, old, ref, advantages, policy, bonus, sequence, chosen, target, a, b, c, kl_coef,
    KL: tl.constexpr, SURROGATE: tl.constexpr,
):  # fmt: skip
    """The token's loss without entropy, its derivative with respect to the log-probability, and its metrics."""
    advantage, weight, old_logp = tl.load(advantages + row), tl.load(policy + row), tl.load(old + row)
    gap = tl.where(weight > 0, logp - old_logp, 0.0)
    held = tl.minimum(tl.maximum(gap, -20.0), 20.0)
    value, slope, low, high = _surrogate(
        logp, row, held, old_logp, advantage, sequence, chosen, target, a, b, c, SURROGATE
    )  # fmt: skip
    moves = (weight > 0) & (tl.abs(gap) <= 20)
    slope = tl.where(moves, -weight * slope, 0.0)
    kl = 0.0
    of_policy = -weight * value
    loss = of_policy
    if KL != -1:
        share = tl.load(bonus + row)
        gap = tl.where(share > 0, logp - tl.load(ref + row), 0.0)
        if KL == 0:
            kl, pull = gap, 1.0
        elif KL == 1:
            kl, pull = 0.5 * gap * gap, gap
        else:
            kl, pull = _pull(gap)
        slope += kl_coef * share * pull
        loss += kl_coef * share * kl
    return loss, slope, of_policy, tl.where(low, 1.0, 0.0), tl.where(high, 1.0, 0.0), _excess(held), kl


@triton.jit
def _store_tally(tally, share, loss, of_policy, low, high, drift, kl):
    """Store the columns of ``TALLY`` except the entropy."""
    tl.store(tally, loss)
    tl.store(tally + 1, of_policy)
    tl.store(tally + 2, low * share)
    tl.store(tally + 3, high * share)
    tl.store(tally + 4, drift * share)
    tl.store(tally + 5, kl * share)


@triton.jit
def _row_sums(
    logits, vocabulary, bias, own, scale, softcap, inverse_temperature,
    ENTROPY: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The row's largest logit, Σ exp(logit − largest), and the same sum weighted by the distance to the own logit."""
    top = own
    sums, moments = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = tl.load(logits + column, mask=inside, other=NEVER, eviction_policy="evict_last").to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
        z = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)[0]
        higher = tl.maximum(top, tl.max(z, 0))
        rescale = tl.exp2(top - higher)
        e = tl.exp2(z - higher)
        sums = sums * rescale + e
        if ENTROPY:
            moments = moments * rescale + e * (z - own)
        top = higher
    return top, tl.sum(sums, 0), tl.sum(moments, 0)


@triton.jit
def _row_gradient(
    logits, vocabulary, bias, slope, slope_of_entropy, entropy, lift, scale, softcap, inverse_temperature,
    ENTROPY: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite every logit but the target's with its gradient."""
    for start in tl.range(0, vocabulary, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = tl.load(logits + column, mask=inside, other=NEVER, eviction_policy="evict_first").to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
        z, inner = finished(x, shift, scale, softcap, inverse_temperature, BIAS, SOFTCAP)
        p = tl.exp2(z + lift)
        d = -slope * inner * p
        if ENTROPY:
            d -= slope_of_entropy * inner * p * ((z + lift) / LOG2E + entropy)
        tl.store(logits + column, d.to(logits.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def _row_kernel(
    logits, stride, vocabulary, targets, bias, logp_out, entropy_out, tally,
    old, ref, advantages, policy, bonus, share, sequence, chosen, pulled_to, grad_logp, grad_entropy,
    scale, softcap, inverse_temperature, a, b, c, kl_coef, entropy_coef,
    MODE: tl.constexpr, KL: tl.constexpr, SURROGATE: tl.constexpr, ENTROPY: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocabulary)
    target = tl.where(known, target, 0)  # an invalid target gets NaN, and writes nowhere else
    own = tl.where(known, tl.load(logits + target).to(tl.float32), float("nan"))
    own_bias = tl.load(bias + target).to(tl.float32) if BIAS else 0.0
    own, own_slope = finished(own, own_bias, scale, softcap, inverse_temperature, BIAS, SOFTCAP)
    # The sums exclude the target, so that nothing large cancels if p is near 1: the target's logit is kept in `own` and
    # overwritten with NEVER. This saves a comparison per element.
    tl.debug_barrier()
    tl.store(logits + target, NEVER)
    tl.debug_barrier()

    top, others, spread = _row_sums(
        logits, vocabulary, bias, own, scale, softcap, inverse_temperature, ENTROPY, BIAS, SOFTCAP, BLOCK
    )  # fmt: skip
    mine = tl.exp2(own - top)
    total = others + mine
    logp = tl.where(mine > 1e-30, -_log1p(others / tl.maximum(mine, 1e-30)), (own - top - tl.log2(total)) / LOG2E)
    entropy = -logp - spread / total / LOG2E
    if MODE == 0:
        tl.store(logp_out + row, logp)
        if ENTROPY:
            tl.store(entropy_out + row, entropy)

    if MODE != 0:
        if MODE == 1:
            loss, slope, of_policy, low, high, drift, kl = _objective(
                logp, row, old, ref, advantages, policy, bonus, sequence, chosen, pulled_to, a, b, c, kl_coef,
                KL, SURROGATE,
            )  # fmt: skip
            counts, tally = tl.load(share + row), tally + row * COLUMNS
            slope_of_entropy = 0.0
            if ENTROPY:
                weight = tl.load(bonus + row)
                slope_of_entropy = -entropy_coef * weight
                carried = tl.where(weight > 0, entropy, 0.0)
                loss += slope_of_entropy * carried
                tl.store(tally + 6, carried * counts)
            _store_tally(tally, counts, loss, of_policy, low, high, drift, kl)
        else:
            slope = tl.load(grad_logp + row)
            slope_of_entropy = tl.load(grad_entropy + row) if ENTROPY else 0.0
        lift = logp * LOG2E - own
        _row_gradient(
            logits, vocabulary, bias, slope, slope_of_entropy, entropy, lift, scale, softcap, inverse_temperature,
            ENTROPY, BIAS, SOFTCAP, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        d = slope * (others / total)
        if ENTROPY:
            d -= slope_of_entropy * tl.exp(logp) * (logp + entropy)
        tl.store(logits + target, (d * own_slope).to(logits.dtype.element_ty))


@triton.jit
def _scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        x = tl.load(values + place, mask=inside)
        tl.store(values + place, (x * by).to(values.dtype.element_ty), mask=inside)


def statistics(product: Tensor, targets: Tensor, head: Head, logp: Tensor, entropy: Tensor) -> None:
    """Write the log-probabilities and entropies (N,) of ``W h`` (N, V) into ``logp`` and ``entropy``."""
    _launch(STATISTICS, product, targets, head, logp=logp, entropy=entropy)


def objective_gradient(product: Tensor, targets: Tensor, head: Head, parts: Terms, settings: Settings) -> Tensor:
    """Return the sums named by ``TALLY``; overwrite ``product`` (N, V) with the loss gradient at ``W h``."""
    tally = torch.zeros((len(product), len(TALLY)), device=product.device)
    _launch(OBJECTIVE, product, targets, head, parts=parts, settings=settings, tally=tally)
    return tally.sum(0)


def upstream_gradient(
    product: Tensor, targets: Tensor, head: Head, grad_logp: Tensor, grad_entropy: Tensor | None
) -> None:
    """Overwrite ``product`` = ``W h`` (N, V) with its gradient.

    ``grad_logp`` and ``grad_entropy`` (N,) are the gradients of the log-probability and the entropy.
    """
    _launch(UPSTREAM, product, targets, head, grad_logp=grad_logp, grad_entropy=grad_entropy)


def _launch(
    mode: int,
    product: Tensor,
    targets: Tensor,
    head: Head,
    *,
    logp: Tensor | None = None,
    entropy: Tensor | None = None,
    parts: Terms | None = None,
    settings: Settings | None = None,
    tally: Tensor | None = None,
    grad_logp: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> None:
    rows, vocabulary = product.shape
    settings = settings or Settings()
    with_kl = mode == OBJECTIVE and settings.kl_coef != 0
    with_entropy = {
        STATISTICS: True, OBJECTIVE: settings.entropy_coef != 0, UPSTREAM: grad_entropy is not None
    }[mode]  # fmt: skip
    fields = (None,) * 9
    if parts is not None:
        fields = (
            parts.old_logp, parts.ref_logp, parts.advantages, parts.policy, parts.bonus, parts.share,
            parts.sequence, parts.chosen, parts.target,
        )  # fmt: skip
    block = min(4096, triton.next_power_of_2(vocabulary))
    rule = settings.rule if mode == OBJECTIVE else Clip()
    with torch.cuda.device(product.device):
        _row_kernel[(rows,)](
            product, product.stride(0), vocabulary, targets, head.bias, logp, entropy, tally, *fields,
            grad_logp, grad_entropy,
            float(head.scale), float(head.softcap or 1.0), 1 / head.temperature, *_constants(rule),
            settings.kl_coef, settings.entropy_coef,
            MODE=mode, KL=KL_ESTIMATORS.index(settings.kl) if with_kl else -1, SURROGATE=SURROGATES.index(type(rule)),
            ENTROPY=with_entropy, BIAS=head.bias is not None, SOFTCAP=head.softcap is not None, BLOCK=block,
            num_warps=8,
        )  # fmt: skip


def supports(rule: Surrogate) -> bool:
    """Whether the kernel implements this surrogate."""
    return type(rule) in SURROGATES


def _constants(rule: Surrogate) -> tuple[float, float, float]:
    """A surrogate's settings as the kernel's ``a``, ``b`` and ``c``."""
    match rule:
        case Clip():
            values = rule.clip_low, rule.clip_high, rule.dual_clip
        case Cispo():
            values = rule.low, rule.high, 0.0
        case Gspo():
            values = rule.clip_low, rule.clip_high, None
        case Sapo():
            values = rule.positive, rule.negative, 0.0
        case Dppo():
            values = rule.delta, rule.cap, rule.square
        case KlCov():
            values = rule.coef, 0.0, 0.0
        case LpReg():
            values = rule.clip_low, rule.clip_high, rule.coef
        case _:
            raise NotImplementedError(f"the kernel has no surrogate {rule!r}")
    low, middle, high = (float("inf") if value is None else float(value) for value in values)
    return low, middle, high


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """``values *= factor``, without a transfer to the host. If the factor is 1, this costs only a kernel launch."""
    block = 4096
    with torch.cuda.device(values.device):
        _scale_kernel[(triton.cdiv(values.numel(), block),)](values, factor, values.numel(), BLOCK=block)
    return values
