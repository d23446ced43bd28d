"""Advantages against hand-worked values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise.advantages import group_centered, group_zscore, leave_one_out, reinforce_pp

REWARDS = torch.tensor([3.0, 1.0, -1.0, 5.0, 5.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 2, 2])


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=1e-12, atol=1e-12)


def test_zscore():
    unit = 2 / (2 + 1e-6)  # the unbiased std of 3, 1, −1 is 2
    close(group_zscore(REWARDS, GROUPS), [unit, 0, -unit, 0, 0])


def test_centered():
    close(group_centered(REWARDS, GROUPS), [2, 0, -2, 0, 0])


def test_leave_one_out():
    close(leave_one_out(REWARDS, GROUPS), [3 - 0, 1 - 1, -1 - 2, 0, 0])


def test_leave_one_out_keeps_double_precision():
    rewards = torch.tensor([0.1, 0.7, 0.2, 0.9], dtype=torch.float64)
    others = [(rewards.sum() - r) / 3 for r in rewards]
    close(leave_one_out(rewards, torch.zeros(4, dtype=torch.long)), (rewards - torch.stack(others)).tolist())


def test_reinforce_pp():
    spread = (REWARDS - 2.6).square().mean()
    close(reinforce_pp(REWARDS), ((REWARDS - 2.6) / (spread + 1e-8).sqrt()).tolist())
    centered = torch.tensor([2.0, 0, -2, 0, 0], dtype=torch.float64)
    close(reinforce_pp(REWARDS, GROUPS), (centered / (8 / 5 + 1e-8) ** 0.5).tolist())


def test_reinforce_pp_over_tokens_counts_long_responses_more():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    close(
        reinforce_pp(torch.tensor([1.0, 0.0], dtype=torch.float64), mask=mask, eps=0.0), [0.25 / 0.1875**0.5, -(3**0.5)]
    )


@pytest.mark.parametrize("estimate", [group_zscore, group_centered, leave_one_out, lambda r, _: reinforce_pp(r)])
@given(value=st.floats(-1e4, 1e4, width=32), size=st.integers(2, 9))
def test_no_spread_is_exactly_zero(estimate, value, size):
    rewards = torch.full((2 * size,), value, dtype=torch.float32)
    groups = torch.arange(2).repeat_interleave(size)
    assert not estimate(rewards, groups).any()


@given(seed=st.integers(0, 999))
def test_order_of_responses_does_not_matter(seed):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(12, generator=g, dtype=torch.float64)
    groups = torch.arange(12) % 4
    order = torch.randperm(12, generator=g)
    for estimate in (group_zscore, group_centered, leave_one_out, reinforce_pp):
        torch.testing.assert_close(estimate(rewards, groups)[order], estimate(rewards[order], groups[order]))


def test_a_group_of_one_is_an_error_only_where_advantages_are_group_relative():
    lonely = torch.tensor([7, 7, 7, 2, 3])
    for estimate in (group_zscore, group_centered, leave_one_out, reinforce_pp):
        with pytest.raises(ValueError, match=r"group 2 \(response 3\) has one response"):
            estimate(REWARDS, lonely)
    assert reinforce_pp(REWARDS).any()


def test_rewards_that_are_not_finite_are_named():
    with pytest.raises(ValueError, match=r"rewards\[1\] = nan"):
        group_zscore(torch.tensor([1.0, torch.nan]), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"rewards must be \(B,\)"):
        reinforce_pp(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"groups must be \(5,\)"):
        group_zscore(REWARDS, GROUPS[:3])
