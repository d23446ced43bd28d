"""Advantages from rewards: plain functions of (B,) tensors.

``groups`` holds an integer per response, the same for responses to the same prompt; groups need not stand together nor
be of equal size. A group of one has nothing to be compared with and is an error, except in ``reinforce_pp`` without
groups.

Large rewards are divided by a power of two first, so that neither their sums nor their squares overflow. Such a
division is exact: it changes no digit of the result. The mean is taken off twice: where rewards are large and close
together, its own rounding is as large as their spread, and the second time takes that off.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_zscore(rewards: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO: ``(r − mean) / (std + eps)`` within the group, std unbiased. A group without spread gives exactly 0."""
    centered, scale, index, count = _centered(rewards, groups)
    variance = _group_sum(centered.square(), index, len(count)) / (count - 1)
    return centered / (variance.sqrt()[index] + eps / scale)


def group_centered(rewards: Tensor, groups: Tensor) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): ``r − mean`` within the group, not divided by the standard deviation."""
    centered, scale, _, _ = _centered(rewards, groups)
    return _in_range(rewards, centered * scale)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): ``r`` minus the mean of the *other* responses of the group."""
    centered, scale, index, count = _centered(rewards, groups)
    return _in_range(rewards, centered * (count.to(centered.dtype) / (count - 1))[index] * scale)


def reinforce_pp(
    rewards: Tensor, groups: Tensor | None = None, *, mask: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): rewards normalised over the whole batch, ``(r − mean) / sqrt(var + eps)``.

    With ``groups`` the group's mean is taken off first (the paper's "baseline" variant). With ``mask`` (B, T) the
    moments are over tokens, as in the paper's implementation, so that long responses count more; without it each
    response counts once. A batch without spread gives exactly 0, and so does a response without a token.
    """
    rewards = _finite(rewards) if groups is None else group_centered(rewards, groups)
    weight = torch.ones_like(rewards) if mask is None else (mask != 0).sum(1).to(rewards.dtype)
    counted, times = rewards[weight > 0], weight[weight > 0]
    if len(counted) == 0 or bool(counted.max() == counted.min()):
        return torch.zeros_like(rewards)
    scale = _scale(counted.abs().max())
    counted = counted / scale
    for _ in range(2):
        counted = counted - (counted * times).sum() / times.sum()
    variance = (counted.square() * times).sum() / times.sum()
    found = counted * (variance + eps / scale / scale).rsqrt()
    return torch.zeros_like(rewards).masked_scatter_(weight > 0, found)


def _finite(rewards: Tensor) -> Tensor:
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be (B,), got {tuple(rewards.shape)}")
    bad = ~torch.isfinite(rewards)
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(f"rewards[{at}] = {float(rewards[at])}: rewards must be finite")
    return rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))


def _prepare(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards in at least float32, the group index of each response, and the size of each group."""
    rewards = _finite(rewards)
    if groups.shape != rewards.shape:
        raise ValueError(f"groups must be {tuple(rewards.shape)} as rewards are, got {tuple(groups.shape)}")
    names, index, count = groups.unique(return_inverse=True, return_counts=True)
    if (count < 2).any():
        alone = names[count < 2][0].item()
        at = int((groups == alone).nonzero()[0])
        raise ValueError(
            f"group {alone} (response {at}) has one response: group-relative advantages need at least two per prompt; "
            "raise the group size, or use reinforce_pp without groups"
        )
    return rewards, index, count


def _group_sum(values: Tensor, index: Tensor, n_groups: int) -> Tensor:
    return values.new_zeros(n_groups).index_add_(0, index, values)


def _centered(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(r − group mean) / scale``, the scale of each response, its group's index, and the size of each group.

    Exactly 0 where a group has no spread: rounding of the mean must not look like signal.
    """
    rewards, index, count = _prepare(rewards, groups)
    low = rewards.new_full((len(count),), torch.inf).scatter_reduce_(0, index, rewards, "amin")
    high = rewards.new_full((len(count),), -torch.inf).scatter_reduce_(0, index, rewards, "amax")
    scale = _scale(torch.maximum(low.abs(), high.abs()))[index]
    centered = rewards / scale
    for _ in range(2):
        centered = centered - (_group_sum(centered, index, len(count)) / count)[index]
    return torch.where((low == high)[index], 0.0, centered), scale, index, count


def _scale(size: Tensor) -> Tensor:
    """The power of two, at least 1, that brings numbers up to ``size`` below 2."""
    mantissa, _ = torch.frexp(size)  # at least 1/2
    return torch.where(size > 1, size / (2 * mantissa), 1.0)


def _in_range(rewards: Tensor, advantages: Tensor) -> Tensor:
    too_large = ~torch.isfinite(advantages)
    if too_large.any():
        at = int(too_large.nonzero()[0])
        kind = str(advantages.dtype).removeprefix("torch.")
        raise ValueError(
            f"rewards[{at}] = {float(rewards[at]):.4g}: its distance from the others is more than {kind} can hold; "
            "divide all rewards by a constant"
        )
    return advantages
