"""What the diagnostics need of a training loop, and how they leave it as they found it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from poise.batch import Phase, TokenBatch
from poise.objective import Settings, active, normalizer, policy_loss


class Loop(Protocol):
    """One batch, the weights that it is about to update, and two things that every loop can do."""

    batch: TokenBatch
    settings: Settings
    parameters: Sequence[Tensor]  # what the optimizer works on

    def gradient(self, phase: Phase) -> None:
        """Leave the gradient of the phase's loss over the whole batch, and nothing else, at the parameters."""
        ...

    def logp(self) -> Tensor:
        """(B, T) log-probabilities of the sampled tokens under the weights as they are."""
        ...

    def changed(self) -> None:
        """The parameters were written to: bring copies of them up to date, if there are any."""
        ...


class ForwardLoop:
    """Any loop that has a forward pass: ``forward()`` gives the (B, T) log-probabilities, with gradients."""

    def __init__(
        self,
        batch: TokenBatch,
        parameters: Sequence[Tensor],
        forward: Callable[[], Tensor],
        settings: Settings | None = None,
    ) -> None:
        self.batch, self.parameters, self.forward = batch, list(parameters), forward
        self.settings = settings or Settings()

    def gradient(self, phase: Phase) -> None:
        """One backward pass."""
        for parameter in self.parameters:
            parameter.grad = None
        norm = normalizer(self.batch, self.settings)
        policy_loss(self.forward(), self.batch, phase, self.settings, normalizer=norm)[0].backward()

    @torch.no_grad()
    def logp(self) -> Tensor:
        """One forward pass."""
        return self.forward()

    def changed(self) -> None:
        """There are no copies."""


@contextmanager
def unchanged(loop: Loop, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Whatever happens to weights and optimizer inside is undone at the end, bit for bit."""
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
    """One real optimizer step along a gradient, clipped as in training; none where the gradient is zero."""
    if all(part is None or not part.any() for part in gradient):
        return  # momentum alone must not move the model
    for parameter, part in zip(loop.parameters, gradient, strict=True):
        parameter.grad = None if part is None else part.clone()
    torch.nn.utils.clip_grad_norm_(loop.parameters, clip)
    optimizer.step()
    loop.changed()


def gradient_of(loop: Loop, phase: Phase) -> list[Tensor | None]:
    """The gradient of a phase, as tensors of its own; None where it is nothing, as in a phase without active tokens."""
    if not active(loop.batch, phase, loop.settings).any():
        return [None] * len(loop.parameters)
    loop.gradient(phase)
    found = [None if p.grad is None else p.grad.detach().clone() for p in loop.parameters]
    for parameter in loop.parameters:
        parameter.grad = None
    return found


def inner(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """The inner product of two gradients over all parameters, summed in float64."""
    both = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return float(sum((torch.sum(x.double() * y) for x, y in both), torch.zeros((), dtype=torch.float64)))
