"""The loops of examples/: they learn, and say truly what they say."""

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch

import poise
from poise.batch import Prompt
from poise.tasks import Problem, Score
from support.pages import ROOT
from support.small_runs import run
from support.tiny_models import tiny

EXAMPLES = ROOT / "examples/own-loop"
sys.path.insert(0, str(EXAMPLES))

import critic  # noqa: E402
import one_step_off  # noqa: E402
import rl_loop  # noqa: E402


def test_the_script_for_trl_says_in_one_line_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit, match=r"^this example needs poise with the extra 'trl' \(.*\): docs/install.md"):
        runpy.run_path(str(ROOT / "examples/trl/sums.py"))


@pytest.mark.parametrize("name", ["rl_loop", "rl_loop_two_processes", "one_step_off", "critic"])
def test_an_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 75


@pytest.mark.slow
@pytest.mark.long
def test_the_loop_learns(monkeypatch):
    """Beside the model as it was, on the same problems."""
    learning = rl_loop.train(steps=30)[-8:]
    monkeypatch.setattr(poise, "backward", lambda *_: None)
    before = rl_loop.train(steps=30)[-8:]
    assert sum(learning) / 8 > sum(before) / 8 + 0.2


def test_the_loop_takes_a_method_of_two_phases_and_mini_batches(monkeypatch):
    steps, real = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args: steps.append(real(*args)))
    monkeypatch.setattr(rl_loop, "PROMPTS", 2)
    assert len(rl_loop.train("lopti(threshold=0.9)", steps=1)) == 1
    assert len(steps) == 2  # 16 responses: one mini-batch in each phase


def test_one_step_off(monkeypatch):
    monkeypatch.setattr(one_step_off, "PROMPTS", 2)
    history = one_step_off.train(steps=3)
    assert [step.age for step in history] == [0, 1, 1]
    assert history[0].weight == pytest.approx(1, abs=1e-4)
    assert all(abs(step.weight - 1) > 1e-6 for step in history[1:])


def test_the_estimate_of_the_critic():
    values, reward, decay = torch.tensor([0.5, 1.0, 2.0]), 3.0, 0.9
    assert critic.gae(values, reward, 1.0).tolist() == [2.5, 2.0, 1.0]  # reward less value
    assert critic.gae(values, reward, 0.0).tolist() == [0.5, 1.0, 1.0]  # the next value less this one
    deltas = [0.5, 1.0, 1.0]
    expected = [sum(decay**k * d for k, d in enumerate(deltas[t:])) for t in range(3)]
    assert critic.gae(values, reward, decay).tolist() == pytest.approx(expected)


class Always:
    """A sampler whose responses to problem p have the tokens p … and the reward p."""

    def __init__(self):
        self.policy = tiny("llama")

    def play(self, problems, seed):
        assert seed == 7
        rows = []
        for problem in problems:
            tokens = torch.full((4,), 11) + int(problem.id)
            own, logp = torch.tensor([True, True, False, True]), torch.full((4,), -1.0)
            score = Score(float(problem.id), True)
            rows.append(
                poise.Trajectory(problem, Prompt((7, 8)), tokens, own, score, "", True, logp=logp, entropy=-logp)
            )
        return rows


def test_the_critic_comes_to_know_the_reward():
    problems, sampler, memory, errors = [Problem(str(i), "?", "all", {}) for i in range(3)], Always(), None, []
    method = critic.Critic(group=2, ridge=0.01)
    for _ in range(3):
        trajectories, memory = method.collect(problems, sampler, 7, json.loads(json.dumps(memory)))
        errors.append(method.metrics(trajectories)["critic/error"])
        assert all(each.advantage.shape == each.tokens.shape for each in trajectories)
        assert not any(each.advantage[~each.own].any() for each in trajectories)
    assert trajectories[-1].advantage[-1].abs() < 0.1  # the last state has seen the tokens: nothing is left to learn
    first = critic.Critic(group=2).collect(problems, sampler, 7)[0]
    assert first[-1].advantage[-1] == 2.0  # before anything is known: the reward


@pytest.mark.usefixtures("short_evaluation")
def test_the_critic_trains(tmp_path):
    folder, _ = run(tmp_path, f"algorithm={EXAMPLES / 'critic.py'}:Critic", "steps=2", "evaluation=off")
    first, second = folder.metrics()
    assert second["critic/error"] < first["critic/error"]
    assert first["optim/steps"] == 1
    advantages = folder.tokens(2)[0]["advantage"]
    assert len(advantages.unique()) > 100  # one per token


SHARED = """
import sys
from dataclasses import replace
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import rl_loop_two_processes as two
import poise

two.PROMPTS = 2
policy = two.train(steps=1)
rank, method = dist.get_rank(), poise.regulators.parse(two.METHOD)
weights = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
others = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(others, weights)
assert torch.equal(*others), "the models differ"

task = poise.tasks.get("kk", people=2)
sampler = poise.Sampler(policy, poise.engines.choose(policy), task, max_tokens=40)
problems = poise.tasks.draw(task, "train", seed=rank, count=2 + rank)  # processes may have unequal shares
mine, _ = poise.Grpo(4).collect(problems, sampler, seed=rank)
policy.model.double()


def gradient(trajectories, backward):
    batch = poise.make_batch(trajectories, policy)
    gradients = []
    for phase in method(batch):
        assert backward(policy, batch, phase) not in (None, False)
        gradients += [parameter.grad.flatten().clone() for parameter in policy.parameters()]
    return torch.cat(gradients)


def difference(mine):
    shared = gradient(mine, two.backward)
    everyones = [None, None]
    dist.all_gather_object(everyones, [replace(each, group=(rank, each.group), episode=None) for each in mine])
    alone = gradient(sum(everyones, []), poise.backward)
    assert alone.dtype == torch.float64
    return float((shared - alone).abs().max() / alone.abs().max())


equal = [replace(each, score=replace(each.score, reward=1.0)) for each in mine]  # no advantage: no gradient
errors = [difference(mine), difference(equal if rank else mine)]
if rank == 0:
    print("error", max(errors))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path):
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(script), str(EXAMPLES)], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step   1  reward" in done.stdout
    assert float(done.stdout.split("error")[1]) < 1e-12
