"""The settings of the objective (``poise.objective.Settings``), in a separate file so that reading them needs no
torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from poise._lib.errors import check_choice, check_range

if TYPE_CHECKING:
    from poise.surrogates import Surrogate

TOKEN_MEAN, SEQUENCE_MEAN, FIXED_LENGTH = "token-mean", "seq-mean-token-mean", "fixed-length"
AGGREGATIONS = (TOKEN_MEAN, SEQUENCE_MEAN, "seq-mean-token-sum", FIXED_LENGTH)
KL_ESTIMATORS = ("k1", "k2", "k3")
ADVANTAGE = "group-zscore"  # the default of ``advantage``; the other names are in ``poise.advantages``


@dataclass(frozen=True)
class Settings:
    """Settings of the objective. Clips follow the AR/Lopti authors; their K&K runs add ``kl_coef=0.001``."""

    clip_low: float = 0.20
    """A token with A < 0 has no policy gradient below the ratio 1 − clip_low (only with the surrogate clip)."""
    clip_high: float = 0.24
    """A token with A > 0 has no policy gradient above the ratio 1 + clip_high (only with the surrogate clip)."""
    dual_clip: float | None = 10.0
    """Bounds the loss of a token with A < 0 at dual_clip·|A| (only with the surrogate clip); null: unbounded."""
    kl: str = "k3"
    """Estimator of the KL term: k1, k2 or k3."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the starting model; 0: no KL term and no reference model."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: str = TOKEN_MEAN
    """How tokens are averaged: token-mean, seq-mean-token-mean, seq-mean-token-sum or fixed-length."""
    max_length: int | None = None
    """For fixed-length (Dr. GRPO): the constant divisor of every response's sum."""
    importance_cap: float | None = 2.0
    """Upper bound of the importance weight (old / sampler probability), used if the batch has sampler_logp; null: no
    correction."""
    surrogate: object = "clip"
    """The policy term: clip, cispo, gspo, sapo, dppo, kl-cov or lp-reg, with settings as in dppo(delta=0.2), or your
    own, file.py:Class; in Python also a ``Surrogate``."""

    def __post_init__(self) -> None:
        check_range("objective", "clip_low", self.clip_low, 0.0, 1.0)
        check_range("objective", "clip_high", self.clip_high, 0.0)
        if self.dual_clip is not None:
            check_range("objective", "dual_clip", self.dual_clip, 1.001)  # at 1 it would equal the unclipped term
        check_choice("objective", "kl", self.kl, KL_ESTIMATORS)
        check_range("objective", "kl_coef", self.kl_coef, 0.0)
        check_range("objective", "entropy_coef", self.entropy_coef)
        check_choice("objective", "aggregation", self.aggregation, AGGREGATIONS)
        if self.aggregation == FIXED_LENGTH and self.max_length is None:
            raise ValueError(f"objective: aggregation {FIXED_LENGTH!r} needs max_length, the longest response allowed")
        if self.max_length is not None and (not isinstance(self.max_length, int) or self.max_length < 1):
            raise ValueError(f"objective: max_length must be a whole number above 0, got {self.max_length!r}")
        if self.importance_cap is not None:
            check_range("objective", "importance_cap", self.importance_cap, 1e-6)
        if self.aggregation not in (self.averages_by, Settings.aggregation):
            raise ValueError(
                f"objective: surrogate {self.surrogate!r} averages by {self.averages_by}, but aggregation is "
                f"{self.aggregation!r}: remove one of the two settings, or keep the aggregation by setting "
                "sequence_mean=False in the surrogate"
            )

    @cached_property
    def rule(self) -> Surrogate:
        """The surrogate itself."""
        from poise.surrogates import Clip, Surrogate, parse

        if self.surrogate == "clip":
            return Clip(self.clip_low, self.clip_high, self.dual_clip)
        return self.surrogate if isinstance(self.surrogate, Surrogate) else parse(str(self.surrogate))

    @cached_property
    def averages_by(self) -> str:
        """The aggregation in effect: the one that the surrogate requires, or else the setting."""
        if self.surrogate == "clip":  # clip requires none, and must not import torch here
            return self.aggregation
        return self.rule.aggregation or self.aggregation

    @property
    def min_p(self) -> float | None:
        """The min-p filter behind ``TokenBatch.min_p_logp`` if the surrogate reads that field; else None."""
        from poise.surrogates import LpReg

        return self.rule.min_p if isinstance(self.rule, LpReg) else None
