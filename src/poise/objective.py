"""The policy objective: clipped surrogate, KL term, entropy bonus, and the average over tokens. Pure functions.

One optimizer step uses one mini-batch, often in several micro-batches. Compute ``normalizer`` once per mini-batch and
``policy_loss`` once per micro-batch: the micro-batch losses *add up* to the mini-batch loss, however it is cut.

>>> for phase in regulator(batch):
...     for ix in mini_batches:
...         mini, mini_phase = batch.rows(ix), phase.rows(ix)
...         if not active(mini, mini_phase, settings).any():
...             continue  # no active token: an optimizer step would move the model by momentum alone
...         norm = normalizer(mini, settings)
...         for jx in micro_batches:
...             logp = model(...)
...             loss, metrics = policy_loss(logp, mini.rows(jx), mini_phase.rows(jx), settings, normalizer=norm)
...             loss.backward()
...         optimizer.step()
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from poise._lib.errors import check_choice, check_range
from poise.batch import Phase, TokenBatch

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class Settings:
    """Settings of the objective. Clips follow the AR/Lopti authors; their K&K runs add ``kl_coef=0.001``."""

    clip_low: float = 0.20
    clip_high: float = 0.24
    dual_clip: float | None = 10.0  # bounds the loss of a token with A < 0 at dual_clip·|A|; None: unbounded
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: str = "token-mean"
    max_length: int | None = None  # for "fixed-length" (Dr. GRPO): the constant divisor of every response's sum
    importance_cap: float | None = (
        2.0  # upper bound of old / sampler probability, given sampler_logp; None: no correction
    )

    def __post_init__(self) -> None:
        check_range("objective", "clip_low", self.clip_low, 0.0, 1.0)
        check_range("objective", "clip_high", self.clip_high, 0.0)
        if self.dual_clip is not None:
            check_range("objective", "dual_clip", self.dual_clip, 1.001)  # at 1 it would equal the unclipped term
        check_choice("objective", "kl", self.kl, KL_ESTIMATORS)
        check_range("objective", "kl_coef", self.kl_coef, 0.0)
        check_range("objective", "entropy_coef", self.entropy_coef)
        check_choice("objective", "aggregation", self.aggregation, AGGREGATIONS)
        if self.aggregation == "fixed-length" and self.max_length is None:
            raise ValueError("objective: aggregation 'fixed-length' needs max_length, the longest response allowed")
        if self.max_length is not None and (not isinstance(self.max_length, int) or self.max_length < 1):
            raise ValueError(f"objective: max_length must be a whole number above 0, got {self.max_length!r}")
        if self.importance_cap is not None:
            check_range("objective", "importance_cap", self.importance_cap, 1e-6)


def surrogate(log_ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    """The clipped surrogate of each token, to be maximised: ``min(r·A, clip(r)·A)``, and at least ``c·A`` for A < 0."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    value = torch.minimum(ratio * advantages, clipped * advantages)
    if settings.dual_clip is not None:
        value = torch.where(advantages < 0, torch.maximum(value, settings.dual_clip * advantages), value)
    return value


def kl_divergence(logp: Tensor, ref_logp: Tensor, kind: str = "k3") -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from the sampled token.

    k1 ``log(π/ref)``; k2 ``½·log²(π/ref)``; k3 ``ref/π − 1 − log(ref/π)``, with the log-ratio clamped to ±5 and the
    value to ±10 as in the AR/Lopti authors' code. The gradient of k1 has mean zero, so k1 is for reporting, not for a
    loss.
    """
    check_choice("kl_divergence", "kind", kind, KL_ESTIMATORS)
    gap = logp - ref_logp
    if kind == "k1":
        return gap
    if kind == "k2":
        return 0.5 * gap.square()
    gap = gap.clamp(-5, 5)
    return (torch.expm1(-gap) + gap).clamp(-10, 10)


def importance_weights(batch: TokenBatch, cap: float) -> Tensor:
    """(B, T) truncated importance weights ``min(old / sampler, cap)`` for a sampler whose log-probabilities differ."""
    if batch.sampler_logp is None:
        raise ValueError("importance_weights needs TokenBatch.sampler_logp")
    gap = batch.old_logp.to(batch.dtype) - batch.sampler_logp.to(batch.dtype)
    return torch.where(batch.mask, gap, 0.0).exp().clamp(max=cap)


def active(batch: TokenBatch, phase: Phase, settings: Settings) -> Tensor:
    """(B, T) bool: tokens that can have a gradient. Take no optimizer step if there are none."""
    _check_phase(batch, phase)
    tokens = (phase.policy > 0) & (batch.token_advantages != 0)
    if settings.kl_coef or settings.entropy_coef:
        tokens = tokens | (phase.kl > 0)
    return tokens & batch.mask


def normalizer(batch: TokenBatch, settings: Settings) -> Tensor:
    """The divisor of a mini-batch's loss: a count over all its response tokens, the same in every phase.

    Responses without tokens do not count.
    """
    if settings.aggregation == "token-mean":
        return batch.mask.sum().clamp(min=1)
    responses = (batch.lengths > 0).sum().clamp(min=1)
    if settings.aggregation == "fixed-length" and settings.max_length:
        return responses * settings.max_length
    return responses


@dataclass(frozen=True, eq=False)
class Terms:
    """Everything that a token's loss depends on, except its current log-probability and entropy.

    Each tensor is (B, T), or (n,) for selected tokens. The loss is a plain sum: the weights include the average.
    """

    old_logp: Tensor
    ref_logp: Tensor | None
    advantages: Tensor
    policy: Tensor  # weight of the surrogate
    bonus: Tensor  # weight of the KL and entropy terms, before their coefficients
    share: Tensor  # the token's share in an average over the mini-batch

    def at(self, tokens: Tensor | slice, *, ref: bool = True) -> Terms:
        """The terms of some tokens, by slice or by flat indices. ``ref=False`` drops ``ref_logp``."""
        names = [item.name for item in fields(self) if ref or item.name != "ref_logp"]
        present = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if isinstance(tokens, slice):
            selected = [value[tokens] for value in present.values()]
        else:  # stacked, so that a GPU launches one small kernel instead of six
            selected = list(torch.stack([value.flatten() for value in present.values()])[:, tokens])
        return Terms(**({"ref_logp": None} | dict(zip(present, selected, strict=True))))

    def log_ratio(self, logp: Tensor) -> Tensor:
        """log(current / old), 0 for tokens without weight. Selected with ``where``: multiplying gives 0 · inf = NaN."""
        return torch.where(self.policy > 0, logp - self.old_logp, 0.0).clamp(-20, 20)


def terms(batch: TokenBatch, phase: Phase, settings: Settings, normalizer: Tensor | float, dtype: torch.dtype) -> Terms:
    """The ``Terms`` of every token of a micro-batch."""
    _check_phase(batch, phase)
    share = batch.mask.to(dtype) / normalizer
    if settings.aggregation == "seq-mean-token-mean":
        share = share / batch.lengths.clamp(min=1)[:, None]
    policy = phase.policy.to(dtype) * share
    if batch.sampler_logp is not None and settings.importance_cap is not None:
        policy = policy * importance_weights(batch, settings.importance_cap).to(dtype)
    return Terms(
        old_logp=batch.old_logp.to(dtype),
        ref_logp=None if batch.ref_logp is None else batch.ref_logp.to(dtype),
        advantages=batch.token_advantages.to(dtype),
        policy=policy,
        bonus=phase.kl.to(dtype) * share,
        share=share,
    )


def token_losses(logp: Tensor, entropy: Tensor | None, parts: Terms, settings: Settings) -> dict[str, Tensor]:
    """Each token's loss by term: "policy", plus "kl" and "entropy" where their coefficient is not 0."""
    losses = {"policy": -surrogate(parts.log_ratio(logp), parts.advantages, settings) * parts.policy}
    weighted = parts.bonus > 0
    if settings.kl_coef and parts.ref_logp is not None:
        gap = torch.where(weighted, logp - parts.ref_logp, 0.0)
        losses["kl"] = settings.kl_coef * parts.bonus * kl_divergence(gap, torch.zeros_like(gap), settings.kl)
    if settings.entropy_coef and entropy is not None:
        losses["entropy"] = -settings.entropy_coef * parts.bonus * torch.where(weighted, entropy, 0.0)
    return losses


def policy_loss(
    logp: Tensor,
    batch: TokenBatch,
    phase: Phase,
    settings: Settings | None = None,
    *,
    normalizer: Tensor | float,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and its metrics.

    ``logp`` (B, T) are the current log-probabilities of the sampled tokens, with gradients. ``entropy`` (B, T) are the
    current entropies, needed for an entropy bonus. Values outside the mask may be anything. Loss and metrics are this
    micro-batch's share: sum them over the mini-batch. Metrics are averaged like the loss (with token-mean,
    ``optim/clip_high`` is a share of the tokens) and stay on the device. ``poise.head.policy_loss`` computes the same
    loss from hidden states and never holds the logits of all tokens.
    """
    settings = settings or Settings()
    _check_inputs(logp, batch, settings, entropy)
    parts = terms(batch, phase, settings, normalizer, torch.promote_types(logp.dtype, torch.float32))
    dtype = parts.share.dtype
    return loss_and_metrics(logp.to(dtype), None if entropy is None else entropy.to(dtype), parts, settings)


def loss_and_metrics(
    logp: Tensor, entropy: Tensor | None, parts: Terms, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the tokens' losses, and average their metrics."""
    losses = {name: values.sum() for name, values in token_losses(logp, entropy, parts, settings).items()}
    loss = torch.stack(list(losses.values())).sum() if len(losses) > 1 else losses["policy"]
    with torch.no_grad():
        log_ratio = parts.log_ratio(logp)
        ratio, weighted = log_ratio.exp(), parts.bonus > 0
        metrics = {
            "optim/clip_low": (ratio < 1 - settings.clip_low) & (parts.advantages < 0),
            "optim/clip_high": (ratio > 1 + settings.clip_high) & (parts.advantages > 0),
            "optim/drift": torch.expm1(log_ratio) - log_ratio,
        }
        if parts.ref_logp is not None:
            gap = torch.where(weighted, logp - parts.ref_logp, 0.0)
            metrics["optim/kl"] = kl_divergence(gap, torch.zeros_like(gap), settings.kl)
        if entropy is not None:
            metrics["optim/entropy"] = torch.where(weighted, entropy, 0.0)
        values = torch.stack([per_token.flatten().to(ratio.dtype) for per_token in metrics.values()])
        averages = (values * parts.share.flatten()).sum(1)  # not a matrix product: autocast would round it
    return loss, {
        "optim/loss": loss.detach(),
        "optim/policy_loss": losses["policy"].detach(),
        **dict(zip(metrics, averages, strict=True)),
    }


def _check_phase(batch: TokenBatch, phase: Phase) -> None:
    if phase.policy.shape != batch.mask.shape or phase.kl.shape != batch.mask.shape:
        shapes = f"{tuple(phase.policy.shape)} and a batch of {tuple(batch.mask.shape)}"
        raise ValueError(f"a phase of {shapes} do not belong together: cut both with the same rows(ix)")


def _check_inputs(logp: Tensor, batch: TokenBatch, settings: Settings, entropy: Tensor | None) -> None:
    for name, value in (("logp", logp), ("entropy", entropy)):
        if value is not None and value.shape != batch.mask.shape:
            expected = tuple(batch.mask.shape)
            raise ValueError(f"policy_loss: {name} must be {expected} as the batch is, got {tuple(value.shape)}")
    if settings.kl_coef and batch.ref_logp is None:
        raise ValueError("policy_loss: kl_coef is not 0, so the batch needs ref_logp")
    if settings.entropy_coef and entropy is None:
        raise ValueError("policy_loss: entropy_coef is not 0, so pass entropy=, the current policy's, with gradients")
