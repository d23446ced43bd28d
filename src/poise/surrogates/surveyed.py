"""Surrogates that need a survey of the mini-batch: GSPO for sequence ratios, KL-Cov and Lp-Reg to choose tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise._lib.errors import check_range
from poise.batch import TokenBatch
from poise.surrogates.base import SEQUENCE_MEAN, Surrogate, Survey, Terms, check_switch, clipped, k3, outside


@dataclass(frozen=True)
class Gspo(Surrogate):
    """The clip with the ratio of the whole response, ``s = exp(mean log r)``: all its tokens are clipped together.

    Paper: arXiv 2507.18071; the bounds 3e-4 and 4e-4 (distances from 1) and the mean over sequences are the authors'.
    The gradient goes through ``sg[s]·π/sg[π]``, as in verl, so that each token can have its own weight (sg stops the
    gradient). s is computed over all response tokens, including tokens with weight 0, and is clipped at
    1 − ``clip_low`` and 1 + ``clip_high``. ``sequence_mean=False`` keeps ``objective.aggregation``.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    sequence_mean: bool = True
    surveyed = True

    def __post_init__(self) -> None:
        check_range("gspo", "clip_low", self.clip_low, 0.0, 1.0)
        check_range("gspo", "clip_high", self.clip_high, 0.0)
        check_switch("gspo", "sequence_mean", self.sequence_mean)

    @property
    def aggregation(self) -> str | None:
        """The mean over sequences, unless ``sequence_mean=False``."""
        return SEQUENCE_MEAN if self.sequence_mean else None

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


@dataclass(frozen=True)
class KlCov(Surrogate):
    """``r·A`` without a clip, minus ``coef·|log r|`` for the tokens whose advantage and log-probability covary most.

    Paper: arXiv 2505.22617. As in verl's ``kl_cov``, the chosen tokens are the top 0.02 % (``share``, at least one
    token) by ``(A − mean A)·(log π − mean log π)``, and the coefficient is 0.1. **Ours:** tokens are chosen over the
    mini-batch, among those with A ≠ 0; the means are over all response tokens of the mini-batch. ``share=0`` or
    ``coef=0`` is r·A exactly.
    """

    share: float = 0.0002
    coef: float = 0.1
    surveyed = True

    def __post_init__(self) -> None:
        check_range("kl-cov", "share", self.share, 0.0, 1.0)
        check_range("kl-cov", "coef", self.coef, 0.0)

    def survey(self, logp: Tensor, batch: TokenBatch) -> Survey:
        """Choose tokens by covariance."""
        advantages, values = batch.token_advantages[batch.mask].to(logp.dtype), logp[batch.mask]
        cov = (advantages - advantages.mean()) * (values - values.mean())
        count = max(int(self.share * len(cov)), 1) if self.share else 0
        return Survey(chosen=largest(cov, advantages != 0, count, batch, logp.dtype))

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The ratio times the advantage, minus ``coef·|log r|`` for the chosen tokens."""
        assert parts.chosen is not None
        log_ratio = parts.log_ratio(logp)
        return log_ratio.exp() * parts.advantages - self.coef * parts.chosen * log_ratio.abs()


@dataclass(frozen=True)
class LpReg(Surrogate):
    """Pull the least probable tokens with A < 0 towards the filtered old policy, so that they do not vanish.

    The filtered old policy removes tokens less likely than ``min_p`` (0.02) times the likeliest and renormalises the
    others. Paper: arXiv 2510.03222; defaults and the order of the two choices are from the authors' code. First choose
    the 1 % (``share``) of the tokens with A < 0 that have the lowest log π; of these, keep the tokens that are less
    likely now than under the filtered old policy. These tokens add ``coef`` times k3 to the loss. The other term of the
    surrogate is a clip with ratio bounds 0 and 10 (``clip_low`` 1, ``clip_high`` 9). **Ours:** tokens are chosen over
    the mini-batch; the count is rounded down, and a count of 1 chooses one token (the authors' code: none).
    ``share=0`` or ``coef=0`` is that clip exactly.

    The batch needs ``min_p_logp``, which the trainer computes before the update, in an extra pass of the old policy.
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
        """Choose the least probable tokens, then keep those below their target."""
        assert batch.min_p_logp is not None
        negative = batch.token_advantages[batch.mask] < 0
        count = int(self.share * int(negative.sum()))
        target = torch.where(batch.mask, batch.min_p_logp.to(logp.dtype), -torch.inf)
        chosen = largest(-logp[batch.mask], negative, count, batch, logp.dtype) * (logp < target)
        return Survey(chosen=chosen, target=torch.where(chosen > 0, target, 0.0))

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The clipped value, minus ``coef`` times k3 for the chosen tokens."""
        assert parts.chosen is not None
        assert parts.target is not None
        value = clipped(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high, None)
        gap = torch.where(parts.chosen > 0, logp - parts.target, 0.0)
        return value - self.coef * parts.chosen * k3(gap)

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        """Two masks: the tokens whose gradient the clip removes."""
        return outside(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high)


def largest(values: Tensor, allowed: Tensor, count: int, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
    """(B, T): 1 at the ``count`` largest allowed ``values``, else 0. ``values`` has one entry per response token."""
    count = min(count, int(allowed.sum()))
    places = torch.where(allowed, values, -torch.inf).topk(count).indices
    selected = torch.zeros_like(values, dtype=dtype).index_fill_(0, places, 1.0)
    return torch.zeros(batch.mask.shape, dtype=dtype, device=values.device).masked_scatter_(batch.mask, selected)
