"""Determines before training what a regulator needs from a framework, by running it on an example batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poise.batch import Phase, TokenBatch
from poise.regulators import Regulator
from poise.regulators.base import SCOPES, parts_of

ALL, PART, WEIGHTED = "all", "part", "weighted"


class CannotRegulateError(ValueError):
    """The framework, with these settings, cannot do what the regulator needs."""


@dataclass(frozen=True)
class Demands:
    """The phases of a regulator, and what they do to the policy, KL and entropy terms."""

    phases: tuple[str, ...]  # names
    plain: bool  # every policy weight is 1: no regulation
    kl: str  # KL and entropy terms: ALL in every phase, a PART selected by a mask, or WEIGHTED otherwise

    @property
    def split(self) -> bool:
        """Whether the KL and entropy terms are divided among several phases."""
        return len(self.phases) > 1 and self.kl != ALL


def demands(phases: Sequence[Phase], batch: TokenBatch) -> Demands:
    """Return the demands of these phases of a batch."""
    mask = batch.mask
    kinds = {_kl_kind(phase.policy[mask], phase.kl[mask]) for phase in phases}
    worst = next(kind for kind in (WEIGHTED, PART, ALL) if kind in kinds)
    plain = all(bool((phase.policy[mask] == 1).all()) for phase in phases)
    return Demands(tuple(phase.name for phase in phases), plain, worst)


def probe(regulator: Regulator) -> Demands:
    """Return the regulator's demands on an example batch with every field, many probabilities, and advantages ±1."""
    try:
        batch = _example_batch()
        phases = regulator(batch)
        if not any(bool(phase.policy[batch.mask].any()) for phase in phases):
            raise CannotRegulateError("the regulator gives every token the weight 0, so nothing would be learned")
        return demands(phases, batch)
    except Exception as error:
        error.add_note("This happened when poise tried the regulator on a small example batch, before training.")
        raise


def part_beyond(regulator: Regulator, scope: str) -> Regulator | None:
    """The first part of a composition that reads more than ``scope`` (token, group, batch); None if no part does."""
    return next((part for part in parts_of(regulator) if SCOPES.index(part.scope) > SCOPES.index(scope)), None)


def _kl_kind(policy: torch.Tensor, kl: torch.Tensor) -> str:
    if bool((kl == 1).all()):
        return ALL
    # A mask on the loss also removes the policy term, so it works only where the policy weight is 0.
    is_mask = bool(((kl == 1) | (kl == 0)).all()) and bool((policy[kl == 0] == 0).all())
    return PART if is_mask else WEIGHTED


def _example_batch() -> TokenBatch:
    rows, group, length, width, vocabulary = 8, 4, 16, 4, 11
    generator = torch.Generator().manual_seed(0)
    prob = torch.linspace(1e-4, 1.0, rows * length)[torch.randperm(rows * length, generator=generator)]
    correct = torch.arange(rows) % 2 == 0
    logp = prob.view(rows, length).log()
    return TokenBatch(
        old_logp=logp,
        mask=torch.ones(rows, length, dtype=torch.bool),
        advantages=torch.where(correct, 1.0, -1.0),
        groups=torch.arange(rows) // group,
        rewards=correct.float(),
        correct=correct,
        ref_logp=logp,
        sampler_logp=logp,
        entropy=0.02 * torch.rand(rows, length, generator=generator),  # low, because STARE does nothing at high entropy
        hidden=torch.randn(rows, length, width, generator=generator),
        head=torch.randn(vocabulary, width, generator=generator),
        targets=torch.randint(vocabulary, (rows, length), generator=generator),
    )
