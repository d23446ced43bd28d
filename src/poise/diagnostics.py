"""Diagnostics of an update: which tokens drive it, and how it changes the likelihood of correct responses.

``dominance`` repeats the analyses of arXiv 2505.12929 (its first figures) and 2505.18830 for any loop and any
regulators. It measures a gradient by a backward pass over all parameters with the tokens of one interval only, and an
effect by a real optimizer step, which it then undoes.

For each regulator, with K intervals:

- ``norm`` (K,): ‖g_i‖, where g_i is the gradient from interval i alone. The loss divides by the count of all tokens, so
  the g_i add up to the gradient g of all tokens; ``full`` is ‖g‖, ``residual`` is ‖Σ g_i − g‖ / ‖g‖, rounding only.
- ``per_token`` (K,): ‖g_i‖ divided by the interval's share of the tokens, to compare rare and frequent tokens.
- ``share`` (K,): ⟨g_i, g⟩ / ‖g‖², interval i's share of the full gradient. Shares add up to 1; one can be negative.
- ``cosine`` (K, K): between the gradients of two intervals.
- ``influence``: K + 1 effects. Effect i is the effect of a step on only interval i; the last one is the effect of the
  regulator's update with all phases. Each has, over the tokens of each interval, the mean of |Δp| (``moved``), of
  |Δ log p| (``moved_log``), and of Δp where the advantage is positive (``rewarded``) or negative (``punished``).
- ``displacement``: the change of the correct responses' log-likelihood.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from poise.batch import Phase, TokenBatch
from poise.lm_head import HeadLike, as_head
from poise.objective import Settings, active, normalizer, policy_loss, survey
from poise.regulators.base import Regulator

__all__ = ["ForwardLoop", "Intervals", "Loop", "dominance", "gradient_sizes", "token_gradient_sizes"]


# Dominance: gradients and steps by interval of the tokens' probability


@dataclass(frozen=True)
class Intervals:
    """Intervals of [0, 1], by default four equal ones. Each includes its lower end; the last also its upper end."""

    edges: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.edges))
        if len(self.edges) < 3 or not rising or self.edges[0] != 0 or self.edges[-1] != 1:
            raise ValueError(
                f"intervals: edges must rise from 0 to 1 and form at least two intervals, such as 0, 0.5, 1; "
                f"got {', '.join(f'{edge:g}' for edge in self.edges)}"
            )

    @classmethod
    def cut(cls, inner: Sequence[float]) -> Intervals:
        """The intervals with these inner edges; 0 and 1 are added."""
        return cls((0.0, *inner, 1.0))

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def names(self) -> list[str]:
        """The intervals' names, such as ``0–0.25``."""
        return [f"{low:g}–{high:g}" for low, high in pairwise(self.edges)]

    def masks(self, batch: TokenBatch) -> Tensor:
        """(K, B, T) bool: the response tokens of each interval; each token is in exactly one."""
        inner = torch.tensor(self.edges[1:-1], dtype=batch.dtype, device=batch.mask.device)
        number = torch.bucketize(batch.prob, inner, right=True)
        return (number == torch.arange(len(self), device=number.device)[:, None, None]) & batch.mask


BLOCK = 1 << 24  # elements of logits in memory at a time


@torch.no_grad()
def gradient_sizes(hidden: Tensor, targets: Tensor, head: HeadLike, *, block: int = BLOCK) -> Tensor:
    """(N,) ``‖e_y − π‖``: the norm of ``∂ log π(y) / ∂ logits``, where π is the distribution that sampling used.

    ``‖e_y − π‖² = (1 − π(y))² + Σ_{v≠y} π(v)²``. The norm lies between ``1 − p`` and ``√2·(1 − p)``: the fewer other
    likely tokens there are, the closer it is to the upper end. In the loss, the norm is multiplied by the token's
    weight, advantage and ratio.
    """

    def norms(logits: Tensor, targets: Tensor) -> Tensor:
        others = logits.softmax(-1)
        others.scatter_(1, targets[:, None], 0.0)  # 1 − p is their sum: nothing cancels
        return (others.sum(1).square() + others.square().sum(1)).sqrt()

    return _over_logits(norms, hidden, targets, head, block)


@torch.no_grad()
def logit_rounding(hidden: Tensor, targets: Tensor, head: HeadLike, *, block: int = BLOCK) -> Tensor:
    """(N,) the change of each token's p if its logits are rounded to bfloat16: noise that is not due to an update."""

    def moved(logits: Tensor, targets: Tensor) -> Tensor:
        rounded = logits.bfloat16().to(logits.dtype)
        exact, other = (each.softmax(-1).gather(1, targets[:, None])[:, 0] for each in (logits, rounded))
        return (other - exact).abs()

    return _over_logits(moved, hidden, targets, head, block)


def _over_logits(
    measure: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, targets: Tensor, head: HeadLike, block: int
) -> Tensor:
    """Apply ``measure`` to the logits (n, V) and targets (n,) of n tokens at a time; return its values, (N,)."""
    head = as_head(head)
    values = []
    size = 1
    start = 0
    while start < len(hidden):
        logits = head(hidden[start : start + size])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        values.append(measure(logits, targets[start : start + size]))
        start += size
        size = max(1, block // logits.shape[-1])  # the first row gives the vocabulary size
    return torch.cat(values) if values else hidden.new_zeros(0)


def token_gradient_sizes(
    batch: TokenBatch, measure: Callable[[Tensor, Tensor, HeadLike], Tensor] = gradient_sizes
) -> Tensor | None:
    """(B, T) ``gradient_sizes`` (or ``measure``) of response tokens; 0 elsewhere.

    Returns None if the batch has no hidden states, head or targets.
    """
    if batch.hidden is None or batch.head is None or batch.targets is None:
        return None
    sizes = torch.zeros_like(batch.mask, dtype=batch.dtype)
    alone = [[row] for row in range(len(batch.mask))]
    for rows in batch.group_members() if batch.groups is not None else alone:
        ix = torch.tensor(rows, device=batch.mask.device)
        mask, part = batch.mask[ix], sizes[ix]
        part[mask] = measure(batch.hidden_of(ix)[mask], batch.targets[ix][mask], batch.head).to(batch.dtype)
        sizes[ix] = part
    return sizes


Gradient = list[Tensor | None]
BINS = 40  # in the histogram of probabilities


def dominance(
    loop: Loop,
    regulators: Mapping[str, Regulator],
    optimizer: torch.optim.Optimizer,
    *,
    intervals: Intervals | None = None,
    clip: float = 1.0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Measure one batch, then restore weights and optimizer state bit for bit.

    Returns the figures, ready for JSON, and (B, T) tensors: ``size`` (‖e_y − π‖, if the batch has hidden states),
    ``change`` (Δ log p by the first regulator's update), and the regulators' per-token values, such as NTHR's score.
    """
    intervals = intervals or Intervals()
    batch, masks = loop.batch, intervals.masks(loop.batch)
    sizes = token_gradient_sizes(batch)
    figures = _token_figures(batch, masks, sizes)
    tokens = {} if sizes is None else {"size": sizes}
    measured: list[tuple[Phase, dict[str, Any]]] = []  # Lopti's phases add up to GRPO: measure equal weights once
    with torch.no_grad():
        before = loop.logp()
    with unchanged(loop, optimizer):
        for name, regulator in regulators.items():
            phases = regulator(batch)
            whole = _combined(phases)
            equal = [result for phase, result in measured if _same(phase, whole)]
            if equal:
                result = {**equal[0], "influence": equal[0]["influence"][:-1]}
            else:
                result = _interval_figures(loop, whole, masks, optimizer, before, clip)
            with unchanged(loop, optimizer):
                for phase in phases:
                    step(loop, optimizer, gradient_of(loop, phase), clip)
                after = loop.logp()
            result["influence"] = [*result["influence"], _effect(before, after, masks, batch)]
            result["weight"] = interval_means(whole.policy, masks)
            result["displacement"] = displacement(batch, before, after)
            measured.append((whole, result))
            figures["regulators"][name] = result
            tokens |= {key: value for phase in phases for key, value in phase.tokens.items()}
            tokens.setdefault("change", torch.where(batch.mask, after - before, 0.0))
    return figures, tokens


def _token_figures(batch: TokenBatch, masks: Tensor, sizes: Tensor | None) -> dict[str, Any]:
    """Figures that need no gradient: the number of tokens in each interval, and their advantages."""
    prob, advantages = batch.prob, batch.token_advantages
    count = masks.sum((1, 2))
    density = torch.histc(prob[batch.mask].float(), BINS, 0.0, 1.0)
    return {
        "count": int(batch.mask.sum()),
        "tokens": count.tolist(),
        "token_share": (count / batch.mask.sum()).tolist(),
        "density": (density / density.sum() * BINS).tolist(),
        "advantage": {
            "positive": interval_means((advantages > 0).double(), masks),
            "negative": interval_means((advantages < 0).double(), masks),
        },
        "size": None if sizes is None else interval_means(sizes, masks),
        "with_gradient": float((advantages != 0)[batch.mask].double().mean()),
        "regulators": {},
    }


def _interval_figures(
    loop: Loop, whole: Phase, masks: Tensor, optimizer: torch.optim.Optimizer, before: Tensor, clip: float
) -> dict[str, Any]:
    """The gradient of each interval alone, and the effect of a step along it."""
    parts = [gradient_of(loop, Phase(whole.name, whole.policy * mask, whole.kl * mask)) for mask in masks]
    full = gradient_of(loop, whole)
    gram = torch.tensor([[inner(a, b) for b in parts] for a in parts], dtype=torch.float64)
    squared = inner(full, full)
    norm = gram.diagonal().clamp(min=0).sqrt()
    gap = _sum([*parts, [None if part is None else -part for part in full]])
    count, total = masks.sum((1, 2)).cpu(), int(loop.batch.mask.sum())
    influence = []
    for part in parts:
        with unchanged(loop, optimizer):
            step(loop, optimizer, part, clip)
            influence.append(_effect(before, loop.logp(), masks, loop.batch))
    cosine = gram / (norm[:, None] * norm)
    return {
        "norm": norm.tolist(),
        "full": squared**0.5,
        "per_token": _numbers(norm * total / count),
        "share": _numbers(torch.tensor([inner(part, full) for part in parts], dtype=torch.float64) / squared),
        "residual": (inner(gap, gap) / squared) ** 0.5 if squared else 0.0,
        "cosine": [_numbers(row) for row in cosine],
        "influence": influence,
    }


def _effect(before: Tensor, after: Tensor, masks: Tensor, batch: TokenBatch) -> dict[str, list[float | None]]:
    change, advantages = after.double().exp() - before.double().exp(), batch.token_advantages
    return {
        "moved": interval_means(change.abs(), masks),
        "moved_log": interval_means((after - before).abs(), masks),
        "rewarded": interval_means(change, masks & (advantages > 0)),
        "punished": interval_means(change, masks & (advantages < 0)),
    }


@torch.no_grad()
def displacement(batch: TokenBatch, before: Tensor, after: Tensor) -> dict[str, Any] | None:
    """How an update changed the log-likelihoods of correct responses (lazy displacement, arXiv 2505.18830).

    Returns the mean change, the share of these responses whose log-likelihood fell, and the mean change per group; None
    if no response is correct.
    """
    if batch.correct is None or not (right := batch.correct & batch.mask.any(1)).any():
        return None
    old, new = (torch.where(batch.mask[right], logp[right].double(), 0.0).sum(1) for logp in (before, after))
    change, groups = new - old, None if batch.groups is None else batch.groups[right]
    return {
        "lld/change": float(change.mean()),
        "lld/fallen_share": float((change < 0).double().mean()),
        "questions": [] if groups is None else [float(change[groups == group].mean()) for group in groups.unique()],
    }


def _combined(phases: Sequence[Phase]) -> Phase:
    """Combine all phases into one by adding their weights."""
    policy, kl = (torch.stack(weights).sum(0) for weights in zip(*((p.policy, p.kl) for p in phases), strict=True))
    return Phase("all", policy, kl)


def _same(a: Phase, b: Phase) -> bool:
    return torch.equal(a.policy, b.policy) and torch.equal(a.kl, b.kl)


def _sum(gradients: Sequence[Gradient]) -> Gradient:
    columns = [[part for part in column if part is not None] for column in zip(*gradients, strict=True)]
    return [torch.stack(column).sum(0) if column else None for column in columns]


def interval_means(values: Tensor, masks: Tensor) -> list[float | None]:
    """The mean over each interval's tokens; None for an interval without tokens."""
    return _numbers(torch.where(masks, values.double(), 0.0).sum((1, 2)) / masks.sum((1, 2)))


def _numbers(values: Tensor) -> list[float | None]:
    """The values as a list, with None instead of NaN and infinity (such as the mean over no tokens)."""
    return [value if value - value == 0 else None for value in values.tolist()]


# The training loop: the interface that the diagnostics need, and restoring the loop's state


class Loop(Protocol):
    """A training loop as the diagnostics use it: one batch, the parameters to update, gradients, log-probabilities."""

    batch: TokenBatch
    settings: Settings
    parameters: Sequence[Tensor]  # the optimizer's parameters

    def gradient(self, phase: Phase) -> None:
        """Set the parameters' gradients to the gradient of the phase's loss over the whole batch."""
        ...

    def logp(self) -> Tensor:
        """(B, T) log-probabilities of the sampled tokens under the current weights."""
        ...

    def changed(self) -> None:
        """Update copies of the parameters, if there are any. Called after the parameters have changed."""
        ...


class ForwardLoop:
    """A loop defined by its forward pass: ``forward()`` returns (B, T) log-probabilities with gradients.

    With an entropy bonus (``settings.entropy_coef``) ``forward()`` returns a pair: log-probabilities and (B, T)
    entropies.
    """

    def __init__(
        self,
        batch: TokenBatch,
        parameters: Sequence[Tensor],
        forward: Callable[[], Tensor | tuple[Tensor, Tensor]],
        settings: Settings | None = None,
    ) -> None:
        self.batch, self.parameters, self.forward = batch, list(parameters), forward
        self.settings = settings or Settings()

    def gradient(self, phase: Phase) -> None:
        """Set the gradients by one backward pass."""
        for parameter in self.parameters:
            parameter.grad = None
        (logp, entropy), norm = self._pass(), normalizer(self.batch, self.settings)
        taken = survey(logp, self.batch, self.settings)
        loss, _ = policy_loss(logp, self.batch, phase, self.settings, normalizer=norm, entropy=entropy, survey=taken)
        loss.backward()

    @torch.no_grad()
    def logp(self) -> Tensor:
        """Run one forward pass."""
        return self._pass()[0]

    def _pass(self) -> tuple[Tensor, Tensor | None]:
        found = self.forward()
        if isinstance(found, Tensor) and self.settings.entropy_coef:
            raise ValueError(
                "ForwardLoop: entropy_coef is not 0, so forward() must return (log-probabilities, entropies)"
            )
        return (found, None) if isinstance(found, Tensor) else found

    def changed(self) -> None:
        """Do nothing: there are no copies."""


@contextmanager
def unchanged(loop: Loop, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """On exit, restore weights and optimizer state bit for bit."""
    weights = [parameter.detach().clone() for parameter in loop.parameters]
    state = copy.deepcopy(optimizer.state_dict())
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(loop.parameters, weights, strict=True):
                parameter.copy_(weight)
                parameter.grad = None
        loop.changed()
        optimizer.load_state_dict(state)


def step(loop: Loop, optimizer: torch.optim.Optimizer, gradient: Sequence[Tensor | None], clip: float) -> None:
    """Take one optimizer step along a gradient, clipped as in training; no step if the gradient is zero."""
    if all(part is None or not part.any() for part in gradient):
        return  # momentum alone must not move the model
    for parameter, part in zip(loop.parameters, gradient, strict=True):
        parameter.grad = None if part is None else part.clone()
    torch.nn.utils.clip_grad_norm_(loop.parameters, clip)
    optimizer.step()
    loop.changed()


def gradient_of(loop: Loop, phase: Phase) -> list[Tensor | None]:
    """Return copies of the phase's gradients.

    None stands for a parameter without a gradient, and for every parameter if no token is active.
    """
    if not active(loop.batch, phase, loop.settings).any():
        return [None] * len(loop.parameters)
    loop.gradient(phase)
    gradient = [None if p.grad is None else p.grad.detach().clone() for p in loop.parameters]
    for parameter in loop.parameters:
        parameter.grad = None
    return gradient


def inner(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """The inner product of two gradients over all parameters, summed in float64."""
    both = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return float(sum((torch.sum(x.double() * y) for x, y in both), torch.zeros((), dtype=torch.float64)))
