"""The policy objective: clipped surrogate, KL, entropy bonus, and how tokens are averaged. Plain functions.

One optimizer step works on a mini-batch, often in several micro-batches. ``normalizer`` is computed once over the
mini-batch, ``policy_loss`` once per micro-batch; the losses *add up* to the mini-batch's, whatever the cut:

>>> for phase in regulator(batch):
...     for ix in mini_batches:
...         mini, mini_phase = batch.rows(ix), phase.rows(ix)
...         if not active(mini, mini_phase, settings).any():
...             continue  # no token takes part: an optimizer step would move the model by momentum alone
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
    """What the objective is made of. Clips are those of the AR/Lopti authors; their K&K runs add ``kl_coef=0.001``."""

    clip_low: float = 0.20
    clip_high: float = 0.24
    dual_clip: float | None = 10.0  # bounds the loss of a token with A < 0 at dual_clip·|A|; None: unbounded
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: str = "token-mean"
    max_length: int | None = None  # for "fixed-length" (Dr. GRPO): the length that every response is divided by
    importance_cap: float | None = 2.0  # truncation of old / sampler where sampler_logp is given; None: no correction

    def __post_init__(self) -> None:
        check_range("objective", "clip_low", self.clip_low, 0.0, 1.0)
        check_range("objective", "clip_high", self.clip_high, 0.0)
        if self.dual_clip is not None:
            check_range("objective", "dual_clip", self.dual_clip, 1.001)  # at 1 it would tie with the unclipped term
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

    k1 ``log(π/ref)``; k2 ``½·log²(π/ref)``; k3 ``ref/π − 1 − log(ref/π)``, with the log-ratio held within ±5 and the
    value within ±10 as in the code of the AR/Lopti authors. As a loss, k1 has a gradient of mean zero: it only
    reports.
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
    """(B, T) bool: tokens that can have a gradient. Where there is none, no optimizer step may be taken."""
    _check_phase(batch, phase)
    tokens = (phase.policy > 0) & (batch.token_advantages != 0)
    if settings.kl_coef or settings.entropy_coef:
        tokens = tokens | (phase.kl > 0)
    return tokens & batch.mask


def normalizer(batch: TokenBatch, settings: Settings) -> Tensor:
    """What the loss of a mini-batch is divided by: a count over all its response tokens, whatever the phase.

    Responses without a token do not count.
    """
    if settings.aggregation == "token-mean":
        return batch.mask.sum().clamp(min=1)
    responses = (batch.lengths > 0).sum().clamp(min=1)
    return (
        responses * settings.max_length if settings.max_length and settings.aggregation == "fixed-length" else responses
    )


@dataclass(frozen=True, eq=False)
class Terms:
    """All that the loss of a token depends on besides its current log-probability and entropy.

    (B, T) each, or (n,) for some of the tokens. The loss is a sum over tokens: averaging is inside the weights.
    """

    old_logp: Tensor
    ref_logp: Tensor | None
    advantages: Tensor
    policy: Tensor  # weight of the surrogate
    bonus: Tensor  # weight of the KL and entropy terms, before their coefficients
    share: Tensor  # what one token counts for in an average over the mini-batch

    def at(self, tokens: Tensor | slice, *, ref: bool = True) -> Terms:
        """The terms of some tokens, a slice of them or flat indices; without the reference policy's if so wished."""
        names = [item.name for item in fields(self) if ref or item.name != "ref_logp"]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if isinstance(tokens, slice):
            chosen = [value[tokens] for value in given.values()]
        else:  # in one go: on a GPU these are small tensors and many launches
            chosen = list(torch.stack([value.flatten() for value in given.values()])[:, tokens])
        return Terms(**({"ref_logp": None} | dict(zip(given, chosen, strict=True))))

    def log_ratio(self, logp: Tensor) -> Tensor:
        """log(current / old); 0 for tokens that take no part: selected, not multiplied, since 0 · inf is NaN."""
        return torch.where(self.policy > 0, logp - self.old_logp, 0.0).clamp(-20, 20)


def terms(batch: TokenBatch, phase: Phase, settings: Settings, normalizer: Tensor | float, dtype: torch.dtype) -> Terms:
    """What the tokens of a micro-batch bring to the loss."""
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
    """What each token adds to the loss, by name: "policy", and "kl" and "entropy" where they have a coefficient."""
    losses = {"policy": -surrogate(parts.log_ratio(logp), parts.advantages, settings) * parts.policy}
    carries = parts.bonus > 0
    if settings.kl_coef and parts.ref_logp is not None:
        gap = torch.where(carries, logp - parts.ref_logp, 0.0)
        losses["kl"] = settings.kl_coef * parts.bonus * kl_divergence(gap, torch.zeros_like(gap), settings.kl)
    if settings.entropy_coef and entropy is not None:
        losses["entropy"] = -settings.entropy_coef * parts.bonus * torch.where(carries, entropy, 0.0)
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

    ``logp`` (B, T) are the current log-probabilities of the sampled tokens, with gradients; ``entropy`` (B, T) the
    current entropies, needed for an entropy bonus. Values outside the mask may be anything. Both loss and metrics are
    shares of the mini-batch's: add them over its micro-batches. Metrics are averaged as the loss is (with token-mean,
    ``optim/clip_high`` is a share of the tokens) and stay on the device. From hidden states, without the logits of
    all tokens in memory, the same loss is ``poise.head.policy_loss``.
    """
    settings = settings or Settings()
    _check_inputs(logp, batch, settings, entropy)
    parts = terms(batch, phase, settings, normalizer, torch.promote_types(logp.dtype, torch.float32))
    return summed(
        logp.to(parts.share.dtype), None if entropy is None else entropy.to(parts.share.dtype), parts, settings
    )


def summed(logp: Tensor, entropy: Tensor | None, parts: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the given tokens, and its metrics."""
    losses = {name: values.sum() for name, values in token_losses(logp, entropy, parts, settings).items()}
    loss = torch.stack(list(losses.values())).sum() if len(losses) > 1 else losses["policy"]
    with torch.no_grad():
        log_ratio = parts.log_ratio(logp)
        ratio, carries = log_ratio.exp(), parts.bonus > 0
        metrics = {
            "optim/clip_low": (ratio < 1 - settings.clip_low) & (parts.advantages < 0),
            "optim/clip_high": (ratio > 1 + settings.clip_high) & (parts.advantages > 0),
            "optim/drift": torch.expm1(log_ratio) - log_ratio,
        }
        if parts.ref_logp is not None:
            gap = torch.where(carries, logp - parts.ref_logp, 0.0)
            metrics["optim/kl"] = kl_divergence(gap, torch.zeros_like(gap), settings.kl)
        if entropy is not None:
            metrics["optim/entropy"] = torch.where(carries, entropy, 0.0)
        values = torch.stack([of_tokens.flatten().to(ratio.dtype) for of_tokens in metrics.values()])
        averages = (values * parts.share.flatten()).sum(1)  # no product of matrices: autocast would round it
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
