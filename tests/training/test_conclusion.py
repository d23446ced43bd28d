"""The last lines of a run, from the numbers of its summary."""

import shlex

import pytest

from poise import config as configs
from poise import trainer
from poise.comparison.plan import read_plan
from poise.runs.folder import RunFolder
from poise.runs.warnings import RunWarning
from poise.training.accuracy import clopper_pearson
from poise.training.conclusion import conclusion, learned
from support.small_runs import SHORT, make

DEMO = {"avg@4": (0.353, 0.575), "greedy": (0.683, 0.660), "pass@4": (0.747, 0.780)}  # docs/results/demo.md


def summary(values, width=0.05, n=300):
    """A summary with these values before and after, each with an interval of ± ``width``."""

    def side(at):
        table = {name: {"value": v[at], "low": v[at] - width, "high": v[at] + width} for name, v in values.items()}
        return {"accuracy": table["avg@4"]["value"], "n": n, "samples": 4, "table": table}

    return {"steps": 50, "before": side(0), "after": side(1)}


def lines(tmp_path, values=DEMO, *, settings=(), warnings=(), **more):
    config = configs.load("demo", [f"run={tmp_path / 'run'}", *settings])
    return conclusion(config, RunFolder(config.run), summary(values, **more), warnings)


def test_the_demo_is_told_honestly(tmp_path):
    place = tmp_path / "run"
    told = lines(tmp_path)
    assert told[0] == "learned: avg@4 rose from 0.353 to 0.575, by more than the 95 % intervals"
    assert told[1] == "not learned: greedy accuracy 0.683 → 0.660 (by the 95 % intervals, no gain of 5 points)"
    assert told[2].startswith("cannot tell: pass@4 0.747 → 0.780 (the 95 % intervals overlap, and a gain of 5 points")
    assert told[3] == (
        "  300 held-out problems show changes from about 10 points on; "
        "for 5 points it takes about evaluation.problems=1200"
    )
    assert "no sign that it solves more problems" in told[4]
    assert told[5] == "try next:"
    assert told[6::2] == [
        "  # read the responses, token by token",
        "  # train on",
        "  # another method",
        "  # which one is better: one run cannot tell",
    ]
    assert told[7::2] == [
        f"  poise report {place}",
        f"  poise train --resume run={place} steps=100",
        f"  poise train demo regulator=ar run={place}-ar",
        f"  poise compare demo 'regulator=grpo; ar' seeds=6 run={place}-compare",
    ]


def commands(told):
    """The commands of the last lines, as a shell splits them, by what follows ``poise``."""
    return [shlex.split(line)[1:] for line in told if line.startswith("  poise ")]


def test_commands_have_the_settings_of_the_run_and_can_be_pasted(tmp_path):
    settings = [
        "regulator=ar(alpha=0.3) | lopti", "optim.lr=3e-5", "evaluation.problems=50", "lora.targets=[q_proj, v_proj]",
        "task.instruction=Say it; briefly, it's #1", "seed=3", "tracking=tensorboard",
    ]  # fmt: skip
    config = configs.load("demo", [*settings, f"run={tmp_path / 'my run'}"])
    told = conclusion(config, RunFolder(config.run), summary(DEMO))
    _, resume, other, comparison = commands(told)
    assert resume == ["train", "--resume", f"run={config.run}", "steps=100"]
    assert other[:2] == ["train", "demo"]
    assert configs.load("demo", other[2:]) == config.model_copy(
        update={"regulator": "grpo", "run": f"{config.run}-grpo"}
    )
    assert not any(word.startswith(("steps=", "group=")) for word in other)  # as in the recipe
    plan = read_plan("demo", comparison[2:])
    assert [arm.name for arm in plan.arms] == ["ar(alpha=0.3) | lopti", "grpo"]
    run = plan.run(plan.arms[0], plan.arms[0].variants[0], 3).config
    assert run.evaluation.problems == 1000
    shared = {"exclude": {"run", "evaluation", "keep_checkpoints"}}
    assert run.model_dump(**shared) == config.model_dump(**shared)
    fell = commands(conclusion(config, RunFolder(config.run), summary({"avg@4": (0.4, 0.1)})))[1]
    assert configs.load("demo", fell[2:]).optim.lr == 7.5e-6


def test_commands_of_a_task_of_ones_own_need_no_recipe(tmp_path):
    data = tmp_path / "my questions.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 20)
    config = configs.load(None, ["model=some/model", f"data={data}", "reward=math", "steps=7", f"run={tmp_path / 'x'}"])
    other = commands(conclusion(config, RunFolder(config.run), summary(DEMO)))[2]
    assert other[:3] == ["train", "model=some/model", "steps=7"]
    assert configs.load(None, other[1:]) == config.model_copy(update={"regulator": "ar", "run": f"{config.run}-ar"})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"avg@4": (0.1, 0.8), "greedy": (0.1, 0.8)},
            ["learned: avg@4 rose from 0.100 to 0.800, greedy accuracy rose"],
        ),
        ({"avg@4": (0.4, 0.1), "greedy": (0.4, 0.1)}, ["worse than before: avg@4 fell from 0.400 to 0.100", "worse"]),
        ({"avg@4": (0.4, 0.45)}, ["cannot tell: avg@4 0.400 → 0.450", "  300 held-out problems show changes from"]),
        ({"avg@4": (0.45, 0.4)}, ["not learned: avg@4 0.450 → 0.400"]),
        ({"avg@4": (0.2, 0.5)}, ["learned: avg@4 rose"]),  # no greedy accuracy: nothing is said of it
    ],
)
def test_other_ends(tmp_path, values, expected):
    told = lines(tmp_path, values)
    told = told[: told.index("try next:")]
    assert len(told) == len(expected)
    assert all(line.startswith(start) for line, start in zip(told, expected, strict=True))


def test_a_fall_asks_for_smaller_steps_and_few_problems_for_more(tmp_path):
    fell = "\n".join(lines(tmp_path, {"avg@4": (0.4, 0.1)}))
    assert "optim.lr=5e-05" in fell
    assert "--resume" not in fell
    few = "\n".join(lines(tmp_path, {"avg@4": (0.4, 0.45)}, n=4, width=0.4))
    assert "4 held-out problems show hardly any change; for 5 points it takes about evaluation.problems=1100" in few


def side(value, low, high, n):
    return {"accuracy": value, "n": n, "samples": 1, "table": {"avg@1": {"value": value, "low": low, "high": high}}}


def test_no_advice_that_asks_for_no_more_problems_than_there_are():
    told = learned({"before": side(0.924, 0.897, 0.946, 500), "after": side(0.95, 0.927, 0.967, 500)})
    assert [line[:12] for line in told] == ["cannot tell:"]
    told = learned({"before": side(1.0, 0.025, 1.0, 1), "after": side(0.0, 0.0, 0.975, 1)})
    assert not any("=0" in line for line in told)


def test_a_run_of_plain_grpo_is_compared_with_another_method(tmp_path):
    for text in ("grpo", "grpo()", "grpo(passes=1)"):
        *_, comparison = commands(lines(tmp_path, settings=[f"regulator={text}"]))
        assert f"regulator={text}; ar" in comparison
    config = configs.load("demo", ["evaluation.problems=3000", f"run={tmp_path / '[x]'}"])
    *_, comparison = commands(conclusion(config, RunFolder(config.run), summary(DEMO)))
    assert "evaluation.problems=3000" in comparison
    assert configs.load("demo", [comparison[-1]]).run == f"{tmp_path / '[x]'}-compare"


@pytest.mark.parametrize("problems", [30, 300])
def test_so_many_problems_as_it_says_can_tell(problems):
    """With as many as it asks for, the intervals of poise itself are apart at a gain of five points."""

    def interval(right, of):
        low, high = clopper_pearson(round(right * of), of)
        return {"value": round(right * of) / of, "low": low, "high": high}

    sides = [{"accuracy": 0.4, "n": problems, "samples": 1, "table": {"avg@1": interval(0.4, problems)}}] * 2
    line = learned({"before": sides[0], "after": sides[1]})[1]
    needed = int(line.rpartition("=")[2])
    assert interval(0.45, int(1.1 * needed))["low"] > interval(0.4, int(1.1 * needed))["high"]
    assert interval(0.45, needed // 2)["low"] < interval(0.4, needed // 2)["high"]


def test_a_budget_is_raised_and_warnings_are_named(tmp_path):
    warned = [RunWarning("no-spread", 5, "What.", "Do.")]
    settings = ["budget=1000", "model=some/model", "regulator=ar"]
    told = "\n".join(lines(tmp_path, settings=settings, warnings=warned))
    assert "budget=2000" in told
    assert "warnings: no-spread (step 5)" in told
    assert "poise compare demo model=some/model budget=1000 'regulator=ar; grpo'" in told


def test_a_budget_is_raised_above_what_was_sampled(tmp_path):
    config = configs.load("demo", [f"run={tmp_path / 'run'}", "budget=1000"])
    told = conclusion(config, RunFolder(config.run), {**summary(DEMO), "tokens": 8059})
    assert any(line.endswith("budget=16118") for line in told)


def test_after_a_warning_more_of_the_same_is_not_proposed(tmp_path):
    warned = [RunWarning("cut-off", 5, "What.", "Raise rollout.max_tokens.")]
    told = lines(tmp_path, {"avg@4": (0.0, 0.0)}, warnings=warned)
    assert [line.strip() for line in told[told.index("try next:") + 3 :]] == ["Raise rollout.max_tokens."]


def test_without_an_evaluation_there_is_only_what_to_try(tmp_path):
    config = configs.load("demo", [f"run={tmp_path / 'run'}"])
    told = conclusion(config, RunFolder(config.run), {"steps": 3, "before": None, "after": None})
    assert told[0] == "try next:"


@pytest.mark.usefixtures("short_evaluation")
def test_a_run_ends_with_them(tmp_path, capsys):
    trainer.train(make(tmp_path, *SHORT, "steps=1"))
    out = capsys.readouterr().out
    assert (
        out.index("curve: ")
        < out.index("no held-out answer was right")
        < out.index("try next:")
        < out.index("poise report")
    )


def test_where_nothing_was_ever_right_more_of_the_same_is_no_advice(tmp_path):
    nothing = {"avg@4": (0.0, 0.0), "greedy": (0.0, 0.0), "pass@4": (0.0, 0.0)}
    told = lines(tmp_path, nothing, n=8)
    assert told[0] == "no held-out answer was right, before training or after it"
    assert told[3].strip().startswith("poise report")
    assert "the reward cannot read them" in told[4]
    assert not any("steps=" in line or "evaluation.problems" in line for line in told)
