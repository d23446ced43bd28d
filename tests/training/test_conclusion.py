"""The last lines of a run, from the numbers of its summary."""

import pytest

from poise import config as configs
from poise import trainer
from poise.runs.folder import RunFolder
from poise.runs.warnings import RunWarning
from poise.training.conclusion import conclusion
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
    assert told[1].startswith("not learned: greedy accuracy 0.683 → 0.660, pass@4 0.747 → 0.780 (no clear change")
    assert "no sign that it solves more problems" in told[2]
    assert told[3] == "try next:"
    commands = [line.strip().split("  ")[0] for line in told[4:]]
    assert commands == [
        f"poise report {place}",
        f"poise train --resume run={place} steps=100",
        f"poise train demo regulator=ar run={place}-ar",
        'poise compare demo regulator="grpo; ar" seeds=6',
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"avg@4": (0.1, 0.8), "greedy": (0.1, 0.8)},
            ["learned: avg@4 rose from 0.100 to 0.800, greedy accuracy rose"],
        ),
        ({"avg@4": (0.4, 0.1), "greedy": (0.4, 0.1)}, ["worse than before: avg@4 fell from 0.400 to 0.100", "worse"]),
        ({"avg@4": (0.4, 0.45)}, ["not learned: avg@4 0.400 → 0.450"]),
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
    assert "4 held-out problems show large gains only" in "\n".join(lines(tmp_path, {"avg@4": (0.4, 0.45)}, n=4))


def test_a_budget_is_raised_warnings_are_named_and_other_settings_are_left_to_the_user(tmp_path):
    warned = [RunWarning("no-spread", 5, "What.", "Do.")]
    settings = ["budget=1000", "model=some/model", "regulator=ar"]
    told = "\n".join(lines(tmp_path, settings=settings, warnings=warned))
    assert "budget=2000" in told
    assert "warnings: no-spread (step 5)" in told
    assert 'poise compare … regulator="ar; grpo"' in told


def test_after_a_warning_more_of_the_same_is_not_proposed(tmp_path):
    warned = [RunWarning("cut-off", 5, "What.", "Raise rollout.max_tokens.")]
    told = lines(tmp_path, {"avg@4": (0.0, 0.0)}, warnings=warned)
    assert [line.strip() for line in told[told.index("try next:") + 2 :]] == ["Raise rollout.max_tokens."]


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
    assert told[2].strip().startswith("poise report")
    assert "the reward cannot read them" in told[3]
    assert not any("steps=" in line or "evaluation.problems" in line for line in told)
