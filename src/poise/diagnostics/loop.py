"""What the diagnostics need from a training loop, and how they restore its state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from poise.batch import Phase, TokenBatch
from poise.objective import Settings, active, normalizer, policy_loss, survey


class Loop(Protocol):
    """One batch, the parameters that it would update, and what every loop can compute."""

    batch: TokenBatch
    settings: Settings
    parameters: Sequence[Tensor]  # the optimizer's

    def gradient(self, phase: Phase) -> None:
        """Set the parameters' gradients to those of the phase's loss over the whole batch."""
        ...

    def logp(self) -> Tensor:
        """(B, T) log-probabilities of the sampled tokens under the current weights."""
        ...

    def changed(self) -> None:
        """Called after the parameters changed: update copies of them, if there are any."""
        ...


class ForwardLoop:
    """Any loop with a forward pass: ``forward()`` returns (B, T) log-probabilities with gradients.

    With an entropy bonus (``settings.entropy_coef``) it returns a pair, log-probabilities and (B, T) entropies.
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
        """One backward pass."""
        for parameter in self.parameters:
            parameter.grad = None
        (logp, entropy), norm = self._pass(), normalizer(self.batch, self.settings)
        taken = survey(logp, self.batch, self.settings)
        loss, _ = policy_loss(logp, self.batch, phase, self.settings, normalizer=norm, entropy=entropy, survey=taken)
        loss.backward()

    @torch.no_grad()
    def logp(self) -> Tensor:
        """One forward pass."""
        return self._pass()[0]

    def _pass(self) -> tuple[Tensor, Tensor | None]:
        found = self.forward()
        if isinstance(found, Tensor) and self.settings.entropy_coef:
            raise ValueError(
                "ForwardLoop: entropy_coef is not 0, so forward() must return (log-probabilities, entropies)"
            )
        return (found, None) if isinstance(found, Tensor) else found

    def changed(self) -> None:
        """Nothing to do: there are no copies."""


@contextmanager
def unchanged(loop: Loop, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore weights and optimizer state at the end, bit for bit."""
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
    """Copies of the phase's gradients; None for a parameter without one, and for all if no token is active."""
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
