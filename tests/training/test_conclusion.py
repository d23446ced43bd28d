"""The last lines of a run, from the numbers of its summary."""

import shlex

import pytest

from poise import trainer
from poise.runs.folder import RunFolder
from poise.runs.subscribers.summary import accuracy_rows, conclusion, learned, measured_changes
from poise.runs.subscribers.warnings import RunWarning
from poise.training import config as configs
from support.small_runs import SHORT, make

TINY = {"avg@4": (0.353, 0.575), "greedy": (0.683, 0.660), "pass@4": (0.747, 0.780)}  # experiments/demo/demo.md


def summary(values, width=0.05):
    """A summary with these values before and after, each with an interval of ± ``width``."""

    def side(at):
        table = {name: {"value": v[at], "low": v[at] - width, "high": v[at] + width} for name, v in values.items()}
        return {"accuracy": table["avg@4"]["value"], "n": 300, "samples": 4, "table": table}

    return {"steps": 50, "before": side(0), "after": side(1)}


def lines(tmp_path, values=TINY, *, settings=(), warnings=(), **more):
    config = configs.load("tiny", [f"run={tmp_path / 'my run'}", *settings])
    return conclusion(config, RunFolder(config.run), summary(values) | more, warnings)


def commands(told):
    """The commands of the last lines, as a shell splits them, by what follows ``poise``."""
    return [shlex.split(line)[1:] for line in told if line.startswith("  poise ")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (TINY, {"rose": ["avg@4"], "no clear change": ["greedy", "pass@4"]}),
        ({"avg@4": (0.4, 0.1), "greedy": (0.4, 0.1)}, {"fell": ["avg@4", "greedy"]}),
        ({"avg@4": (0.4, 0.45)}, {"no clear change": ["avg@4"]}),
        ({"avg@4": (0.0, 0.0), "greedy": (0.0, 0.0)}, {"no held-out answer was right": []}),
    ],
)
def test_what_rose_and_what_fell(values, expected):
    told = learned(summary(values))
    assert len(told) == len(expected)
    for line, (start, names) in zip(told, expected.items(), strict=True):
        assert line.startswith(start)
        assert all(f"{name} {values[name][0]:.3f} → {values[name][1]:.3f}" in line for name in names)
        assert sum(name in line for name in values) == len(names)


def test_a_single_sample_is_told_once():
    row = {"value": 0.5, "low": 0.4, "high": 0.6}
    side = {"accuracy": 0.5, "n": 9, "samples": 1, "table": {"avg@1": row, "pass@1": row}}
    assert "pass@1" not in " ".join(learned({"before": side, "after": side}))


def test_commands_can_be_pasted(tmp_path):
    place = str(tmp_path / "my run")
    assert commands(lines(tmp_path)) == [["report", place], ["train", "--resume", f"run={place}", "steps=100"]]


def test_a_fall_asks_for_smaller_steps(tmp_path):
    fell = "\n".join(lines(tmp_path, {"avg@4": (0.4, 0.1)}))
    assert "optim.lr=5e-05" in fell
    assert "--resume" not in fell


def test_a_budget_is_raised_above_what_was_sampled(tmp_path):
    assert commands(lines(tmp_path, settings=["budget=1000"]))[1][-1] == "budget=2000"
    assert commands(lines(tmp_path, settings=["budget=1000"], tokens=8059))[1][-1] == "budget=16118"


def test_a_run_that_a_callback_ended_continues_to_its_steps(tmp_path):
    for step in (0, 10):
        assert commands(lines(tmp_path, steps=step))[1][-1] == "steps=50"


def test_a_run_that_reached_its_goal_goes_on_without_it(tmp_path):
    goal = ["stop_at=0.5", "evaluation.every=5", "steps=80"]
    assert commands(lines(tmp_path, settings=goal))[1][-1] == "stop_at=null"
    assert commands(lines(tmp_path, settings=[*goal, "steps=50"]))[1][-1] == "steps=100"  # it ended with its steps
    assert commands(lines(tmp_path, settings=[*goal, "budget=1000"], tokens=1001))[1][-1] == "budget=2002"


def test_after_a_warning_more_of_the_same_is_not_proposed(tmp_path):
    warned = [RunWarning("cut-off", 5, "What.", "Raise rollout.max_tokens.")]
    told = "\n".join(lines(tmp_path, {"avg@4": (0.0, 0.0)}, warnings=warned))
    assert "warnings: cut-off (step 5)" in told
    assert "Raise rollout.max_tokens." in told
    assert "--resume" not in told
    assert "--resume" in "\n".join(lines(tmp_path, warnings=warned))  # something was learned all the same


def test_without_an_evaluation_there_is_only_what_to_try(tmp_path):
    config = configs.load("tiny", [f"run={tmp_path / 'run'}"])
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


@pytest.mark.usefixtures("short_evaluation")
def test_each_evaluation_shows_its_accuracy(tmp_path, capsys):
    for samples, shown in ((2, "avg@2 0.000, greedy 0.000"), (1, "greedy 0.000")):
        settings = [f"evaluation.samples={samples}", f"evaluation.temperature={samples - 1}", "evaluation.every=1"]
        trainer.train(make(tmp_path, *SHORT, "steps=2", *settings, name=f"run-{samples}"))
        assert capsys.readouterr().out.splitlines().count(f"  {shown}") == 3  # before, after one step, at the end


def test_where_nothing_was_ever_right_more_of_the_same_is_no_advice(tmp_path):
    told = "\n".join(lines(tmp_path, {"avg@4": (0.0, 0.0), "greedy": (0.0, 0.0)}))
    assert "the reward cannot read them" in told
    assert "steps=" not in told


def test_where_answers_were_cut_off_the_advice_is_to_let_them_end(tmp_path):
    found = summary({"avg@4": (0.0, 0.0), "greedy": (0.0, 0.0)})
    found["after"] |= {"cut_off": found["after"]["n"] * found["after"]["samples"], "unreadable": 0}
    config = configs.load("tiny", [f"run={tmp_path}", "rollout.max_tokens=3"])
    told = "\n".join(conclusion(config, RunFolder(tmp_path), found))
    assert "Raise rollout.max_tokens (to 6, say)" in told
    assert "the reward cannot read them" not in told


def test_a_change_has_the_interval_of_paired_problems():
    values = {"avg@4": (0.40, 0.45), "greedy": (0.5, 0.5)}
    assert learned(summary(values))[0].startswith("no clear change: avg@4")  # as in runs of older versions
    paired = {"avg@4": {"value": 0.05, "low": 0.01, "high": 0.09}, "greedy": {"value": 0.0, "low": -0.02, "high": 0.02}}
    found = summary(values) | {"change": paired}
    assert learned(found) == ["rose: avg@4 0.400 → 0.450", "no clear change: greedy 0.500 → 0.500"]
    assert measured_changes(found)[0].interval == (0.01, 0.09)
    assert learned(found | {"change": {"avg@4": "?"}}) == learned(summary(values))


def test_before_and_after_on_other_problems_are_told():
    found = summary(TINY)
    sides = [found[when] | {"problems": name} for when, name in (("before", "a"), ("after", "b"))]
    assert "measured on different problems" in learned(found | {"before": sides[0], "after": sides[1]})[-1]
    assert learned(found | {"after": sides[1]}) == learned(found)  # an older version did not say


def test_learning_to_stop_is_not_learning_to_solve():
    found = summary({"avg@4": (0.1, 0.5)})
    found["before"] |= {"cut_off": 900, "unreadable": 60}
    found["after"] |= {"cut_off": 60, "unreadable": 60}
    assert "(80.0 → 10.0 %): learning to stop is not learning to solve" in learned(found)[-1]
    found["before"] |= {"cut_off": 60}
    assert len(learned(found)) == 1


@pytest.mark.usefixtures("short_evaluation")
def test_shares_of_answers_that_are_cut_off_stand_below_accuracy(tmp_path, capsys):
    trainer.train(make(tmp_path, *SHORT, "steps=1"))
    out = capsys.readouterr().out
    assert out.index("greedy") < out.index("cut off at rollout.max_tokens=") < out.index("unreadable")


def test_greedy_samples_are_told_as_greedy_accuracy_alone():
    told = {}
    for when, value in (("before", 0.3), ("after", 0.6)):
        row = {"value": value, "low": value - 0.1, "high": value + 0.1}
        table = dict.fromkeys(("avg@1", "pass@1", "maj@1", "greedy"), row)
        told[when] = {"accuracy": value, "n": 9, "samples": 1, "temperature": 0.0, "cut_off": 0, "table": table}
    assert learned(told) == ["rose: greedy 0.300 → 0.600"]
    assert [row[""] for row in accuracy_rows(told)] == ["greedy", "cut off"]
