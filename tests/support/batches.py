"""Batches to test on."""

from __future__ import annotations

from typing import Any

import torch

from poise import TokenBatch


def random_batch(
    seed: int = 0,
    prompts: int = 3,
    group: int = 4,
    length: int = 9,
    *,
    dtype: torch.dtype = torch.float64,
    **fields: Any,
) -> TokenBatch:
    """Responses of uneven length with holes; NaN wherever the mask is False."""
    g = torch.Generator().manual_seed(seed)
    n, vocabulary, width = prompts * group, 7, 5
    lengths = torch.randint(1, length + 1, (n, 1), generator=g)
    mask = torch.arange(length) < lengths
    mask &= torch.rand(n, length, generator=g) > 0.1  # tool output, say
    mask[:, 0] = True

    def tokens(scale: float, sign: float = 1.0) -> torch.Tensor:
        values = sign * scale * torch.rand(n, length, generator=g, dtype=torch.float64)
        return torch.where(mask, values, torch.nan).to(dtype)

    correct = torch.rand(n, generator=g) < 0.5
    full: dict[str, Any] = {
        "old_logp": tokens(3.0, -1.0),
        "mask": mask,
        "advantages": torch.randn(n, generator=g, dtype=torch.float64).to(dtype),
        "groups": torch.arange(prompts).repeat_interleave(group),
        "rewards": correct.to(dtype),
        "correct": correct,
        "ref_logp": tokens(3.0, -1.0),
        "sampler_logp": None,
        "entropy": tokens(2.0),
        "hidden": torch.randn(n, length, width, generator=g, dtype=torch.float64).to(dtype),
        "head": torch.randn(vocabulary, width, generator=g, dtype=torch.float64).to(dtype),
        "targets": torch.where(mask, torch.randint(0, vocabulary, (n, length), generator=g), -100),
    }
    return TokenBatch(**(full | fields))


def fields_of(batch: TokenBatch) -> dict[str, Any]:
    """The fields of a batch, to build a changed one from."""
    return {name: getattr(batch, name) for name in TokenBatch.__dataclass_fields__}
