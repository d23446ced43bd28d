"""The policy objective: surrogate, KL term, entropy bonus, and the average over tokens. Pure functions.

One optimizer step uses one mini-batch, often in several micro-batches. Compute ``normalizer`` once per mini-batch and
``policy_loss`` once per micro-batch: the micro-batch losses *add up* to the mini-batch loss, for any split.

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

Three surrogates (gspo, kl-cov, lp-reg) first need the current log-probabilities of the whole mini-batch: compute
``whole = survey(logp, mini, settings)`` once per mini-batch, without gradients, and pass ``survey=whole.rows(jx)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poise._lib.errors import check_choice
from poise.batch import Phase, TokenBatch
from poise.objective_settings import AGGREGATIONS as AGGREGATIONS
from poise.objective_settings import FIXED_LENGTH, SEQUENCE_MEAN, TOKEN_MEAN
from poise.objective_settings import KL_ESTIMATORS as KL_ESTIMATORS
from poise.objective_settings import Settings as Settings
from poise.surrogates import Survey, Terms, clipped, k3


def surrogate(log_ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    """The clipped surrogate of each token, to be maximised: ``min(r·A, clip(r)·A)``, and at least ``c·A`` for A < 0."""
    return clipped(log_ratio, advantages, settings.clip_low, settings.clip_high, settings.dual_clip)


def kl_divergence(logp: Tensor, ref_logp: Tensor, kind: str = Settings.kl) -> Tensor:
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
    return k3(gap)


def importance_weights(batch: TokenBatch, settings: Settings) -> Tensor | None:
    """(B, T) truncated importance weights ``min(old / sampler, importance_cap)``.

    They correct for a sampling engine whose log-probabilities differ from ``old_logp``. Returns None if the batch has
    no ``sampler_logp`` or the settings have no cap.
    """
    if batch.sampler_logp is None or settings.importance_cap is None:
        return None
    gap = batch.old_logp.to(batch.dtype) - batch.sampler_logp.to(batch.dtype)
    return torch.where(batch.mask, gap, 0.0).exp().clamp(max=settings.importance_cap)


def active(batch: TokenBatch, phase: Phase, settings: Settings) -> Tensor:
    """(B, T) bool: tokens that can have a gradient. If there are none, skip the optimizer step."""
    _check_phase(batch, phase)
    tokens = (phase.policy > 0) & (batch.token_advantages != 0)
    if settings.kl_coef or settings.entropy_coef:
        tokens = tokens | (phase.kl > 0)
    return tokens & batch.mask


def normalizer(batch: TokenBatch, settings: Settings) -> Tensor:
    """The divisor of a mini-batch's loss. It depends on the aggregation, and is the same in every phase.

    Responses without tokens are not counted.
    """
    if settings.averages_by == TOKEN_MEAN:
        return batch.mask.sum().clamp(min=1)
    responses = (batch.lengths > 0).sum().clamp(min=1)
    if settings.averages_by == FIXED_LENGTH and settings.max_length:
        return responses * settings.max_length
    return responses


def survey(logp: Tensor, batch: TokenBatch, settings: Settings) -> Survey | None:
    """Return the surrogate's survey of the whole mini-batch, or None if the surrogate needs no survey.

    ``logp`` (B, T) are the mini-batch's current log-probabilities. Values outside the mask may be anything.
    """
    rule = settings.rule
    if not rule.surveyed:
        return None
    for name in sorted(rule.needs):
        if getattr(batch, name) is None:
            raise ValueError(f"surrogate {settings.surrogate!r} needs TokenBatch.{name}, which this batch lacks")
    logp = logp.detach().to(torch.promote_types(logp.dtype, torch.float32))
    return rule.survey(torch.where(batch.mask, logp, 0.0), batch)


def terms(
    batch: TokenBatch,
    phase: Phase,
    settings: Settings,
    normalizer: Tensor | float,
    dtype: torch.dtype,
    survey: Survey | None = None,
) -> Terms:
    """The ``Terms`` of every token of a micro-batch."""
    _check_phase(batch, phase)
    _check_survey(batch, settings, survey)
    share = batch.mask.to(dtype) / normalizer
    if settings.averages_by == SEQUENCE_MEAN:
        share = share / batch.lengths.clamp(min=1)[:, None]
    policy = phase.policy.to(dtype) * share
    if (correction := importance_weights(batch, settings)) is not None:
        policy = policy * correction.to(dtype)
    return Terms(
        old_logp=batch.old_logp.to(dtype),
        ref_logp=None if batch.ref_logp is None else batch.ref_logp.to(dtype),
        advantages=batch.token_advantages.to(dtype),
        policy=policy,
        bonus=phase.kl.to(dtype) * share,
        share=share,
        **({} if survey is None else _weighted(survey, policy)),
    )


def _weighted(survey: Survey, policy: Tensor) -> dict[str, Tensor]:
    """The survey's tensors in the dtype of the weights, 0 for tokens without weight."""
    present = {name: value for name, value in vars(survey).items() if value is not None}
    return {name: torch.where(policy > 0, value.to(policy.dtype), 0.0) for name, value in present.items()}


def token_losses(logp: Tensor, entropy: Tensor | None, parts: Terms, settings: Settings) -> dict[str, Tensor]:
    """Each token's loss by term: "policy", plus "kl" and "entropy" if the term's coefficient is not 0."""
    losses = {"policy": -settings.rule.value(logp, parts) * parts.policy}
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
    survey: Survey | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the metrics of a micro-batch.

    ``logp`` (B, T) are the current log-probabilities of the sampled tokens, with gradients. ``entropy`` (B, T) are the
    current entropies, needed for an entropy bonus. Some surrogates need ``survey``: the micro-batch's rows of the
    mini-batch's ``Survey``. Values outside the mask may be anything. Loss and metrics are this micro-batch's share: sum
    them over the mini-batch. Metrics are averaged like the loss (with token-mean, ``optim/clip_high`` is a share of the
    tokens) and stay on the device. ``poise.head.policy_loss`` computes the same loss from hidden states and never holds
    the logits of all tokens.
    """
    settings = settings or Settings()
    _check_inputs(logp, batch, settings, entropy)
    parts = terms(batch, phase, settings, normalizer, torch.promote_types(logp.dtype, torch.float32), survey)
    dtype = parts.share.dtype
    return loss_and_metrics(logp.to(dtype), None if entropy is None else entropy.to(dtype), parts, settings)


def loss_and_metrics(
    logp: Tensor, entropy: Tensor | None, parts: Terms, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the tokens' losses, and average their metrics."""
    losses = {name: values.sum() for name, values in token_losses(logp, entropy, parts, settings).items()}
    loss = torch.stack(list(losses.values())).sum() if len(losses) > 1 else losses["policy"]
    with torch.no_grad():
        log_ratio, weighted = parts.log_ratio(logp), parts.bonus > 0
        low, high = settings.rule.held(logp, parts)
        metrics = {
            "optim/clip_low": low,
            "optim/clip_high": high,
            "optim/drift": torch.expm1(log_ratio) - log_ratio,
        }
        if parts.ref_logp is not None:
            gap = torch.where(weighted, logp - parts.ref_logp, 0.0)
            metrics["optim/kl"] = kl_divergence(gap, torch.zeros_like(gap), settings.kl)
        if entropy is not None:
            metrics["optim/entropy"] = torch.where(weighted, entropy, 0.0)
        values = torch.stack([per_token.flatten().to(log_ratio.dtype) for per_token in metrics.values()])
        averages = (values * parts.share.flatten()).sum(1)  # not a matrix product: autocast would round it
    return loss, {
        "optim/loss": loss.detach(),
        "optim/policy_loss": losses["policy"].detach(),
        **dict(zip(metrics, averages, strict=True)),
    }


def _check_phase(batch: TokenBatch, phase: Phase) -> None:
    if phase.policy.shape != batch.mask.shape or phase.kl.shape != batch.mask.shape:
        shapes = f"{tuple(phase.policy.shape)} and a batch of {tuple(batch.mask.shape)}"
        raise ValueError(f"a phase of {shapes} do not match: slice both with the same rows(ix)")


def _check_survey(batch: TokenBatch, settings: Settings, survey: Survey | None) -> None:
    if settings.rule.surveyed and survey is None:
        raise ValueError(
            f"surrogate {settings.surrogate!r} needs data on the whole mini-batch: call objective.survey(logp, batch, "
            "settings) once per mini-batch, without gradients, and pass the micro-batch's rows of the result as survey="
        )
    for value in vars(survey).values() if survey is not None else ():
        if value is not None and value.shape != batch.mask.shape:
            shapes = f"{tuple(value.shape)} and a batch of {tuple(batch.mask.shape)}"
            raise ValueError(f"a survey of {shapes} do not match: slice both with the same rows(ix)")


def _check_inputs(logp: Tensor, batch: TokenBatch, settings: Settings, entropy: Tensor | None) -> None:
    for name, value in (("logp", logp), ("entropy", entropy)):
        if value is not None and value.shape != batch.mask.shape:
            expected = tuple(batch.mask.shape)
            raise ValueError(f"policy_loss: {name} must be {expected} like the batch, got {tuple(value.shape)}")
    if settings.kl_coef and batch.ref_logp is None:
        raise ValueError("policy_loss: kl_coef is not 0, so the batch needs ref_logp")
    if settings.entropy_coef and entropy is None:
        raise ValueError("policy_loss: entropy_coef is not 0, so pass entropy=, the current entropies, with gradients")
