"""Surrogates that depend on one token only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise._lib.errors import check_range
from poise.surrogates.base import SEQUENCE_MEAN, Surrogate, Terms, check_switch, limit, one


@dataclass(frozen=True)
class Cispo(Surrogate):
    """``sg[clip(r, low, high)]·A·log π``: the ratio is a bounded weight, and no token loses its gradient.

    sg stops the gradient. Paper: MiniMax-M1, arXiv 2506.13585. ``low`` and ``high`` bound the ratio itself. The default
    is TRL's: only an upper bound, 5.0. verl's clip of 0.2 is ``cispo(low=0.8, high=1.2)``. **Ours:** the value is
    ``clip(r)·A·π/sg[π]``, which has the same gradient and the scale of the other surrogates. ``cispo(high=None)`` has
    the gradient of r·A.
    """

    low: float = 0.0
    high: float | None = 5.0

    def __post_init__(self) -> None:
        check_range("cispo", "low", self.low, 0.0)
        if self.high is not None:
            check_range("cispo", "high", self.high, self.low)

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The bounded ratio times the advantage."""
        log_ratio = parts.log_ratio(logp)
        return log_ratio.detach().exp().clamp(self.low, limit(self.high)) * parts.advantages * one(log_ratio)

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        """Two masks: the tokens whose ratio is out of bounds. They keep their gradient."""
        ratio = parts.log_ratio(logp).exp()
        return ratio < self.low, ratio > limit(self.high)


@dataclass(frozen=True)
class Sapo(Surrogate):
    """``A·(4/τ)·σ(τ(r − 1))``: a soft gate instead of a clip.

    Paper: arXiv 2511.20347; τ = 1.0 for A > 0 (``positive``) and 1.05 otherwise (``negative``), mean over sequences, as
    in verl. As τ goes to 0 the gradient becomes that of r·A. ``sequence_mean=False`` keeps ``objective.aggregation``.
    """

    positive: float = 1.0
    negative: float = 1.05
    sequence_mean: bool = True

    def __post_init__(self) -> None:
        check_range("sapo", "positive", self.positive, 1e-6)
        check_range("sapo", "negative", self.negative, 1e-6)
        check_switch("sapo", "sequence_mean", self.sequence_mean)

    @property
    def aggregation(self) -> str | None:
        """The mean over sequences, unless ``sequence_mean=False``."""
        return SEQUENCE_MEAN if self.sequence_mean else None

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The gate times the advantage."""
        tau = torch.full_like(parts.advantages, self.negative).masked_fill_(parts.advantages > 0, self.positive)
        return parts.advantages * (4 / tau) * torch.sigmoid(tau * torch.expm1(parts.log_ratio(logp)))


@dataclass(frozen=True)
class Dppo(Surrogate):
    """DPPO-TV: ``r·A``; a token is dropped where ``π − π_old > δ`` and A > 0, or ``π − π_old < −δ`` and A < 0.

    Paper: arXiv 2602.04879, which bounds the difference of the probabilities, not their ratio. The default is verl's:
    δ = 0.15, and the ratio, capped at 20, is a weight: ``sg[min(r, cap)]·A·log π``. prime-rl's default loss is
    ``dppo(delta=0.2, cap=None, square=1e-3)``: it adds ``square·(log r)²`` to the loss of every token, dropped or not.
    **Ours:** this term is 0 for tokens with A = 0. ``dppo(delta=1, cap=None)`` is r·A exactly.
    """

    delta: float = 0.15
    cap: float | None = 20.0
    square: float = 0.0

    def __post_init__(self) -> None:
        check_range("dppo", "delta", self.delta, 0.0, 1.0)
        check_range("dppo", "square", self.square, 0.0)
        if self.cap is not None:
            check_range("dppo", "cap", self.cap, 1.0)

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The ratio times the advantage where the token is kept, minus the square term."""
        log_ratio = parts.log_ratio(logp)
        low, high = self._dropped(log_ratio.detach(), parts)
        ratio = log_ratio.detach().exp().clamp(max=limit(self.cap)) * one(log_ratio)
        value = torch.where(low | high, 0.0, ratio * parts.advantages)
        if self.square:
            value = value - torch.where(parts.advantages != 0, self.square * log_ratio.square(), 0.0)
        return value

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        """The dropped tokens."""
        return self._dropped(parts.log_ratio(logp), parts)

    def _dropped(self, log_ratio: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        change = parts.old_logp.exp() * torch.expm1(log_ratio)
        return (change < -self.delta) & (parts.advantages < 0), (change > self.delta) & (parts.advantages > 0)
