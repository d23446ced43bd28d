"""What an engine is, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from poise.batch import Rows


@dataclass(frozen=True, eq=False)
class Rollouts:
    """B sampled responses, group after group."""

    prompts: list[list[int]]  # B token lists; those of a group are the same
    tokens: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool: response tokens, the one that ends the response included
    logp: Tensor  # (B, T) of softmax(logits / temperature), as sampled
    entropy: Tensor  # (B, T)
    finished: Tensor  # (B,) bool: ended by itself, not by the limit

    def rows(self, ix: Rows) -> Rollouts:
        """Some of them."""
        chosen = range(len(self.prompts))[ix] if isinstance(ix, slice) else [int(i) for i in ix]
        prompts = [self.prompts[i] for i in chosen]
        fields = (self.tokens, self.mask, self.logp, self.entropy, self.finished)
        return Rollouts(prompts, *(value[ix] for value in fields))


class Engine(Protocol):
    """Samples responses from the policy as it is now."""

    def generate(
        self, prompts: Sequence[list[int]], group: int, *, max_tokens: int, temperature: float, seed: int
    ) -> Rollouts:
        """``group`` responses to each prompt. Temperature 0 is greedy. The same seed gives the same tokens."""
        ...
