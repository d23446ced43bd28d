"""From samples to tensors: who computes which log-probabilities."""

from dataclasses import replace

import pytest
import torch

from poise.algorithms import Grpo
from poise.algorithms.base import Sample
from poise.algorithms.collected import collect
from poise.algorithms.sampler import Sampler
from poise.engines.native.engine import NativeEngine
from poise.models.policy import load_policy
from poise.models.scoring import score_all
from poise.objective import importance_weights
from poise.tasks import Problem, Score
from poise.training.batches import stack, token_batch, with_verdict
from support.small_runs import run
from support.tiny_models import tiny
from support.twice import Twice


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


def test_a_response_whose_group_has_failed_stays_where_no_groups_are_compared():
    rows = [sample(1.0, group=0, advantage=None), sample(0.0, "hangs", group=0, advantage=None)]
    rows += [sample(reward, group=1, advantage=None) for reward in (0.0, 2.0)]
    assert [row.score.reward for row in with_verdict(rows)[0]] == [0.0, 2.0]
    judged, metrics = with_verdict(rows, "reinforce-pp")
    assert ([row.score.reward for row in judged], metrics) == ([1.0, 0.0, 2.0], {"reward/failed": 1.0})


@pytest.mark.parametrize("kind", ["group-centered", "reinforce-pp"])
def test_large_rewards_keep_their_differences(kind):
    """float32 has steps of 8 at 1e8."""
    policy = tiny("llama")
    near, far = ([sample(r + shift, group=0, advantage=None) for r in (1.0, 2.0, 4.0, 5.0)] for shift in (0.0, 1e8))
    near, far = (token_batch(rows, stack(rows, policy, 1.0), policy, advantage=kind) for rows in (near, far))
    assert torch.equal(near.advantages, far.advantages)
    assert near.advantages.dtype == torch.float32


@torch.no_grad()
def test_hidden_states_come_from_a_forward_pass_over_the_rows_asked_for():
    """Of dialogues with environment tokens in between, and of rows that an algorithm has changed."""
    policy, task = load_policy("embedded", device="cpu"), Twice()
    problems = [next(task.problems("train", seed)) for seed in (0, 1)]
    samples, _ = Grpo(group=3).collect(problems, Sampler(policy, NativeEngine(policy), task, max_tokens=10), 7)
    assert not all(sample.own.all() for sample in samples)
    samples[1] = replace(samples[1], prompt=samples[1].prompt[1:], logp=None, entropy=None)
    rollouts = stack(samples, policy, 1.0)
    batch = token_batch(samples, rollouts, policy, hidden=True)
    found = batch.hidden_of(torch.tensor([4, 1, 0]))
    expected = policy.padded_hidden(rollouts)[[4, 1, 0]]
    mask = rollouts.mask[[4, 1, 0]]
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=1e-4)


def test_a_run_with_nthr(tmp_path):
    folder, _ = run(tmp_path, "regulator=nthr", "steps=1", "group=8", "evaluation=off")
    assert "reg/all/scored_share" in folder.metrics()[0]
