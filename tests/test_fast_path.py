"""A training run through the packed pass and the fused head tracks the run through padding and all logits."""

import pytest
import torch
import trajectories


def test_twenty_steps_in_float64_are_the_same():
    made = trajectories.sampled("cpu")
    losses, moved = trajectories.fast(made, "cpu", torch.float64, micro_tokens=700)
    expected, reference = trajectories.plain(made, "cpu", torch.float64)
    assert reference.norm() > 0.1
    assert losses == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert (moved - reference).norm() < 1e-6 * reference.norm()


def test_masters_keep_what_bfloat16_would_lose():
    """Twenty steps of bfloat16 with float32 masters end nearer to float64 than weights rounded at every step could."""
    made = trajectories.sampled("cpu")
    _, reference = trajectories.fast(made, "cpu", torch.float64)
    _, moved = trajectories.fast(made, "cpu", torch.bfloat16)
    _, padded = trajectories.plain(made, "cpu", torch.bfloat16)
    assert (moved - reference).norm() <= 1.2 * (padded - reference).norm()
    start = trajectories.weights(trajectories.start("cpu", torch.bfloat16)[0])
    ends = start + reference
    rounded = ends.bfloat16().double()  # the best that weights without masters could hold
    assert (start + moved - ends).norm() < (rounded - ends).norm()
