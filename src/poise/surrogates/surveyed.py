"""Surrogates that take a survey of the mini-batch: GSPO's sequences, the choices of KL-Cov and Lp-Reg."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise._lib.errors import check_range
from poise.batch import TokenBatch
from poise.surrogates.base import SEQUENCE_MEAN, Surrogate, Survey, Terms, check_switch, clipped, k3, outside


@dataclass(frozen=True)
class Gspo(Surrogate):
    """The clip with the ratio of the whole response, ``s = exp(mean log r)``: a response is clipped as one.

    Paper: arXiv 2507.18071, bounds 3e-4 / 4e-4 (distances from 1) and the mean over sequences from the authors. The
    gradient goes through ``sg[s]·π/sg[π]``, as in verl, so that token weights have a meaning. s is over all response
    tokens, whatever their weight, and is held between 1 − ``clip_low`` and 1 + ``clip_high``. ``sequence_mean=False``
    keeps ``objective.aggregation``.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    sequence_mean: bool = True
    surveyed = True

    def __post_init__(self) -> None:
        check_range("gspo", "clip_low", self.clip_low, 0.0, 1.0)
        check_range("gspo", "clip_high", self.clip_high, 0.0)
        check_switch("gspo", "sequence_mean", self.sequence_mean)

    def survey(self, logp: Tensor, batch: TokenBatch) -> Survey:
        """The mean log-ratio of each response."""
        gap = torch.where(batch.mask, logp - batch.old_logp.to(logp.dtype), 0.0)
        mean = gap.sum(1, keepdim=True) / batch.lengths.clamp(min=1)[:, None]
        return Survey(sequence=mean.clamp(-20, 20).expand(batch.mask.shape))

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The clipped value of the response's ratio."""
        assert parts.sequence is not None
        log_ratio = parts.log_ratio(logp)
        through = parts.sequence + (log_ratio - log_ratio.detach())
        return clipped(through, parts.advantages, self.clip_low, self.clip_high, None)

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The tokens of responses whose ratio is clipped."""
        assert parts.sequence is not None
        return outside(parts.sequence, parts.advantages, self.clip_low, self.clip_high)

    @property
    def aggregation(self) -> str | None:
        """The mean over sequences."""
        return SEQUENCE_MEAN if self.sequence_mean else None


@dataclass(frozen=True)
class KlCov(Surrogate):
    """``r·A`` without a clip; the tokens whose advantage and log-probability covary most add ``coef·|log r|``.

    Paper: arXiv 2505.22617; as verl's ``kl_cov``: the top 0.02 % (``share``, at least one token) by
    ``(A − mean A)·(log π − mean log π)``, coefficient 0.1. **Ours:** chosen over the mini-batch, among the tokens with
    an advantage; the means are over all its response tokens. ``share=0`` or ``coef=0`` is r·A exactly.
    """

    share: float = 0.0002
    coef: float = 0.1
    surveyed = True

    def __post_init__(self) -> None:
        check_range("kl-cov", "share", self.share, 0.0, 1.0)
        check_range("kl-cov", "coef", self.coef, 0.0)

    def survey(self, logp: Tensor, batch: TokenBatch) -> Survey:
        """Choose by covariance."""
        advantages, values = batch.token_advantages[batch.mask].to(logp.dtype), logp[batch.mask]
        cov = (advantages - advantages.mean()) * (values - values.mean())
        count = max(int(self.share * len(cov)), 1) if self.share else 0
        return Survey(chosen=largest(cov, advantages != 0, count, batch, logp.dtype))

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The ratio times the advantage, less ``coef·|log r|`` for the chosen tokens."""
        assert parts.chosen is not None
        log_ratio = parts.log_ratio(logp)
        return log_ratio.exp() * parts.advantages - self.coef * parts.chosen * log_ratio.abs()


@dataclass(frozen=True)
class LpReg(Surrogate):
    """Pulls the least probable tokens with A < 0 towards the old policy without its noise, so that they survive.

    Paper: arXiv 2510.03222; defaults and order of the choice from the authors' code: the lowest 1 % (``share``) by
    log π of the tokens with A < 0, and of these the ones below their probability under the old policy filtered by
    ``min_p`` (words less likely than 0.02 times the likeliest are left out, the rest renormalised). They add ``coef``
    times k3 to the loss. The rest is a clip with ratio bounds 0 and 10 (``clip_low`` 1, ``clip_high`` 9). **Ours:**
    chosen over the mini-batch; the share is rounded down, also to one token (there the authors choose none).
    ``share=0`` or ``coef=0`` is that clip exactly.

    The batch needs ``min_p_logp``: one more scoring pass with the old weights, which the trainer takes before the
    update.
    """

    share: float = 0.01
    min_p: float = 0.02
    coef: float = 1.0
    clip_low: float = 1.0
    clip_high: float = 9.0
    surveyed = True
    needs = frozenset({"min_p_logp"})

    def __post_init__(self) -> None:
        check_range("lp-reg", "share", self.share, 0.0, 1.0)
        check_range("lp-reg", "min_p", self.min_p, 1e-6, 1.0)
        check_range("lp-reg", "coef", self.coef, 0.0)
        check_range("lp-reg", "clip_low", self.clip_low, 0.0, 1.0)
        check_range("lp-reg", "clip_high", self.clip_high, 0.0)

    def survey(self, logp: Tensor, batch: TokenBatch) -> Survey:
        """Choose by probability, then by the distance to the target."""
        assert batch.min_p_logp is not None
        negative = batch.token_advantages[batch.mask] < 0
        count = int(self.share * int(negative.sum()))
        target = torch.where(batch.mask, batch.min_p_logp.to(logp.dtype), -torch.inf)
        chosen = largest(-logp[batch.mask], negative, count, batch, logp.dtype) * (logp < target)
        return Survey(chosen=chosen, target=torch.where(chosen > 0, target, 0.0))

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The clipped value, less ``coef`` times k3 for the chosen tokens."""
        assert parts.chosen is not None
        assert parts.target is not None
        value = clipped(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high, None)
        gap = torch.where(parts.chosen > 0, logp - parts.target, 0.0)
        return value - self.coef * parts.chosen * k3(gap)

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        """Where the clip removes the gradient."""
        return outside(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high)


def largest(values: Tensor, allowed: Tensor, count: int, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
    """(B, T): 1 at the ``count`` largest allowed ``values`` of the response tokens, in row order; else 0."""
    count = min(count, int(allowed.sum()))
    places = torch.where(allowed, values, -torch.inf).topk(count).indices
    selected = torch.zeros_like(values, dtype=dtype).index_fill_(0, places, 1.0)
    return torch.zeros(batch.mask.shape, dtype=dtype, device=values.device).masked_scatter_(batch.mask, selected)
