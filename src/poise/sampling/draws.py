"""Draw tokens from logits: temperature, top-k, top-p. A token's random number does not depend on its batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from poise._lib.device import running_sum
from poise._lib.errors import check_range

_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's, as int64


@dataclass(frozen=True)
class Sampling:
    """The settings for drawing tokens.

    ``temperature`` 0 always takes the most likely token. ``top_k`` 0 and ``top_p`` 1 exclude no token. ``top_k`` is
    applied first; ``top_p`` is then a share of the remaining probability, as in transformers.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        check_range("Sampling", "temperature", self.temperature, 0.0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling: top_p = {self.top_p} must be above 0 and at most 1 (1 excludes no token)")
        if self.top_k < 0:
            raise ValueError(f"Sampling: top_k = {self.top_k} must be 0 (no limit) or the number of tokens to keep")

    @property
    def whole(self) -> bool:
        """Whether ``top_k`` and ``top_p`` have no effect: they exclude no token, or the temperature is 0."""
        return self.temperature == 0 or (self.top_p == 1 and self.top_k == 0)

    def draw(self, logits: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token (n,) from each row of logits (n, V), which are already divided by the temperature.

        ``point`` (n,) holds the random numbers in [0, 1). Also returns the token's log-probability and the entropy,
        (n,) each. Both are computed from the full softmax, as in the update, even if ``top_k`` or ``top_p`` excludes
        tokens.
        """
        logps = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        probs = logps.exp()
        token = logps.argmax(-1) if self.temperature == 0 else self._choose(probs, point)
        logp = logps.gather(1, token[:, None])[:, 0]
        finite = logps.clamp_(min=torch.finfo(logps.dtype).min)  # a logit of -inf adds 0 to the entropy, not 0 · inf
        return token, logp, -torch.linalg.vecdot(probs, finite)

    def _choose(self, probs: Tensor, point: Tensor) -> Tensor:
        size = probs.shape[-1]
        most = min(self.top_k or size, size)
        if self.top_p == 1 and most == size:
            return _invert(probs, point)
        # A stable sort orders equal probabilities by token, whatever the number of rows.
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        ordered, index = ordered[:, :most], index[:, :most]
        reached = running_sum(ordered)
        # A token stays if the tokens before it do not reach top_p; the first always stays.
        ordered = torch.where(reached - ordered < self.top_p * reached[:, -1:], ordered, 0)
        return index.gather(1, _invert(ordered, point)[:, None])[:, 0]


def _invert(weights: Tensor, point: Tensor) -> Tensor:
    """Return the column (n,) where each row's cumulative weight passes the row's point; never a column with weight 0.

    Sums are float64: a float32 sum stops growing when the weights are small, so improbable tokens could not be drawn.
    """
    reached = running_sum(weights, torch.float64)
    total = reached[:, -1:]
    goal = torch.minimum(point.double()[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(reached, goal, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)  # NaN draws the last


def uniform(seed: int, number: Tensor, position: Tensor) -> Tensor:
    """Return random numbers in [0, 1), float64, that depend only on the seed, the sequence's number and the position.

    The tokens of a sequence therefore depend neither on the other sequences nor on when or where they are decoded.
    splitmix64 is applied twice: to the seed and the number, which gives the sequence's seed, and then to this seed and
    the position. int64 wraps around like uint64. All 53 bits of the float64 are random, so that even a token with
    probability 1e-12 can be drawn.
    """
    return _shift(mix(streams(seed, number) + position), 11).double() * 2.0**-53


def derived_seed(seed: int, name: object) -> int:
    """Derive a seed for the purpose ``name``. Other names and other seeds give unrelated results."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 1


def streams(seed: int, number: Tensor) -> Tensor:
    """Derive a seed (int64) for each sequence number. Other numbers and other seeds give unrelated results."""
    signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return mix(number + mix(torch.full_like(number, signed)))


def mix(x: Tensor) -> Tensor:
    """The output of splitmix64 for each state (int64). Every output bit depends on every bit of the state."""
    x = (x + 1) * _STEP
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift fills with the sign bit."""
    return x >> by & ((1 << (64 - by)) - 1)
