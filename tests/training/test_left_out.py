"""Problems that are too long, and steps in which no reward applies: a run goes on without them."""

import json

import pytest
import torch

from poise import tasks, trainer
from poise.models.loading import load_policy
from poise.runs.folder import RunFolder
from poise.sampling.sampler import LongPromptError
from poise.tasks import Problem, Score
from poise.training import config as configs
from poise.training.building import build_sampler
from support.command_line import fails, poise
from support.small_runs import SHORT, parameters, run


class Growing:
    """Problems of one to four words; the fourth is too long."""

    name = "growing"

    def problems(self, split, _):
        for number in range(10**6):
            yield Problem(f"{split}-{number}", "word " * (number % 4 + 1), "all", {})

    def score(self, _, text):
        return Score(float(len(text)), False)


@pytest.fixture(scope="module")
def policy():
    return load_policy("embedded", device="cpu")


def sampler(policy, task, longest):
    config = configs.load("tiny", ["device=cpu", f"rollout.max_prompt={longest}"])
    return build_sampler(config, policy, print, task=task)


def test_another_problem_is_drawn_for_one_that_is_too_long(policy):
    task = Growing()
    fourth = len(policy.encode("word " * 4))
    cut = sampler(policy, task, fourth - 1)
    found = tasks.draw(task, "train", 0, 5, cut.fits)
    assert [problem.id for problem in found] == ["train-0", "train-1", "train-2", "train-4", "train-5"]
    assert cut.counts.turns["too_long"] == 1
    whole = tasks.draw(task, "train", 0, 5, sampler(policy, task, fourth).fits)
    assert whole == tasks.draw(task, "train", 0, 5)
    assert tasks.draw(task, "train", 0, 0, cut.fits) == []
    short = sampler(policy, task, 1)
    with pytest.raises(LongPromptError, match=r"more than rollout\.max_prompt=1: raise it"):
        short.play(tasks.draw(task, "train", 0, 5, short.fits), seed=0)


def test_a_finite_task_leaves_them_out(policy):
    class Finite(Growing):
        def epoch(self, *_):
            return [Problem(str(n), "word " * n, "all", {}) for n in range(1, 7)]

    task = Finite()
    cut = sampler(policy, task, len(policy.encode("word " * 4)))
    assert [problem.id for problem in tasks.draw(task, "train", 0, 6, cut.fits)] == ["1", "2", "3", "4"]
    asked = {"seed": 0, "step_seed": 0, "count": 3, "fits": cut.fits}
    assert [problem.id for problem in tasks.training_problems(task, step=2, **asked)] == ["4"]


@pytest.mark.parametrize("name", ["sokoban", "frozenlake", "kk"])
def test_games_of_poises_own_are_measured_by_their_first_prompt(policy, name):
    task = tasks.get(name)
    (problem,) = tasks.draw(task, "train", 0, 1)
    assert sampler(policy, task, 2000).fits(problem)
    cut = sampler(policy, task, 2)
    assert not cut.fits(problem)
    with pytest.raises(LongPromptError, match=r"more than rollout.max_prompt=2: raise it"):
        cut.play([problem], 0)


def test_an_episode_of_the_users_own_is_not_begun_for_that(policy):
    class Mine(Growing):
        def episode(self, _):
            pytest.fail("begun")

    assert sampler(policy, Mine(), 1).fits(Problem("0", "a word", "all", {}))


@pytest.mark.usefixtures("short_evaluation")
def test_a_run_with_long_problems_ends(tmp_path):
    """Puzzles of two and three people, of which those of three are too long."""
    mixed = [*SHORT, "task.people=2-3", "steps=2", "evaluation.problems=4"]
    policy, task = load_policy("embedded", device="cpu"), tasks.get("kk", people="2-3")
    lengths = sorted(len(policy.encode(problem.prompt)) for problem in tasks.draw(task, "train", 0, 40))
    folder, summary = run(tmp_path, *mixed, f"rollout.max_prompt={lengths[20]}")
    assert summary["steps"] == 2
    assert sum(line.get("rollout/too_long", 0) for line in folder.metrics()) > 0


NONE = """
def sometimes(completions, trainer_state, **rest):
    if trainer_state.global_step == 1:
        return [None] * len(completions)
    return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_a_step_in_which_no_reward_applies_is_skipped_with_a_word(tmp_path, capsys):
    rows = [{"question": "word " * (i + 1), "answer": str(i)} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(NONE)
    settings = [
        "model=embedded", "steps=3", "prompts=4", "group=3", "rollout.max_tokens=6", "evaluation=off", "device=cpu",
        "checkpoint_every=1", "keep_checkpoints=3", "optim.lr=1e-4", f"data={tmp_path}/rows.jsonl",
        f"reward={tmp_path}/mine.py:sometimes",
    ]  # fmt: skip
    config = configs.load(None, [*settings, f"run={tmp_path / 'run'}"])
    trainer.train(config)
    assert "step 2: no group has two attempts with a reward" in " ".join(capsys.readouterr().out.split())
    folder = RunFolder(tmp_path / "run")
    first, second, third = folder.metrics()
    assert (first["optim/steps"], second["optim/steps"], third["optim/steps"]) == (1, 0, 1)
    assert "reward/mean" not in second
    assert second["tokens/total"] > first["tokens/total"]
    weights = [(folder.path / f"checkpoints/step-00000{n}/parameters.safetensors").read_bytes() for n in (1, 2, 3)]
    assert weights[0] == weights[1] != weights[2]
    cut = configs.load(None, [*settings, f"run={tmp_path / 'cut'}", "steps=2"])  # it ends with the step that is skipped
    trainer.train(cut, quiet=True)
    trainer.train(cut.model_copy(update={"steps": 3}), resume=True, quiet=True)
    ends = [parameters(RunFolder(tmp_path / name)) for name in ("run", "cut")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


ENVIRONMENT = """
import pathlib

class Env:
    def reset(self, **row):
        grown = (pathlib.Path(__file__).parent / "run/checkpoints/step-000001").exists()
        return "say " * (60 if grown else 3)

    def get_reward(self):
        return 0.5
"""


@pytest.mark.slow
def test_the_limit_that_ended_a_run_may_be_raised(tmp_path):
    """Where only an episode of the user's own could tell, a prompt that is too long ends the run."""
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    settings = [
        "model=embedded", "steps=2", "prompts=2", "group=2", "rollout.max_tokens=6", "evaluation=off", "device=cpu",
        "checkpoint_every=1", "rollout.max_prompt=40", f"environment={tmp_path}/env.py:Env", f"run={tmp_path / 'run'}",
    ]  # fmt: skip
    assert "more than rollout.max_prompt=40: raise it" in fails("train", *settings)
    assert poise("train", "--resume", tmp_path / "run", "--trust", "rollout.max_prompt=200").exit_code == 0
    assert len(RunFolder(tmp_path / "run").metrics()) == 2
