"""What trials at load allow for rounding."""

import torch

from poise.models import load_checks
from support.tiny_models import tiny


class TestStatesThatRoundingMoves:
    """A trained model has tokens at which rounding changes a state altogether; the other states must be right."""

    def setup_method(self):
        torch.manual_seed(0)
        self.expected = torch.randn(3, 3, 64)
        self.shaken = self.expected + 0.02 * torch.randn(3, 3, 64)
        self.shaken[1, 2] = torch.randn(64)

    def close(self, actual):
        return load_checks.states_close(actual, torch.stack([self.expected, self.shaken]), torch.bfloat16)

    def test_they_do_not_fail_a_trial(self):
        actual = self.expected + 0.02 * torch.randn(3, 3, 64)
        actual[1, 2] = torch.randn(64)
        assert (actual - self.expected).norm() > 0.3 * self.expected.norm()
        assert self.close(actual)

    def test_one_other_state_that_is_wrong_does(self):
        actual = self.expected + 0.02 * torch.randn(3, 3, 64)
        actual[2, 1] = 0.5 * self.expected[2, 1]
        assert not self.close(actual)

    def test_all_of_them_a_little_too_far_off_do(self):
        assert not self.close(1.12 * self.expected)
        assert not self.close(torch.full_like(self.expected, torch.nan))

    def test_another_state_altogether_does_wherever_it_is(self):
        self.shaken = torch.full_like(self.expected, torch.inf)
        assert not self.close(torch.randn(3, 3, 64))
        assert self.close(self.expected)

    def test_what_is_the_same_is_right_even_if_it_is_zero(self):
        zero = torch.zeros(3, 64)
        assert load_checks.states_close(zero, torch.stack([zero, zero]), torch.float32)
        assert not load_checks.states_close(zero + 1e-9, torch.stack([zero, zero]), torch.float32)

    def test_one_wild_log_probability_does_not_excuse_the_others(self):
        logp = -5 * torch.rand(32)
        shaken, actual = logp + 0.02 * torch.randn(32), logp + 0.02 * torch.randn(32)
        shaken[0], actual[0] = logp[0] - 12, logp[0] - 3
        assert load_checks.logp_close(actual, torch.stack([logp, shaken]), torch.bfloat16)
        assert not load_checks.logp_close(actual + 0.5, torch.stack([logp, shaken]), torch.bfloat16)

    def test_the_other_rounding_is_that_of_the_dtype_and_leaves_no_hook(self):
        policy, ids = tiny("llama"), torch.tensor([[5, 6, 7, 8]])
        plain, shaken = load_checks.states_of(policy, ids)
        assert 0 < float((shaken - plain).norm() / plain.norm()) < 1e-5
        assert torch.equal(plain, load_checks.states_of(policy, ids)[0])
