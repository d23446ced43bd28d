"""What a regulator is, and how two of them compose."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from poise._lib.errors import short, unknown
from poise._lib.user_code import F, mark
from poise.batch import Phase, TokenBatch

MOST_PHASES = 100  # of one regulator: each is a whole pass of the update, with weights for every token
_WHAT = {
    "groups": "(B,) integers, the same for responses to the same prompt",
    "correct": "(B,) bool, the verifier's verdict",
    "entropy": "(B, T) entropy of the old policy",
    "hidden": "(B, T, d) last hidden states of the old policy, or a function of row indices",
    "head": "the (V, d) output weight, a poise.Head, or a callable hidden -> logits",
    "targets": "(B, T) sampled token ids",
}


SCOPES = ("token", "group", "batch")  # how far a regulator looks to weight a token; a framework may show it no more


class Regulator(ABC):
    """Decides, once per rollout batch, how much each token may pull in the update: a batch in, phases out.

    To write one, subclass this as a frozen dataclass, list in ``needs`` the optional fields of ``TokenBatch`` that it
    reads, and implement ``phases`` with ``Phase.of``, which takes care of mask and dtype. ``scope`` says how far it
    looks: at the token alone, at the responses of its group, or at the whole batch. In a composition every regulator
    reads the raw batch, not what the one before it made.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "batch"  # one of SCOPES

    @property
    def phase_count(self) -> int:
        """How many phases it returns, where that is known before it is called: at least so many."""
        return 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.needs:
            if name not in TokenBatch.__dataclass_fields__:
                raise TypeError(f"{cls.__name__}.needs: " + unknown("field", name, TokenBatch.__dataclass_fields__))
        if cls.scope not in SCOPES:
            raise TypeError(f"{cls.__name__}.scope: " + unknown("scope", str(cls.scope), SCOPES))

    @abstractmethod
    def phases(self, batch: TokenBatch) -> list[Phase]:
        """The phases of the update, in order. Runs without gradients."""

    def __call__(self, batch: TokenBatch) -> list[Phase]:
        """Check what the regulator needs, run it, and check what it made."""
        for name in sorted(self.needs):
            if getattr(batch, name) is None:
                what = f" ({_WHAT[name]})" if name in _WHAT else ""
                raise ValueError(f"{type(self).__name__} needs TokenBatch.{name}{what}, which this batch lacks")
        with torch.no_grad():
            phases = self.phases(batch)
            phases = list(phases) if isinstance(phases, Iterable) else [phases]  # they may be yielded
            for phase in phases:
                if not isinstance(phase, Phase):
                    got = type(phase).__name__
                    raise TypeError(f"{type(self).__name__} must return a list of poise.Phase, got {got}: use Phase.of")
                phase.check(batch)
        names = [phase.name for phase in phases]
        if not phases or len(set(names)) < len(names):
            raise ValueError(f"{type(self).__name__} must return phases with names of their own, got {names}")
        return phases

    def __or__(self, other: Callable[[TokenBatch], list[Phase]]) -> Regulator:
        return Compose((self, as_regulator(other)))

    def __ror__(self, other: Callable[[TokenBatch], list[Phase]]) -> Regulator:
        return Compose((as_regulator(other), self))


@dataclass(frozen=True)
class Compose(Regulator):
    """``a | b``: the phases of ``a`` split by those of ``b``, weights multiplied."""

    parts: tuple[Regulator, ...]

    def __post_init__(self) -> None:
        flat = [p for part in self.parts for p in (part.parts if isinstance(part, Compose) else (part,))]
        object.__setattr__(self, "parts", tuple(flat))
        object.__setattr__(self, "needs", frozenset[str]().union(*(part.needs for part in flat)))
        object.__setattr__(self, "scope", max((part.scope for part in flat), key=SCOPES.index, default="token"))
        if not flat:
            raise ValueError("a composition needs at least one regulator")
        self._check(self.phase_count)

    @property
    def phase_count(self) -> int:
        """The phases of all parts, multiplied out."""
        return prod(part.phase_count for part in self.parts)

    def _check(self, count: int) -> None:
        if count > MOST_PHASES:
            raise ValueError(
                f"{len(self.parts)} regulators make {short(count)} phases together, each a whole pass of the update: "
                f"at most {MOST_PHASES} are allowed"
            )

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Every combination of the parts' phases; the first part varies slowest."""
        made = self.parts[0](batch)
        for part in self.parts[1:]:
            right = part(batch)
            self._check(len(made) * len(right))
            made = [_product(a, b) for a in made for b in right]
        return made


def _product(a: Phase, b: Phase) -> Phase:
    name = "/".join(n for n in (a.name, b.name) if n != "all") or "all"
    return Phase(name, a.policy * b.policy, a.kl * b.kl, {**a.metrics, **b.metrics}, {**a.tokens, **b.tokens})


@dataclass(frozen=True)
class Function(Regulator):
    """Any callable from a batch to phases, as a regulator; ``needs`` and ``scope`` are read off it, if it has them."""

    function: Callable[..., Sequence[Phase]]
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a regulator is a callable from TokenBatch to phases, got {short(self.function)}")
        object.__setattr__(self, "needs", frozenset(getattr(self.function, "needs", ())))
        object.__setattr__(self, "scope", getattr(self.function, "scope", "batch"))

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """What the callable returns."""
        return list(self.function(batch, **dict(self.settings)))


def as_regulator(value: Callable[[TokenBatch], Sequence[Phase]]) -> Regulator:
    """A regulator as it is; any other callable wrapped as one."""
    if isinstance(value, Regulator):
        return value
    if not callable(value):
        raise TypeError(f"a regulator is a callable from TokenBatch to phases, got {value!r}")
    return Function(value)


def regulator(function: F) -> F:
    """Mark a function from a batch to phases, or a class of such callables, so that settings may name it.

    >>> @poise.regulator
    ... def half(batch, weight=0.5):
    ...     return [Phase.of(batch, weight)]

    Then ``regulator="mymodule.half(weight=0.3)"`` finds it. Subclasses of ``Regulator`` need no mark.
    """
    return mark("regulator", function)


def random_order(batch: TokenBatch, count: int, seed: int, salt: str) -> Tensor:
    """A random permutation of ``count``: fixed by the seed, the batch's log-probabilities, and who asks (``salt``).

    The batch takes part so that the same seed draws anew at every step; its bits are summed as integers, so that
    neither padding nor the device matters. ``salt`` keeps two methods with the same seed from drawing the same.
    """
    bits = batch.old_logp[batch.mask].double().view(torch.int64).sum().item()
    digest = hashlib.blake2b(f"{salt}/{seed}/{bits}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).to(batch.mask.device)


def scatter(batch: TokenBatch, chosen: Tensor) -> Tensor:
    """(B, T) bool: the chosen ones among the response tokens, which are numbered in row order."""
    picked = torch.zeros(int(batch.mask.sum()), dtype=torch.bool, device=batch.mask.device)
    picked[chosen] = True
    return torch.zeros_like(batch.mask).masked_scatter_(batch.mask, picked)
