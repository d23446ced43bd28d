"""What an engine is, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from poise._transfer import send
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
    # (B, T) from a sampler with an arithmetic of its own, which differs a little; logp is then the policy's
    sampler_logp: Tensor | None = None

    @cached_property
    def lengths(self) -> list[int]:
        """B response lengths, on the host: fetched once, whatever rows are taken later."""
        ends = (self.mask * torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device)).amax(1)
        counts, ends = torch.stack([self.mask.sum(1), ends]).tolist()
        if counts != ends:
            row = next(i for i, (count, end) in enumerate(zip(counts, ends, strict=True)) if count != end)
            raise ValueError(f"Rollouts: mask[{row}] has holes; a response is one run of tokens from column 0 on")
        return list(counts)

    @cached_property
    def index(self) -> Tensor:
        """(n,) where the response tokens lie in (B, T), flattened; row after row."""
        counts, total = self.mask.sum(1), sum(self.lengths)
        owner = torch.repeat_interleave(counts, output_size=total)
        begin = torch.arange(len(counts), device=owner.device) * self.mask.shape[1] - (counts.cumsum(0) - counts)
        return begin[owner] + torch.arange(total, device=owner.device)

    def rows(self, ix: Rows) -> Rollouts:
        """Some of them."""
        if isinstance(ix, slice):
            chosen = list(range(len(self.prompts))[ix])
        else:
            chosen = ix.tolist() if isinstance(ix, Tensor) else list(ix)
            ix = send(ix, self.mask.device)
        names = ("tokens", "mask", "logp", "entropy", "finished", "sampler_logp")
        taken = {name: getattr(self, name)[ix] for name in names if getattr(self, name) is not None}
        piece = Rollouts([self.prompts[i] for i in chosen], **taken)
        if "lengths" in self.__dict__:
            piece.__dict__["lengths"] = [self.lengths[i] for i in chosen]
        return piece


Done = Callable[[int, list[int]], None]


class Engine(Protocol):
    """Samples responses from the policy as it is now."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        group: int,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
        top_k: int = 0,
        done: Done | None = None,
    ) -> Rollouts:
        """``group`` responses to each prompt. Temperature 0 is greedy. The same seed gives the same tokens.

        ``top_p`` and ``top_k`` leave out unlikely tokens when drawing (1 and 0: none). Log-probabilities and entropies
        are those of the whole softmax all the same. ``done`` may be told of responses as they end, by an engine that
        knows before all have: their place in the result, and their tokens.
        """
        ...
