"""The ``Regulator`` base class, composition, and random draws that a resumed run repeats."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import prod
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from poise._lib.errors import short, unknown
from poise._lib.user_code import F, mark
from poise.batch import Phase, TokenBatch

V = TypeVar("V")
MOST_PHASES = 100  # per regulator: each phase is a whole pass of the update and holds weights for every token
QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
STATES = frozenset({"hidden", "head", "targets"})  # the fields that only ``scores`` reads
SCOPES = ("token", "group", "batch")  # what a weight may read; some frameworks pass only one token or one group
_FIELD_HELP = {
    "groups": "(B,) integers, the same for responses to the same prompt",
    "correct": "(B,) bool, the verifier's verdict",
    "entropy": "(B, T) entropy of the old policy",
    "hidden": "(B, T, d) last hidden states of the old policy, or a function of row indices",
    "head": "the (V, d) output weight, a poise.Head, or a callable hidden -> logits",
    "targets": "(B, T) sampled token ids",
}


class Regulator(ABC):
    """Weights each token's contribution to the update: maps a rollout batch to phases, once per batch.

    To write a regulator, subclass this as a frozen dataclass, list in ``needs`` the optional fields of ``TokenBatch``
    that the regulator reads, and implement ``phases`` with ``Phase.of``, which applies mask and dtype. ``scope`` says
    what a token's weight depends on: that token alone, the responses of its group, or the whole batch. In a composition
    every regulator reads the raw batch, not the output of the previous regulator.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "batch"  # one of SCOPES

    @property
    def phase_count(self) -> int:
        """The number of phases, or a lower bound if it depends on the batch."""
        return 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.needs:
            if name not in TokenBatch.__dataclass_fields__:
                raise TypeError(f"{cls.__name__}.needs: " + unknown("field", name, TokenBatch.__dataclass_fields__))
        if cls.scope not in SCOPES:
            raise TypeError(f"{cls.__name__}.scope: " + unknown("scope", str(cls.scope), SCOPES))

    @property
    def _title(self) -> str:
        """The regulator's name in messages."""
        return type(self).__name__

    @abstractmethod
    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Return the phases of the update, in order. Called without gradients."""

    def __call__(self, batch: TokenBatch) -> list[Phase]:
        """Check the fields that the regulator needs, run it without gradients, and check its phases."""
        for name in sorted(self.needs):
            if getattr(batch, name) is None:
                help_text = f" ({_FIELD_HELP[name]})" if name in _FIELD_HELP else ""
                raise ValueError(f"{self._title} needs TokenBatch.{name}{help_text}, which this batch lacks")
        with torch.no_grad():
            given: Any = self.phases(batch)  # user code may return a generator, or a wrong type
            several = isinstance(given, Iterable) and not isinstance(given, Tensor)
            phases = list(given) if several else [given]
            for phase in phases:
                if not isinstance(phase, Phase):
                    got = type(phase).__name__
                    raise TypeError(
                        f"{self._title} must return a list of poise.Phase, got {got}: return [poise.Phase.of(batch, "
                        "weights)]"
                    )
                phase.check(batch)
        names = [phase.name for phase in phases]
        if not phases or len(set(names)) < len(names):
            raise ValueError(f"{self._title} must return phases with distinct names, got {names}")
        return phases

    def __or__(self, other: Callable[[TokenBatch], list[Phase]]) -> Regulator:
        return Compose((self, as_regulator(other)))

    def __ror__(self, other: Callable[[TokenBatch], list[Phase]]) -> Regulator:
        return Compose((as_regulator(other), self))


class Follower(Regulator):
    """A control that can imitate another method: ``like`` is that method's text form."""

    like: str
    followed: ClassVar[Regulator | None] = None  # the method in ``like``

    def _follow(self, name: str, defaults: Mapping[str, Any]) -> None:
        """If ``like`` is set, parse it into ``followed``; the settings in ``defaults`` must then not be set too."""
        if not self.like:
            return
        from poise.regulators import parse, text

        if given := [key for key, default in defaults.items() if getattr(self, key) != default]:
            raise ValueError(f"{name}: {given[0]} and like are both set: remove one of them")
        followed = parse(self.like)
        for key, value in {"followed": followed, "needs": followed.needs, "scope": "batch"}.items():
            object.__setattr__(self, key, value)
        object.__setattr__(self, "like", text(followed))


@dataclass(frozen=True)
class Compose(Regulator):
    """``a | b``: every phase of ``a`` with every phase of ``b``, weights multiplied."""

    parts: tuple[Regulator, ...]

    def __post_init__(self) -> None:
        flat = [p for part in self.parts for p in parts_of(part)]
        object.__setattr__(self, "parts", tuple(flat))
        object.__setattr__(self, "needs", frozenset[str]().union(*(part.needs for part in flat)))
        object.__setattr__(self, "scope", max((part.scope for part in flat), key=SCOPES.index, default="token"))
        if not flat:
            raise ValueError("a composition needs at least one regulator")
        self._check_count(self.phase_count)

    @property
    def phase_count(self) -> int:
        """The product of the parts' phase counts."""
        return prod(part.phase_count for part in self.parts)

    def _check_count(self, count: int) -> None:
        if count > MOST_PHASES:
            raise ValueError(
                f"{len(self.parts)} regulators make {short(count)} phases together, each a whole pass of the update: "
                f"at most {MOST_PHASES} are allowed"
            )

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Every combination of the parts' phases; the first part varies slowest."""
        phases = self.parts[0](batch)
        for part in self.parts[1:]:
            right = part(batch)
            self._check_count(len(phases) * len(right))
            phases = [_product(a, b) for a in phases for b in right]
        return phases


def parts_of(regulator: Regulator) -> tuple[Regulator, ...]:
    """The parts of a composition. Any other regulator is its only part."""
    return regulator.parts if isinstance(regulator, Compose) else (regulator,)


def _product(a: Phase, b: Phase) -> Phase:
    name = "/".join(n for n in (a.name, b.name) if n != "all") or "all"
    metrics, tokens = _both(a.metrics, b.metrics), _both(a.tokens, b.tokens)
    return Phase(name, a.policy * b.policy, a.kl * b.kl, metrics, tokens)


def _both(a: Mapping[str, V], b: Mapping[str, V]) -> dict[str, V]:
    """Merge two mappings. A name in ``b`` that ``a`` already has gets a number: ``chosen_share_2``."""
    joined = dict(a)
    for name, value in b.items():
        names = (name if n == 1 else f"{name}_{n}" for n in count(1))
        joined[next(free for free in names if free not in joined)] = value
    return joined


@dataclass(frozen=True)
class Function(Regulator):
    """Wraps a callable that maps a batch to phases. Uses the callable's ``needs`` and ``scope``, if it has them."""

    function: Callable[..., Sequence[Phase]]
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a regulator is a callable from TokenBatch to phases, got {short(self.function)}")
        object.__setattr__(self, "needs", frozenset(getattr(self.function, "needs", ())))
        object.__setattr__(self, "scope", getattr(self.function, "scope", "batch"))

    @property
    def _title(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """The phases that the callable returns."""
        return self.function(batch, **dict(self.settings))  # type: ignore[return-value] # ``__call__`` checks it


def as_regulator(value: Callable[[TokenBatch], Sequence[Phase]]) -> Regulator:
    """Return a regulator unchanged; wrap any other callable in ``Function``."""
    return value if isinstance(value, Regulator) else Function(value)


def regulator(function: F) -> F:
    """Mark a function from a batch to phases, or a class of such callables, so that settings can name it.

    >>> @poise.regulator
    ... def half(batch, weight=0.5):
    ...     return [Phase.of(batch, weight)]

    Then ``regulator="mymodule.half(weight=0.3)"`` loads it. Subclasses of ``Regulator`` need no mark.
    """
    return mark("regulator", function)


def random_order(batch: TokenBatch, count: int, seed: int, salt: str) -> Tensor:
    """A random permutation of ``range(count)``, determined by the seed, ``salt`` and the batch's log-probabilities.

    Because of the log-probabilities, every step draws new random numbers from the same seed. The bits of the
    log-probabilities are summed as integers, so the result depends neither on padding nor on the device. With different
    values of ``salt``, two methods with the same seed draw different permutations.
    """
    bits = batch.old_logp[batch.mask].double().view(torch.int64).sum().item()
    digest = hashlib.blake2b(f"{salt}/{seed}/{bits}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).to(batch.mask.device)


def scatter(batch: TokenBatch, tokens: Tensor) -> Tensor:
    """(B, T) bool: True at ``tokens``, indices into the response tokens in row order."""
    selected = torch.zeros(int(batch.mask.sum()), dtype=torch.bool, device=batch.mask.device)
    selected[tokens] = True
    return torch.zeros_like(batch.mask).masked_scatter_(batch.mask, selected)


def summary(phases: Sequence[Phase], batch: TokenBatch, intervals: Sequence[float] = QUARTILES) -> dict[str, float]:
    """The ``reg/…`` metrics of any regulator's phases. Per phase, over all response tokens of the batch:

    - ``weight_mean``, ``kl_weight_mean``;
    - ``zero_share``: share of the tokens whose policy weight is 0;
    - ``effective_tokens``: ``(Σw)² / Σw²``, the effective sample size;
    - ``weight_p0.25-0.50`` and so on: the mean weight by interval of token probability; the last interval is
      closed, and an interval without tokens has no metric;
    - the regulator's own metrics, such as NTHR's ``flagged_share``.

    Over all phases, ``reg/pull_p0.25-0.50`` and so on: the interval's share of ``Σ w·|A|·(1 − p)``, the size of
    the gradient at the sampled tokens' logits.
    """
    prob = batch.prob[batch.mask]
    pull = torch.stack([phase.policy[batch.mask] for phase in phases]).sum(0)
    pull = pull * batch.token_advantages[batch.mask].abs() * (1 - prob)
    names: list[str] = []
    values: list[torch.Tensor] = []
    members = []
    for low, high in pairwise(intervals):
        top = prob <= high if high == intervals[-1] else prob < high
        members.append((f"weight_p{low:.2f}-{high:.2f}", (prob >= low) & top))
    names += [f"reg/pull_{name.removeprefix('weight_')}" for name, _ in members]
    values += [((pull * inside).sum() / pull.sum()).double() for _, inside in members]
    for phase in phases:
        weight, kl = phase.policy[batch.mask], phase.kl[batch.mask]
        total = max(len(weight), 1)
        statistics = {
            "weight_mean": weight.sum() / total,
            "kl_weight_mean": kl.sum() / total,
            "zero_share": (weight == 0).sum() / total,
            "effective_tokens": weight.sum().square() / weight.square().sum().clamp(min=torch.finfo(weight.dtype).tiny),
        }
        statistics |= {name: (weight * inside).sum() / inside.sum() for name, inside in members}
        names += [f"reg/{phase.name}/{name}" for name in statistics]
        values += [value.double() for value in statistics.values()]
    numbers = dict(zip(names, torch.stack(values).tolist(), strict=True))
    reported = {f"reg/{phase.name}/{name}": value for phase in phases for name, value in phase.metrics.items()}
    return {name: value for name, value in numbers.items() if value == value} | reported


class Scorer(Regulator):
    """A regulator in two steps: ``scores`` reads hidden states, ``weigh`` needs the whole batch.

    A framework that splits a batch among workers (verl) calls ``scores`` on each worker, with whole groups, and sends
    one number per token to the process that has the batch. In other frameworks ``phases`` runs both steps. ``weigh``
    must not read hidden, head or targets.
    """

    @abstractmethod
    def scores(self, batch: TokenBatch) -> Tensor:
        """Return (B, T) scores; NaN for a token without a score. A score depends only on the token's group."""

    @abstractmethod
    def weigh(self, batch: TokenBatch, scores: Tensor) -> list[Phase]:
        """Return the phases for these scores. Tokens of a group whose scores are all NaN must keep weight 1."""

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Run both steps."""
        return self.weigh(batch, self.scores(batch))


@dataclass(frozen=True, eq=False)
class Scored(Regulator):
    """A ``Scorer`` whose scores of this batch have already been computed."""

    scorer: Scorer
    scores: Tensor | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", self.scorer.needs - STATES)
        object.__setattr__(self, "scope", self.scorer.scope)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """The scorer's phases."""
        assert self.scores is not None
        return self.scorer.weigh(batch, self.scores)


def scorers(regulator: Regulator) -> list[Scorer]:
    """The parts of a regulator that score tokens, in order."""
    return [part for part in parts_of(regulator) if isinstance(part, Scorer)]


def with_scores(regulator: Regulator, scores: Sequence[Tensor | None]) -> Regulator:
    """Replace each scorer by its entry of ``scores``, so that the resulting regulator needs no hidden states."""
    given = iter(scores)
    parts = [Scored(part, next(given)) if isinstance(part, Scorer) else part for part in parts_of(regulator)]
    return parts[0] if len(parts) == 1 else Compose(tuple(parts))
