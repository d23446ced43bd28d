"""Advantages from rewards: plain functions of (B,) tensors.

``groups`` holds an integer per response, the same for responses to the same prompt; groups need not stand together nor
be of equal size. A group of one has nothing to be compared with and is an error, except in ``reinforce_pp`` without
groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_zscore(rewards: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO: ``(r − mean) / (std + eps)`` within the group, std unbiased. A group without spread gives exactly 0."""
    rewards, index, count = _prepare(rewards, groups)
    centered = _centered(rewards, index, count)
    variance = _group_sum(centered.square(), index, len(count)) / (count - 1)
    return centered / (variance.sqrt()[index] + eps)


def group_centered(rewards: Tensor, groups: Tensor) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): ``r − mean`` within the group, not divided by the standard deviation."""
    return _centered(*_prepare(rewards, groups))


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): ``r`` minus the mean of the *other* responses of the group."""
    rewards, index, count = _prepare(rewards, groups)
    return _centered(rewards, index, count) * (count.to(rewards.dtype) / (count - 1))[index]


def reinforce_pp(
    rewards: Tensor, groups: Tensor | None = None, *, mask: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): rewards normalised over the whole batch, ``(r − mean) / sqrt(var + eps)``.

    With ``groups`` the group's mean is taken off first (the paper's "baseline" variant). With ``mask`` (B, T) the
    moments are over tokens, as in the paper's implementation, so that long responses count more; without it each
    response counts once. A batch without spread gives exactly 0.
    """
    rewards = _finite(rewards) if groups is None else _centered(*_prepare(rewards, groups))
    weight = torch.ones_like(rewards) if mask is None else (mask != 0).sum(1).to(rewards.dtype)
    counted = rewards[weight > 0]
    if len(counted) == 0 or bool(counted.max() == counted.min()):
        return torch.zeros_like(rewards)
    mean = (rewards * weight).sum() / weight.sum()
    variance = ((rewards - mean).square() * weight).sum() / weight.sum()
    return (rewards - mean) * (variance + eps).rsqrt()


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


def _centered(rewards: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """``r − group mean``, and exactly 0 where a group has no spread: rounding of the mean must not look like signal."""
    mean = _group_sum(rewards, index, len(count)) / count
    low = rewards.new_full((len(count),), torch.inf).scatter_reduce_(0, index, rewards, "amin")
    high = rewards.new_full((len(count),), -torch.inf).scatter_reduce_(0, index, rewards, "amax")
    return torch.where((low == high)[index], 0.0, rewards - mean[index])
