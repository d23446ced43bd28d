"""From samples to tensors: who computes which log-probabilities."""

import pytest
import torch

from poise.algorithms.base import Sample
from poise.models.scoring import score_all
from poise.objective import importance_weights
from poise.tasks import Problem, Score
from poise.training.batches import stack, token_batch
from support.tiny_models import tiny


def sample(**given):
    tokens = torch.tensor([11, 12, 13])
    problem = Problem("p", "?", "all", {})
    return Sample(problem, [7, 8], tokens, tokens > 0, Score(1.0, True), "", True, advantage=1.0, **given)


@pytest.mark.parametrize("recompute", [False, True])
def test_importance_weights_are_of_what_the_sampler_reported_and_1_where_it_reported_nothing(recompute):
    policy, mine, other = tiny("llama"), torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.5])
    rows = [sample(logp=mine, sampler_logp=other), sample(sampler_logp=other), sample(logp=mine), sample()]
    rollouts = stack(rows, policy, 0.7)
    batch = token_batch(rows, rollouts, policy, temperature=0.7, recompute=recompute)
    scored = score_all(policy, rollouts, 0.7)[0][1]
    torch.testing.assert_close(batch.old_logp, torch.stack([mine, scored, mine, scored]), rtol=1e-4, atol=1e-4)
    expected = torch.stack([mine - other, scored - other, 0 * mine, 0 * mine]).exp()
    torch.testing.assert_close(importance_weights(batch, 1e9), expected, rtol=1e-3, atol=1e-4)
