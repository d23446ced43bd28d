"""From samples to tensors: who computes which log-probabilities."""

import pytest
import torch

from poise.algorithms.base import Sample
from poise.algorithms.collected import collect
from poise.models.scoring import score_all
from poise.objective import importance_weights
from poise.tasks import Problem, Score
from poise.training.batches import stack, token_batch, with_verdict
from support.tiny_models import tiny


def sample(reward=1.0, failed=None, **given):
    tokens, problem = torch.tensor([11, 12, 13]), Problem("p", "?", "all", {})
    score = Score(reward, reward > 0, failed=failed)
    return Sample(problem, [7, 8], tokens, tokens > 0, score, "", True, **{"advantage": 1.0, **given})


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


def test_rows_with_an_advantage_of_their_own_are_nothing_to_compare_others_with():
    own, other = sample(group=0), sample(0.0, group=0, advantage=None)
    lost = sample(0.0, "hangs", group=0, advantage=None)
    judged, _ = with_verdict([own, other, lost])
    assert judged == [own]
    judged, _ = with_verdict([own, other, sample(2.0, group=0, advantage=None), lost])
    assert [row.score.reward for row in judged] == [1.0, 0.0, 2.0]
    batch = token_batch(judged, stack(judged, tiny("llama"), 1.0), tiny("llama"), advantage="group-centered")
    assert batch.advantages.tolist() == [1.0, -1.0, 1.0]

    class Mixed:
        def collect(self, *_):
            return [own, other], None

    with pytest.raises(ValueError, match="sample 1 has nothing to be compared with"):
        collect(Mixed(), [], None, 0, name="mixed", advantage="group-zscore")
