"""Surrogates: what the policy term of a token is, as a function of its current probability. One table of names.

>>> objective.Settings(surrogate="dppo(delta=0.2)")

A regulator weights tokens before the update; a surrogate acts through the ratio r = π/π_old of the current policy. The
weights multiply the surrogate's value, so every surrogate goes with every regulator. With one optimizer step per batch
r = 1, and all of them but ``lp-reg`` have the gradient of ``clip``, up to the average. docs/surrogates.md compares
them.

A surrogate sees one token. What it needs to know of the others (GSPO's sequence, the choices of KL-Cov and Lp-Reg)
comes from a ``Survey`` of the mini-batch's current log-probabilities, taken before its gradient and constant in it. So
the cut into micro-batches changes nothing. A survey does not depend on the phase.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from inspect import signature
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from poise._lib.calls import read_call
from poise._lib.errors import check_range, short, unknown
from poise.batch import Rows, TokenBatch

SEQUENCE_MEAN = "seq-mean-token-mean"


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
    # The fields of the Survey, 0 for tokens without weight
    sequence: Tensor | None = None
    chosen: Tensor | None = None
    target: Tensor | None = None

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


@dataclass(frozen=True, eq=False)
class Survey:
    """What a surrogate takes from the current log-probabilities of a mini-batch. Each tensor is (B, T)."""

    sequence: Tensor | None = None  # GSPO: the mean log-ratio of the token's response
    chosen: Tensor | None = None  # KL-Cov, Lp-Reg: 1 for the tokens with the additional term, else 0
    target: Tensor | None = None  # Lp-Reg: the log-probability that the chosen tokens are drawn to; 0 elsewhere

    def rows(self, ix: Rows) -> Survey:
        """The survey restricted to some rows, to go with ``TokenBatch.rows``."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return Survey(**{name: None if value is None else value[ix] for name, value in values.items()})


class Surrogate(ABC):
    """The policy term of a token. To write one, subclass this as a frozen dataclass."""

    surveyed: ClassVar[bool] = False  # whether it needs a survey of the mini-batch
    needs: ClassVar[frozenset[str]] = frozenset()  # the optional fields of TokenBatch that the survey reads

    @abstractmethod
    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """Each token's value, to be maximised, before its weight. Finite also for tokens without weight."""

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The tokens whose ratio is held below, and above: the metrics ``optim/clip_low`` and ``optim/clip_high``."""
        none = torch.zeros_like(parts.policy, dtype=torch.bool)
        return none, none

    def survey(self, logp: Tensor, batch: TokenBatch) -> Survey:  # noqa: ARG002
        """The survey of a mini-batch, from its current log-probabilities (B, T)."""
        return Survey()

    @property
    def aggregation(self) -> str | None:
        """The average that this surrogate asks for; None: any."""
        return None


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


def _outside(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    ratio = log_ratio.exp()
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def _one(values: Tensor) -> Tensor:
    """1, with the gradient of ``values``: π/sg[π] of a log-probability."""
    return (values - values.detach()).exp()


def _check_switch(owner: str, name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be True or False, got {short(value)}")


def _limit(value: float | None) -> float:
    return inf if value is None else value


@dataclass(frozen=True)
class Clip(Surrogate):
    """``min(r·A, clip(r)·A)``, and at least ``c·A`` for A < 0: PPO's clip, asymmetric, with a dual clip.

    Its settings are ``objective.clip_low``, ``clip_high`` and ``dual_clip``, by default those of the AR/Lopti authors.
    DAPO's clip-higher (arXiv 2503.14476) is 0.2 / 0.28 without dual clip.
    """

    clip_low: float = 0.20
    clip_high: float = 0.24
    dual_clip: float | None = 10.0

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The clipped value."""
        return clipped(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high, self.dual_clip)

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        """Where the clip removes the gradient."""
        return _outside(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Cispo(Surrogate):
    """``sg[clip(r, low, high)]·A·log π``: the ratio is a bounded weight, and no token loses its gradient.

    Paper: MiniMax-M1, arXiv 2506.13585. ``low`` and ``high`` bound the ratio itself. The default is TRL's, above only,
    at 5.0; verl's clip of 0.2 is ``cispo(low=0.8, high=1.2)``. **Ours:** the value is ``clip(r)·A·π/sg[π]``, which has
    the same gradient, and compares with the other surrogates'. ``cispo(high=None)`` has the gradient of r·A.
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
        return log_ratio.detach().exp().clamp(self.low, _limit(self.high)) * parts.advantages * _one(log_ratio)

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        """Where the ratio is out of bounds; these tokens keep a gradient."""
        ratio = parts.log_ratio(logp).exp()
        return ratio < self.low, ratio > _limit(self.high)


@dataclass(frozen=True)
class Gspo(Surrogate):
    """The clip with the ratio of the whole response, ``s = exp(mean log r)``: a response is clipped as one.

    Paper: arXiv 2507.18071, bounds 3e-4 / 4e-4 (distances from 1) and the mean over sequences from the authors. The
    gradient goes through ``sg[s]·π/sg[π]``, as in verl, so that token weights have a meaning. s is over all response
    tokens, whatever their weight. ``sequence_mean=False`` keeps ``objective.aggregation``.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    sequence_mean: bool = True
    surveyed = True

    def __post_init__(self) -> None:
        check_range("gspo", "clip_low", self.clip_low, 0.0, 1.0)
        check_range("gspo", "clip_high", self.clip_high, 0.0)
        _check_switch("gspo", "sequence_mean", self.sequence_mean)

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
        return _outside(parts.sequence, parts.advantages, self.clip_low, self.clip_high)

    @property
    def aggregation(self) -> str | None:
        """The mean over sequences."""
        return SEQUENCE_MEAN if self.sequence_mean else None


@dataclass(frozen=True)
class Sapo(Surrogate):
    """``A·(4/τ)·σ(τ(r − 1))``: a gate that closes softly instead of a clip.

    Paper: arXiv 2511.20347; τ = 1.0 for A > 0 (``positive``) and 1.05 otherwise (``negative``), mean over sequences, as
    in verl. As τ goes to 0 the gradient becomes that of r·A. ``sequence_mean=False`` keeps ``objective.aggregation``.
    """

    positive: float = 1.0
    negative: float = 1.05
    sequence_mean: bool = True

    def __post_init__(self) -> None:
        check_range("sapo", "positive", self.positive, 1e-6)
        check_range("sapo", "negative", self.negative, 1e-6)
        _check_switch("sapo", "sequence_mean", self.sequence_mean)

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The gate times the advantage."""
        tau = torch.full_like(parts.advantages, self.negative).masked_fill_(parts.advantages > 0, self.positive)
        return parts.advantages * (4 / tau) * torch.sigmoid(tau * torch.expm1(parts.log_ratio(logp)))

    @property
    def aggregation(self) -> str | None:
        """The mean over sequences."""
        return SEQUENCE_MEAN if self.sequence_mean else None


@dataclass(frozen=True)
class Dppo(Surrogate):
    """DPPO-TV: ``r·A``; a token is dropped where ``π − π_old > δ`` and A > 0, or ``π − π_old < −δ`` and A < 0.

    Paper: arXiv 2602.04879: what counts is by how much a probability changes, not by which factor. The default is
    verl's: δ = 0.15, the ratio capped at 20 as a weight, ``sg[min(r, cap)]·A·log π``. prime-rl's default loss is
    ``dppo(delta=0.2, cap=None, square=1e-3)``: it adds ``square·(log r)²`` to the loss of every token, dropped or not.
    **Ours:** a token without advantage has no such term. ``dppo(delta=1, cap=None)`` is r·A exactly.
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
        """The ratio times the advantage where the token is kept, less the square."""
        log_ratio = parts.log_ratio(logp)
        low, high = self._dropped(log_ratio.detach(), parts)
        ratio = log_ratio.detach().exp().clamp(max=_limit(self.cap)) * _one(log_ratio)
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
        return Survey(chosen=_largest(cov, advantages != 0, count, batch, logp.dtype))

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The ratio times the advantage, less the distance of the chosen."""
        assert parts.chosen is not None
        log_ratio = parts.log_ratio(logp)
        return log_ratio.exp() * parts.advantages - self.coef * parts.chosen * log_ratio.abs()


@dataclass(frozen=True)
class LpReg(Surrogate):
    """The least probable tokens with A < 0 are drawn to the old policy without its noise, so that they survive.

    Paper: arXiv 2510.03222; defaults and order of the choice from the authors' code: the lowest 1 % (``share``) by
    log π of the tokens with A < 0, and of these the ones below their probability under the old policy filtered by
    ``min_p`` (words less likely than 0.02 times the likeliest are left out, the rest renormalised). They add ``coef``
    times k3 to the loss. The rest is a clip with ratio bounds 0 and 10 (``clip_low`` 1, ``clip_high`` 9). **Ours:**
    chosen over the mini-batch; the share is rounded down (the authors choose none where that makes one).
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
        chosen = _largest(-logp[batch.mask], negative, count, batch, logp.dtype) * (logp < target)
        return Survey(chosen=chosen, target=torch.where(chosen > 0, target, 0.0))

    def value(self, logp: Tensor, parts: Terms) -> Tensor:
        """The clipped value, less the distance of the chosen from their target."""
        assert parts.chosen is not None
        assert parts.target is not None
        value = clipped(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high, None)
        gap = torch.where(parts.chosen > 0, logp - parts.target, 0.0)
        return value - self.coef * parts.chosen * k3(gap)

    def held(self, logp: Tensor, parts: Terms) -> tuple[Tensor, Tensor]:
        """Where the clip removes the gradient."""
        return _outside(parts.log_ratio(logp), parts.advantages, self.clip_low, self.clip_high)


def _largest(values: Tensor, allowed: Tensor, count: int, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
    """(B, T): 1 at the ``count`` largest allowed ``values`` of the response tokens, in row order; else 0."""
    count = min(count, int(allowed.sum()))
    places = torch.where(allowed, values, -torch.inf).topk(count).indices
    selected = torch.zeros_like(values, dtype=dtype).index_fill_(0, places, 1.0)
    return torch.zeros(batch.mask.shape, dtype=dtype, device=values.device).masked_scatter_(batch.mask, selected)


TABLE: dict[str, type[Surrogate]] = {
    "clip": Clip,
    "cispo": Cispo,
    "gspo": Gspo,
    "sapo": Sapo,
    "dppo": Dppo,
    "kl-cov": KlCov,
    "lp-reg": LpReg,
}


def parse(text: str) -> Surrogate:
    """Build a surrogate from its text form: ``"gspo"``, ``"dppo(delta=0.2)"``. Values are Python literals."""
    name, args, settings = read_call(text)
    if name not in TABLE:
        raise ValueError(unknown("surrogate", name, TABLE))
    if args:
        raise ValueError(f"surrogate {name}: name the settings, {name}(setting=value)")
    if name == "clip" and settings:
        raise ValueError("surrogate clip: its settings are clip_low, clip_high and dual_clip of the objective")
    allowed = list(signature(TABLE[name]).parameters)
    for key in settings:
        if key not in allowed:
            raise ValueError(unknown(f"setting of surrogate {name}", key, allowed))
    return TABLE[name](**settings)
