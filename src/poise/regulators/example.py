"""A small made-up batch, to find out before training what a regulator does."""

from __future__ import annotations

import torch

from poise.batch import TokenBatch


def example_batch(
    groups: int = 2, group: int = 4, length: int = 16, width: int = 4, vocabulary: int = 11
) -> TokenBatch:
    """A batch that has every field, many probabilities, and advantages ±1."""
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
        entropy=0.02 * torch.rand(rows, length, generator=generator),  # low: STARE is idle where entropy is high
        hidden=torch.randn(rows, length, width, generator=generator),
        head=torch.randn(vocabulary, width, generator=generator),
        targets=torch.randint(vocabulary, (rows, length), generator=generator),
    )
