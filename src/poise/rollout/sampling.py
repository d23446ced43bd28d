"""From logits to a token: temperature, top-k, top-p, and random numbers that belong to a token, not to a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise._lib.errors import check_range

_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685  # of splitmix64, as int64


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0: the most likely one. ``top_k`` 0 and ``top_p`` 1: from all of them.

    With both, ``top_p`` is a share of what ``top_k`` leaves, as in transformers.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        check_range("Sampling", "temperature", self.temperature, 0.0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling: top_p = {self.top_p} must be above 0 and at most 1 (1: no token is left out)")
        if self.top_k < 0:
            raise ValueError(f"Sampling: top_k = {self.top_k} must be 0 (no limit) or the number of tokens to keep")

    @property
    def whole(self) -> bool:
        """Whether no token is left out."""
        return self.temperature == 0 or (self.top_p == 1 and self.top_k == 0)

    def draw(self, logits: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A token for each row of logits (n, V), which have been divided by the temperature already.

        ``point`` (n,) in (0, 1) decides. Also the token's log-probability and the entropy, both of the whole softmax:
        what the update computes, whatever was left out when drawing.
        """
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        probs = logs.exp()
        token = logs.argmax(-1) if self.temperature == 0 else self._choose(probs, point)
        return token, logs.gather(1, token[:, None])[:, 0], -torch.linalg.vecdot(probs, logs)

    def _choose(self, probs: Tensor, point: Tensor) -> Tensor:
        size = probs.shape[-1]
        kept = min(self.top_k or size, size)
        if self.top_p == 1 and kept == size:
            return _invert(probs, point)
        # Stable: of equals the first is kept, however many rows there are.
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        ordered, index = ordered[:, :kept], index[:, :kept]
        reached = ordered.cumsum(-1)
        # A token stays if those before it do not reach top_p; the first always does.
        ordered = torch.where(reached - ordered < self.top_p * reached[:, -1:], ordered, 0)
        return index.gather(1, _invert(ordered, point)[:, None])[:, 0]


def _invert(weights: Tensor, point: Tensor) -> Tensor:
    """Where the distribution function passes the point: one random number per row, and never a weight of 0."""
    reached = weights.cumsum(-1)
    goal = point.to(weights.dtype)[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, goal, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def uniform(seed: int, number: Tensor, position: Tensor) -> Tensor:
    """Random numbers in (0, 1), float32, for sequences and positions in them: a function of these and the seed alone.

    So a sequence's tokens depend neither on its neighbours nor on when or where it is decoded. It is splitmix64,
    twice: a sequence is a point on the seed's stream, and a position one on the sequence's. int64 wraps around as
    uint64 does. Never 0 or 1, which would choose a token however unlikely.
    """
    bits = mix(streams(seed, number) + position) >> 41 & ((1 << 23) - 1)
    return (bits.float() * 2 + 1) * 2.0**-24


def streams(seed: int, number: Tensor) -> Tensor:
    """A seed for each sequence (int64), by its number: those of any two, and of any two seeds, are unrelated."""
    return mix(number + mix(torch.full_like(number, _signed(seed))))


def mix(x: Tensor) -> Tensor:
    """One output of splitmix64 for each state (int64): every bit of it depends on every bit of the state."""
    x = (x + 1) * _STEP
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift brings in the sign."""
    return x >> by & ((1 << (64 - by)) - 1)


def _signed(seed: int) -> int:
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
