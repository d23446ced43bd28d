"""From trajectories to tensors: who computes which log-probabilities."""

from dataclasses import replace

import pytest
import torch

from poise import advantages, regulators, trainer
from poise.batch import Prompt
from poise.models.loading import load_policy
from poise.models.policy import Policy
from poise.models.scoring import HiddenStates, score_batch
from poise.objective import Settings, importance_weights
from poise.sampling.algorithms import Grpo
from poise.sampling.native.engine import NativeEngine
from poise.sampling.sampler import Sampler
from poise.sampling.trajectories import Trajectory, collect
from poise.tasks import Problem, Score
from poise.training.batches import drop_failed, make_batch, phases_of
from poise.training.update import NotFiniteError
from support.small_runs import run
from support.tiny_models import exact, tiny
from support.twice import Twice


def sample(reward=1.0, failed=None, **given):
    tokens, problem = torch.tensor([11, 12, 13]), Problem("p", "?", "all", {})
    score = Score(reward, reward > 0, failed=failed)
    return Trajectory(problem, Prompt((7, 8)), tokens, tokens > 0, score, "", True, **{"advantage": 1.0, **given})


@pytest.mark.parametrize("recompute", [False, True])
def test_importance_weights_are_of_what_the_sampler_reported(recompute):
    """Where it reported nothing they are 1, unless the weights have changed since: then the policy scores all rows."""
    policy, mine, other = tiny("llama"), torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.5])
    rows = [sample(logp=mine, sampler_logp=other), sample(sampler_logp=other), sample(logp=mine), sample()]
    batch = make_batch(rows, policy, temperature=0.7, recompute=recompute)
    scored = score_batch(policy, batch, 0.7)[0][1]
    old = [scored] * 4 if recompute else [mine, scored, mine, scored]
    torch.testing.assert_close(batch.old_logp, torch.stack(old), rtol=1e-4, atol=1e-4)
    sampler = [other, other, mine, scored]
    expected = (torch.stack(old) - torch.stack(sampler)).exp()
    torch.testing.assert_close(importance_weights(batch, Settings(importance_cap=1e9)), expected, rtol=1e-3, atol=1e-4)


def test_rows_with_an_advantage_of_their_own_are_nothing_to_compare_others_with():
    own, other = sample(group=0), sample(0.0, group=0, advantage=None)
    lost = sample(0.0, "hangs", group=0, advantage=None)
    judged, _ = drop_failed([own, other, lost])
    assert judged == [own]
    judged, _ = drop_failed([own, other, sample(2.0, group=0, advantage=None), lost])
    assert [row.score.reward for row in judged] == [1.0, 0.0, 2.0]
    batch = make_batch(judged, tiny("llama"), advantage="group-centered")
    assert batch.advantages.tolist() == [1.0, -1.0, 1.0]

    class Mixed:
        def collect(self, *_):
            return [own, other], None

    with pytest.raises(ValueError, match="sample 1 has no other sample to be compared with"):
        collect(Mixed(), [], None, 0, name="mixed", advantage=advantages.get("group-zscore"))


def test_a_response_whose_group_has_failed_stays_where_no_groups_are_compared():
    rows = [sample(1.0, group=0, advantage=None), sample(0.0, "hangs", group=0, advantage=None)]
    rows += [sample(reward, group=1, advantage=None) for reward in (0.0, 2.0)]
    assert [row.score.reward for row in drop_failed(rows)[0]] == [0.0, 2.0]
    judged, metrics = drop_failed(rows, "reinforce-pp")
    assert ([row.score.reward for row in judged], metrics) == ([1.0, 0.0, 2.0], {"reward/failed": 1.0})


@pytest.mark.parametrize("kind", ["group-centered", "reinforce-pp"])
def test_large_rewards_keep_their_differences(kind):
    """float32 has steps of 8 at 1e8."""
    policy = tiny("llama")
    near, far = ([sample(r + shift, group=0, advantage=None) for r in (1.0, 2.0, 4.0, 5.0)] for shift in (0.0, 1e8))
    near, far = (make_batch(rows, policy, advantage=kind) for rows in (near, far))
    assert torch.equal(near.advantages, far.advantages)
    assert near.advantages.dtype == torch.float32


@pytest.mark.parametrize("kind", advantages.TABLE)
def test_close_rewards_keep_their_differences(kind):
    """float32 has steps of 0.00006 below 1,000."""
    rewards = [999.0, 999.001, 999.0, 999.002, 3.0, 4.0, 5.0, 3.0]
    for count in (4, 8):  # alone, and beside a group that is far apart
        rows = [sample(r, group=i // 4, advantage=None) for i, r in enumerate(rewards[:count])]
        batch = make_batch(rows, tiny("llama"), advantage=kind)
        values = torch.tensor(rewards[:count], dtype=torch.float64)
        exact = advantages.get(kind)(values, batch.groups, batch.mask)
        torch.testing.assert_close(batch.advantages, exact.float(), rtol=1e-6, atol=0)


def test_rewards_that_float32_tells_apart_stay_in_float32():
    for rewards in ((1.0, 0.99, 0.999), (0.1 + 0.2, 0.3, 0.3), (1.0, 1.0, 1.0)):
        batch = make_batch([sample(r, group=0, advantage=None) for r in rewards], tiny("llama"))
        assert batch.rewards.dtype == torch.float32


@torch.no_grad()
def test_hidden_states_come_from_a_forward_pass_over_the_rows_asked_for():
    """Of dialogues with environment tokens in between, and of rows that an algorithm has changed."""
    policy, task = load_policy("embedded", device="cpu"), Twice()
    problems = [next(task.problems("train", seed)) for seed in (0, 1)]
    samples, _ = Grpo(group=3).collect(problems, Sampler(policy, NativeEngine(policy), task, max_tokens=10), 7)
    assert not all(sample.own.all() for sample in samples)
    samples[1] = replace(samples[1], prompt=Prompt(samples[1].prompt.tokens[1:]), logp=None, entropy=None)
    batch = make_batch(samples, policy, hidden=True)
    found = batch.hidden_of(torch.tensor([4, 1, 0]))
    expected = policy.padded_hidden(batch)[[4, 1, 0]]
    mask = batch.mask[[4, 1, 0]]
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=1e-4)


def graded(*correct):
    """Groups of three responses, with these verdicts."""
    rows = []
    for number, verdict in enumerate(correct):
        tokens = torch.tensor([11 + number, 12, 13, 14 + number])[: 2 + number % 3]
        score = Score(float(verdict), verdict)
        group = number // 3
        rows.append(replace(
            sample(logp=torch.full((len(tokens),), -1.0)), tokens=tokens, own=tokens > 0, score=score, group=group,
            advantage=None, prompt=Prompt((7, 8, 20 + group)),
        ))  # fmt: skip
    return rows


def test_nthr_reads_the_states_of_the_pass_that_recomputes_log_probabilities(monkeypatch):
    """Only groups with both kinds of responses keep their states, until the regulator has run."""
    policy, passes, real = exact(tiny("llama")), [], Policy.hidden
    monkeypatch.setattr(Policy, "hidden", lambda self, *rest: passes.append(1) or real(self, *rest))
    rows = graded(True, True, False, False, False, False, True, False, True)
    batch = make_batch(rows, policy, recompute=True, hidden=True)
    assert set(batch.hidden.kept) == {0, 1, 2, 6, 7, 8}
    shared = phases_of(regulators.get("nthr"), rows, batch).phases[0]
    assert len(passes) == 1
    batch.hidden.forget()
    separate = phases_of(regulators.get("nthr"), rows, batch).phases[0]
    assert len(passes) == 2
    assert shared.metrics == separate.metrics
    assert shared.metrics["scored_share"] == pytest.approx(2 / 3)
    torch.testing.assert_close(shared.tokens["nthr"], separate.tokens["nthr"], equal_nan=True, rtol=1e-10, atol=1e-10)
    assert torch.equal(shared.policy, separate.policy)


def test_rows_without_log_probabilities_are_scored_once(monkeypatch):
    policy, passes, real = tiny("llama"), [], Policy.score
    monkeypatch.setattr(Policy, "score", lambda self, *rest: passes.append(1) or real(self, *rest))
    batch = make_batch([sample(), sample(logp=torch.tensor([-1.0, -2.0, -3.0]))], policy, recompute=True)
    assert len(passes) == 1
    assert torch.equal(batch.sampler_logp[0], batch.old_logp[0])
    assert batch.sampler_logp[1].tolist() == [-1.0, -2.0, -3.0]


def test_the_update_of_a_run_holds_no_states(tmp_path, monkeypatch):
    kept, real = [], trainer.update
    monkeypatch.setattr(
        trainer, "update", lambda policy, optimizer, batch, *rest: kept.append(states[-1].kept) or real(
            policy, optimizer, batch, *rest)
    )  # fmt: skip
    states, init = [], HiddenStates.__init__
    monkeypatch.setattr(HiddenStates, "__init__", lambda self, *rest: init(self, *rest) or states.append(self))
    run(tmp_path, "regulator=nthr", "steps=1", "group=8", "evaluation=off", "rollout.old_logp=recomputed")
    assert kept == [{}]


def test_a_run_with_nthr(tmp_path):
    folder, _ = run(tmp_path, "regulator=nthr", "steps=1", "group=8", "evaluation=off")
    assert "reg/all/scored_share" in folder.metrics()[0]


def test_an_advantage_may_be_one_per_token():
    """Beside rows with one number, and rows that are normalised in their group."""
    own = torch.tensor([0.5, -1.0, 2.0])
    rows = [sample(advantage=own), sample(advantage=-3.0)]
    rows += [sample(reward, group=0, advantage=None, logp=torch.zeros(3)) for reward in (1.0, 0.0)]
    rows[1] = replace(rows[1], tokens=torch.tensor([11, 12]), own=torch.tensor([True, True]))
    batch = make_batch(rows, tiny("llama"), advantage="group-centered")
    expected = [[0.5, -1.0, 2.0], [-3.0, -3.0, 0.0], [0.5] * 3, [-0.5] * 3]
    assert batch.advantages.tolist() == expected
    assert batch.token_advantages.tolist() == expected
    (phase,) = regulators.parse("ar")(batch)
    assert phase.policy.shape == (4, 3)


def test_probabilities_that_are_not_finite_are_refused_wherever_they_come_from():
    wrong, policy = torch.tensor([-1.0, torch.nan, -1.0]), tiny("llama")
    with pytest.raises(NotFiniteError, match="the model's probabilities are not finite"):
        make_batch([sample(logp=wrong)], policy)
    hole = replace(sample(logp=wrong), own=torch.tensor([True, False, True]))
    assert make_batch([hole], policy).mask.sum() == 2  # nobody reads it
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[50] = torch.nan
    with pytest.raises(NotFiniteError):
        make_batch([sample()], policy)
