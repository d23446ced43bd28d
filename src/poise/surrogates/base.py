"""The base class of surrogates, the data that they read (``Terms``, ``Survey``), and the clip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from poise._lib.errors import short
from poise.batch import Rows, TokenBatch
from poise.objective_settings import SEQUENCE_MEAN as SEQUENCE_MEAN
from poise.objective_settings import Settings


@dataclass(frozen=True, eq=False)
class Terms:
    """Everything that a token's loss depends on, except its current log-probability and entropy.

    Each tensor is (B, T), or (n,) for selected tokens. The loss is a plain sum over tokens: the weights already include
    the divisor of the average.
    """

    old_logp: Tensor
    ref_logp: Tensor | None
    advantages: Tensor
    policy: Tensor  # weight of the surrogate
    bonus: Tensor  # weight of the KL and entropy terms, before their coefficients
    share: Tensor  # the token's share in an average over the mini-batch
    # The fields of the Survey, 0 for tokens without weight
    sequence: Tensor | None = None
    chosen: Tensor | None = None
    target: Tensor | None = None

    def at(self, tokens: Tensor | slice, *, ref: bool = True) -> Terms:
        """Select tokens by slice or by flat indices. ``ref=False`` drops ``ref_logp``."""
        names = [item.name for item in fields(self) if ref or item.name != "ref_logp"]
        present = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if isinstance(tokens, slice):
            selected = [value[tokens] for value in present.values()]
        else:  # stacked, so that a GPU launches one small kernel instead of six
            selected = list(torch.stack([value.flatten() for value in present.values()])[:, tokens])
        return Terms(**({"ref_logp": None} | dict(zip(present, selected, strict=True))))

    def log_ratio(self, logp: Tensor) -> Tensor:
        """log(current / old), clamped to ±20; 0 for tokens without weight (``where``, because 0 · inf is NaN)."""
        return torch.where(self.policy > 0, logp - self.old_logp, 0.0).clamp(-20, 20)


@dataclass(frozen=True, eq=False)
class Survey:
    """A surrogate's data from the current log-probabilities of a mini-batch. Each tensor is (B, T)."""

    sequence: Tensor | None = None  # GSPO: the mean log-ratio of the token's response
    chosen: Tensor | None = None  # KL-Cov, Lp-Reg: 1 for the tokens with the additional term, else 0
    target: Tensor | None = None  # Lp-Reg: the log-probability to which chosen tokens are pulled; 0 elsewhere

    def rows(self, ix: Rows) -> Survey:
        """Return the rows ``ix`` of the survey, to match ``TokenBatch.rows``."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return Survey(**{name: None if value is None else value[ix] for name, value in values.items()})


class Surrogate(ABC):
    """The policy term of a token. To write one, subclass this as a frozen dataclass."""

    surveyed: ClassVar[bool] = False  # whether the surrogate needs a survey of the mini-batch
    needs: ClassVar[frozenset[str]] = frozenset()  # the optional fields of TokenBatch that the survey reads

    @abstractmethod
    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """Each token's value, to be maximised, before weighting. It must be finite even where the weight is 0."""

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Two masks: tokens held back at the lower and at the upper bound (``optim/clip_low``, ``optim/clip_high``)."""
        none = torch.zeros_like(parts.policy, dtype=torch.bool)
        return none, none

    def survey(self, logp: Tensor, batch: TokenBatch) -> Survey:  # noqa: ARG002
        """Compute the survey of a mini-batch from its current log-probabilities (B, T)."""
        return Survey()

    @property
    def aggregation(self) -> str | None:
        """The aggregation that replaces ``objective.aggregation``; None if the surrogate works with any."""
        return None

    @property
    def bound(self) -> float:
        """How far a ratio may be from 1 before the surrogate can hold a token back."""
        return min(getattr(self, "clip_low", inf), getattr(self, "clip_high", inf))


@dataclass(frozen=True)
class Clip(Surrogate):
    """``min(r·A, clip(r)·A)``, and at least ``c·A`` for A < 0: PPO's clip, asymmetric, with a dual clip.

    Its settings are ``objective.clip_low``, ``clip_high`` and ``dual_clip``; their defaults are the AR/Lopti authors'.
    DAPO's clip-higher (arXiv 2503.14476) is 0.2 / 0.28 without dual clip.
    """

    clip_low: float = Settings.clip_low
    clip_high: float = Settings.clip_high
    dual_clip: float | None = Settings.dual_clip

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The clipped value."""
        return clipped(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high, self.dual_clip)

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        """Two masks: the tokens whose gradient the clip removes."""
        return outside(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high)


def clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """``min(r·A, clip(r, 1 − low, 1 + high)·A)``, and at least ``dual·A`` for A < 0."""
    ratio = log_ratio.exp()
    value = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        value = torch.where(advantages < 0, torch.maximum(value, dual * advantages), value)
    return value


def k3(gap: Tensor) -> Tensor:
    """``exp(−gap) − 1 + gap``, the gap clamped to ±5 and the value to ±10 as in the AR/Lopti authors' code."""
    gap = gap.clamp(-5, 5)
    return (torch.expm1(-gap) + gap).clamp(-10, 10)


def outside(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Two masks: the tokens that the clip holds back at its lower and at its upper bound."""
    ratio = log_ratio.exp()
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def one(values: Tensor) -> Tensor:
    """Return 1 with the gradient of ``values``: π/sg[π] for log-probabilities."""
    return (values - values.detach()).exp()


def check_switch(owner: str, name: str, value: bool) -> None:
    """Raise a TypeError for a setting that is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be True or False, got {short(value)}")


def limit(value: float | None) -> float:
    """Return an upper bound as a number: infinity for None."""
    return inf if value is None else value
