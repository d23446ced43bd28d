"""Advantages from rewards: plain functions of (B,) tensors.

``groups`` has an integer per response, the same for all responses to one prompt. Rows of a group need not be adjacent,
and groups may differ in size. A group of one has no baseline: it is an error, except in ``reinforce_pp`` without
groups.

The mean is subtracted twice: if rewards are large and close together, the rounding error of the mean is as large as the
spread of the rewards, and the second subtraction removes this error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from poise._lib import user_code
from poise._lib.calls import read_call
from poise._lib.errors import check_settings, short
from poise.objective_settings import ADVANTAGE

F = TypeVar("F", bound=Callable[..., Tensor])


def group_zscore(rewards: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO: ``(r − mean) / (std + eps)`` within the group, std unbiased. Exactly 0 in a group of equal rewards."""
    centered, index, count = _centered(rewards, groups)
    variance = _group_sum(centered.square(), index, len(count)) / (count - 1)
    return centered / (variance.sqrt()[index] + eps)


def group_centered(rewards: Tensor, groups: Tensor) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): ``r − mean`` within the group, not divided by the standard deviation."""
    return _centered(rewards, groups)[0]


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): ``r`` minus the mean of the *other* responses of the group."""
    centered, index, count = _centered(rewards, groups)
    return centered * (count.to(centered.dtype) / (count - 1))[index]


def reinforce_pp(
    rewards: Tensor, groups: Tensor | None = None, *, mask: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): rewards normalised over the whole batch, ``(r − mean) / sqrt(var + eps)``.

    With ``groups`` the group's mean is subtracted first (the paper's "baseline" variant). With ``mask`` (B, T) mean and
    variance are over tokens, as in the paper's implementation, so that long responses count more; without it each
    response counts once. The result is exactly 0 where all rewards are equal, and for a response without tokens.
    """
    rewards = _finite(rewards) if groups is None else group_centered(rewards, groups)
    weight = torch.ones_like(rewards) if mask is None else (mask != 0).sum(1).to(rewards.dtype)
    values, times = rewards[weight > 0], weight[weight > 0]
    if len(values) == 0 or bool(values.max() == values.min()):
        return torch.zeros_like(rewards)
    for _ in range(2):
        values = values - (values * times).sum() / times.sum()
    variance = (values.square() * times).sum() / times.sum()
    advantages = values * (variance + eps).rsqrt()
    return torch.zeros_like(rewards).masked_scatter_(weight > 0, advantages)


@dataclass(frozen=True)
class Estimate:
    """The function that the setting ``advantage`` names, with its settings. It maps rewards to advantages.

    poise passes ``rewards`` (B,), ``groups`` (B,) and ``mask`` (B, T) if the function has a parameter of that name; the
    function's other parameters are settings. A function with ``groups`` needs at least two responses to each prompt.
    """

    text: str
    function: Callable[..., Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        """Return advantages (B,), or (B, T) with one per token."""
        batch = {"rewards": rewards, "groups": groups, "mask": mask}
        asked = {name: value for name, value in batch.items() if name in signature(self.function).parameters}
        values = self.function(**asked, **self.settings)
        if not isinstance(values, Tensor) or values.shape not in (rewards.shape, mask.shape):
            got = tuple(values.shape) if isinstance(values, Tensor) else short(values)
            raise user_code.UserCodeError(
                f"advantage {self.text!r} must return a tensor {tuple(rewards.shape)}, or {tuple(mask.shape)} with one "
                f"advantage per token, got {got}"
            )
        return values

    @property
    def needs_groups(self) -> bool:
        """Whether the function compares the responses to a prompt with each other."""
        return "groups" in signature(self.function).parameters

    @property
    def within_groups(self) -> bool:
        """Whether an advantage depends only on the rewards of its own group."""
        return self.function in (group_zscore, group_centered, leave_one_out)


TABLE: dict[str, Callable[..., Tensor]] = {  # the names of the setting ``advantage``
    ADVANTAGE: group_zscore,
    "group-centered": group_centered,
    "leave-one-out": leave_one_out,
    "reinforce-pp": lambda rewards: reinforce_pp(rewards),
    "reinforce-pp-tokens": lambda rewards, mask: reinforce_pp(rewards, mask=mask),
    "reinforce-pp-baseline": lambda rewards, groups: reinforce_pp(rewards, groups),
    "reinforce-pp-baseline-tokens": lambda rewards, groups, mask: reinforce_pp(rewards, groups, mask=mask),
}
LARGEST = 1e15  # bound on the absolute value of a reward: a sum of squared rewards must not overflow float32


def advantage(function: F) -> F:
    """Mark your own function, so that settings can name it by file or dotted path. ``Estimate`` lists its arguments.

    >>> @poise.advantage
    ... def above_half(rewards, scale: float = 1.0):
    ...     return scale * (rewards - 0.5)

    Then ``advantage="mine.py:above_half(scale=2)"`` trains with it.
    """
    return user_code.mark("advantage", function)


def get(text: str | Estimate | Callable[..., Tensor]) -> Estimate:
    """Return the estimate that ``text`` names: an entry of ``TABLE``, or a user's ``file.py:name(setting=value)``.

    A function is wrapped in an ``Estimate``; an ``Estimate`` is returned unchanged.
    """
    if isinstance(text, Estimate):
        return text
    if not isinstance(text, str):
        return Estimate(getattr(text, "__name__", repr(text)), text)
    name, args, settings = read_call(text)
    function = user_code.find("advantage", name, TABLE)
    if args:
        raise TypeError(f"{name}: pass the settings of an advantage by name, {name}(setting=value)")
    given = ("rewards", "groups", "mask")
    check_settings(name, settings, [key for key in signature(function).parameters if key not in given])
    return Estimate(text, function, settings)


def _finite(rewards: Tensor) -> Tensor:
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be (B,), got {tuple(rewards.shape)}")
    bad = ~(rewards.abs() <= LARGEST)
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(
            f"rewards[{at}] = {float(rewards[at])}: rewards must be finite and at most {LARGEST:.0e} in absolute "
            "value; divide larger ones by a constant"
        )
    return rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))


def _prepare(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards in at least float32, the group index of each response, and the size of each group."""
    rewards = _finite(rewards)
    if groups.shape != rewards.shape:
        raise ValueError(f"groups must be {tuple(rewards.shape)} like rewards, got {tuple(groups.shape)}")
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


def _centered(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``r − group mean``, the group index of each response, and the size of each group.

    Exactly 0 where a group's rewards are equal: the rounding error of the mean must not look like signal.
    """
    centered, index, count = _prepare(rewards, groups)
    low = centered.new_full((len(count),), torch.inf).scatter_reduce_(0, index, centered, "amin")
    high = centered.new_full((len(count),), -torch.inf).scatter_reduce_(0, index, centered, "amax")
    for _ in range(2):
        centered = centered - (_group_sum(centered, index, len(count)) / count)[index]
    return torch.where((low == high)[index], 0.0, centered), index, count
