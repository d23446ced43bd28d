"""Advantages against hand-worked values."""

import math

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


ESTIMATES = {
    "group_zscore": group_zscore,
    "group_centered": group_centered,
    "leave_one_out": leave_one_out,
    "reinforce_pp": lambda rewards, _: reinforce_pp(rewards),
    "reinforce_pp of groups": reinforce_pp,
    "reinforce_pp over tokens": lambda r, g: reinforce_pp(r, g, mask=torch.arange(9) < torch.arange(1, 10)[:, None]),
}


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 3e14])
def test_rewards_of_any_size_neither_overflow_nor_vanish(name, size):
    estimate, groups = ESTIMATES[name], torch.arange(3).repeat(3)
    rewards = torch.tensor([3.0, -1.0, 2.0, 0.5, 1.0, -3.0, -3.0, 1.0, 2.0]) * size
    found, expected = estimate(rewards, groups), estimate(rewards.double(), groups)
    torch.testing.assert_close(found.double() / expected.abs().max(), expected / expected.abs().max())


@pytest.mark.parametrize("exponent", [1, 20, 40])
def test_a_power_of_two_changes_no_digit(exponent):
    rewards, groups = torch.randn(9, generator=torch.Generator().manual_seed(0)), torch.arange(3).repeat(3)
    larger = rewards * 2.0**exponent
    assert torch.equal(group_zscore(larger, groups, eps=0.0), group_zscore(rewards, groups, eps=0.0))
    assert torch.equal(reinforce_pp(larger, groups, eps=0.0), reinforce_pp(rewards, groups, eps=0.0))
    assert torch.equal(group_centered(larger, groups), group_centered(rewards, groups) * 2.0**exponent)
    assert torch.equal(leave_one_out(larger, groups), leave_one_out(rewards, groups) * 2.0**exponent)


def test_a_group_of_large_rewards_leaves_the_others_alone():
    rewards, groups = torch.tensor([1e15, -1e15, 1e-8, 2e-8]), torch.tensor([0, 0, 1, 1])
    alone = group_zscore(rewards[2:], groups[2:])
    assert torch.equal(group_zscore(rewards, groups)[2:], alone)
    assert alone.abs().min() > 1e-3


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2e15])
def test_every_estimate_refuses_rewards_that_are_not_finite_or_overflow(name, bad):
    rewards = torch.tensor([1.0, 2, 3, 4, 5, bad, 7, 8, 9])
    with pytest.raises(ValueError, match=r"rewards\[5\] = .*: rewards must be finite and at most 1e\+15"):
        ESTIMATES[name](rewards, torch.arange(3).repeat(3))


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("offset", [100.0, 1e6, 2.0**24, -(2.0**24), 2.0**49])
def test_an_offset_of_all_rewards_does_not_drown_their_spread(name, offset):
    step = 2.0 ** max(-10, math.frexp(offset)[1] - 24)  # what float32 can add to the offset
    spread, groups = (
        torch.tensor([0.0, 2.0, 4.0, 2.0, 2.0, 4.0, 2.0, 0.0, 6.0]) * step,
        torch.zeros(9, dtype=torch.long),
    )
    found = ESTIMATES[name](spread + offset, groups)
    expected = ESTIMATES[name](spread.double() + offset, groups).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_a_response_without_tokens_does_not_set_the_scale_of_the_others():
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]])
    found = reinforce_pp(torch.tensor([1.0, 0.0, 1.0, 1e15]), mask=mask)
    assert torch.equal(found[:3], reinforce_pp(torch.tensor([1.0, 0.0, 1.0]), mask=mask[:3]))
    assert found[3] == 0
