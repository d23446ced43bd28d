"""What a regulator will ask of a framework, found out before anything is trained: it is run on a made-up batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poise.batch import Phase, TokenBatch
from poise.regulators import Compose, Regulator
from poise.regulators.base import SCOPES

ALL, PART, WEIGHTED = "all", "part", "weighted"


class CannotRegulateError(ValueError):
    """The framework, as it is set up, cannot do what the regulator asks for."""


@dataclass(frozen=True)
class Demands:
    """How many phases a regulator has, and what becomes of the policy and KL terms in them."""

    phases: tuple[str, ...]  # their names
    plain: bool  # every policy weight is 1: nothing is regulated
    kl: str  # the KL and entropy terms: ALL of them in every phase, a PART by a mask, or WEIGHTED in some other way

    @property
    def split(self) -> bool:
        """Several phases that divide the KL and entropy terms between them."""
        return len(self.phases) > 1 and self.kl != ALL


def demands(phases: Sequence[Phase], batch: TokenBatch) -> Demands:
    """What these phases ask for."""
    mask = batch.mask
    kinds = {_kl_kind(phase.policy[mask], phase.kl[mask]) for phase in phases}
    worst = next(kind for kind in (WEIGHTED, PART, ALL) if kind in kinds)
    plain = all(bool((phase.policy[mask] == 1).all()) for phase in phases)
    return Demands(tuple(phase.name for phase in phases), plain, worst)


def probe(regulator: Regulator) -> Demands:
    """The same for a batch that holds every field, probabilities from near 0 to 1, and both signs of the advantage."""
    try:
        batch = _made_up()
        return demands(regulator(batch), batch)
    except Exception as error:
        error.add_note("This came up while the regulator was tried on a small made-up batch, before training.")
        raise


def beyond(regulator: Regulator, scope: str) -> Regulator | None:
    """The first part of a composition that looks further than ``scope``."""
    parts = regulator.parts if isinstance(regulator, Compose) else (regulator,)
    return next((part for part in parts if SCOPES.index(part.scope) > SCOPES.index(scope)), None)


def _kl_kind(policy: torch.Tensor, kl: torch.Tensor) -> str:
    if bool((kl == 1).all()):
        return ALL
    # A mask on the loss takes the policy term away too, so it can serve only where that is 0 anyway.
    is_mask = bool(((kl == 1) | (kl == 0)).all()) and bool((policy[kl == 0] == 0).all())
    return PART if is_mask else WEIGHTED


def _made_up(groups: int = 2, group: int = 4, length: int = 16, width: int = 4, vocabulary: int = 11) -> TokenBatch:
    rows = groups * group
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
        entropy=torch.rand(rows, length, generator=generator),
        hidden=torch.randn(rows, length, width, generator=generator),
        head=torch.randn(vocabulary, width, generator=generator),
        targets=torch.randint(vocabulary, (rows, length), generator=generator),
    )
