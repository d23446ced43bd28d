"""Sampled tokens are counted, exactly and across interruptions, and may end a run."""

import json

import pytest

from poise import tasks, trainer
from poise.runs.folder import RunFolder
from poise.sampling.sampler import Sampler
from poise.trainer import TrainError
from poise.training import config as configs
from poise.training.config.schema import ConfigError
from support.command_line import poise
from support.scripted import Scripted
from support.small_runs import SHORT, SMALL, make, parameters, run
from support.tiny_models import tiny

FEW = (*SHORT, "checkpoint_every=1", "evaluation.problems=1")


def totals(folder):
    return [line["tokens/total"] for line in folder.metrics()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps without a budget."""
    return run(tmp_path_factory.mktemp("whole"), *FEW, "steps=3", "evaluation=off")[0]


@pytest.mark.usefixtures("short_evaluation")
def test_every_sampled_token_of_training_is_counted(tmp_path):
    folder, summary = run(tmp_path, *FEW, "steps=3", "evaluation.every=1", "rollouts_every=1")
    own = [len(folder.tokens(step)[0]["id"]) for step in (1, 2, 3)]
    lines = folder.metrics()
    assert [line["tokens/sampled"] for line in lines] == own
    assert totals(folder) == [own[0], own[0] + own[1], sum(own)]
    assert summary["tokens"] == sum(own)
    for line in lines:
        assert line["time/tokens_per_s"] * line["time/step"] == pytest.approx(line["tokens/sampled"])


def test_the_tokens_of_other_models_are_counted_too_and_apart():
    policy = tiny("llama")
    policy.encode, policy.decode = lambda *_: [1, 2], str
    task = tasks.get("kk")

    def sampler(length, **others):
        return Sampler(policy, Scripted(policy, lambda *_: [3] * length), task, max_tokens=9, others=others)

    whole = sampler(4, receiver=sampler(2))
    problems = tasks.draw(task, "train", 0, 3)
    whole.play(problems, 0)
    whole.others["receiver"].play(problems[:2], 0, begun=[[5, 6, 7]] * 2)  # what they begin with was sampled before
    whole.greedy().play(problems[:1], 0)
    assert whole.counts.tokens == {"policy": 4 * 4, "receiver": 2 * 2}


@pytest.mark.usefixtures("short_evaluation")
def test_a_budget_ends_the_run_with_the_step_that_reaches_it(tmp_path, whole, capsys):
    first, _, last = totals(whole)
    for budget, steps in ((first, 1), (first + 1, 2), (10 * last, 3)):
        config = make(tmp_path, *FEW, "steps=3", f"budget={budget}", "evaluation.every=1", name=str(budget))
        capsys.readouterr()
        summary = trainer.train(config)
        folder = RunFolder.open(config.run, resume=False)
        assert (summary["steps"], summary["tokens"]) == (steps, totals(whole)[steps - 1])
        assert totals(folder) == totals(whole)[:steps]
        assert folder.checkpoints()[-1] == steps
        assert not any(key.startswith("eval/") for key in folder.metrics()[-1])  # the evaluation after it says the same
        shown = capsys.readouterr().out
        said = f"budget={budget} is spent" if steps < 3 else f"steps=3 ended the run before budget={budget}"
        assert f"{said}: {summary['tokens']} tokens were sampled in {steps} steps" in shown
        assert f"{steps}/3  {summary['tokens']:,}/{budget:,} tokens" in shown
        assert shown.count("sample  reward") == (3 if steps == 1 else 6)  # at the first step and the last


@pytest.mark.usefixtures("short_evaluation")
def test_a_resumed_run_counts_on_and_may_get_a_larger_budget(tmp_path, whole):
    short, _ = run(tmp_path, *FEW, "steps=3", "budget=1", name="short")
    assert totals(short) == totals(whole)[:1]
    again = poise("train", "--resume", f"run={short.path}")
    assert "already at step 1: nothing to train; to continue, raise budget=" in again.output
    metrics = short.path / "metrics.jsonl"
    metrics.write_text("")  # the checkpoint knows
    assert poise("train", "--resume", f"run={short.path}", "budget=1e9").exit_code == 0
    assert totals(short) == totals(whole)[1:]
    assert short.read_json("summary.json")["tokens"] == totals(whole)[-1]
    assert short.config["budget"] == 10**9
    for name, value in parameters(whole).items():
        assert value.equal(parameters(short)[name])


@pytest.mark.usefixtures("short_evaluation")
def test_metrics_that_are_ahead_of_the_checkpoint_do_not_count_twice(tmp_path, whole):
    ahead, _ = run(tmp_path, *FEW, "steps=2", name="ahead")
    with (ahead.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "tokens/sampled": 10**6, "tokens/total": 10**7}) + "\n")
    trainer.train(configs.restore({**ahead.config, "steps": 3}), resume=True, quiet=True)
    assert totals(ahead) == totals(whole)


def test_a_budget_that_is_spent_already_is_refused(tmp_path):
    folder, _ = run(tmp_path, *FEW, "steps=1")
    before = (folder.path / "config.json").read_text()
    with pytest.raises(TrainError, match=r"budget=5: the run in .* has sampled \d+ tokens already, and nothing was"):
        trainer.train(configs.restore({**folder.config, "budget": 5}), resume=True, quiet=True)
    assert (folder.path / "config.json").read_text() == before


@pytest.mark.parametrize(("typed", "budget"), [("2000000", 2_000_000), ("2e6", 2_000_000), ("3e12", 3 * 10**12)])
def test_a_budget_is_a_count_however_it_is_typed(typed, budget):
    assert configs.load("tiny", [f"budget={typed}"]).budget == budget


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("0", "budget = 0: must be at least 1"),
        ("-5", "budget = -5: must be at least 1"),
        ("2.5", r"budget = 2\.5: must be a whole number"),
        ("2M", "budget = '2M': must be a number"),
        ("1e30", "budget = 1e\\+30: "),
        ("true", "budget = True: must be a number"),
    ],
)
def test_a_budget_that_is_no_count(typed, message):
    with pytest.raises(ConfigError, match=message):
        configs.load("tiny", [*SMALL, f"budget={typed}"])
