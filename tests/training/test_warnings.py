"""When a run learns nothing: scripted metrics, recorded runs, and small runs that cannot learn."""

import math

import pytest

from poise import trainer
from poise.runs.folder import RunFolder
from poise.runs.subscribers import warnings
from poise.runs.subscribers.warnings import TABLE, Progress, holding
from poise.training import config as configs
from support.pages import ROOT
from support.small_runs import make

HEALTHY = {
    "reward/accuracy": 0.4, "reward/no_spread": 0.3, "rollout/finished": 0.99, "rollout/entropy": 0.5,
    "optim/steps": 1.0,
}  # fmt: skip
EMBEDDED = configs.load("tiny")  # 16 prompts: a condition looks at 5 steps


def steps(count, **changes):
    """The metrics of so many steps, healthy but for ``changes``; a list has a value for each step."""
    names = {name.replace("__", "/"): value for name, value in changes.items()}
    return [
        HEALTHY | {name: value[i] if isinstance(value, list) else value for name, value in names.items()}
        for i in range(count)
    ]


def said(lines, config=EMBEDDED):
    """The names of the warnings after these steps, with the step of each."""
    told = []
    for step in range(len(lines) + 1):
        new = holding(Progress(config, lines[:step]), [name for _, name in told])
        told += [(step, entry.name) for entry in new]
    return told


ALL_EQUAL = {"reward__no_spread": 1.0, "optim__steps": 0.0}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (steps(30), []),
        (steps(30, reward__accuracy=0.0, **ALL_EQUAL), [(5, "all-wrong")]),
        (steps(30, reward__accuracy=0.0), [(15, "all-wrong")]),  # the reward has other parts, which may come first
        (steps(30, reward__accuracy=[0.0] * 4 + [0.01] * 26), []),
        (steps(30, reward__accuracy=1.0, **ALL_EQUAL), [(5, "no-spread")]),
        (steps(30, reward__accuracy=[0.5] * 5 + [1.0] * 25, reward__no_spread=[0.3] * 5 + [1.0] * 25), []),  # solved
        (steps(30, reward__no_spread=[0.3] * 10 + [1.0] * 20), [(15, "no-spread")]),
        (steps(30, reward__no_spread=[1.0, 1.0, 0.5] * 10), []),
        (steps(30, optim__steps=0.0), [(5, "no-steps")]),
        (steps(30, rollout__finished=0.02, reward__accuracy=0.0, **ALL_EQUAL), [(5, "cut-off")]),
        (steps(30, rollout__finished=0.0), []),  # right before it is cut off: it learns
        (steps(30, rollout__entropy=[0.5 * 0.8**i for i in range(30)], reward__no_spread=0.6), [(16, "entropy")]),
        (steps(30, rollout__entropy=[0.5 * 0.8**i for i in range(30)], reward__accuracy=0.95), []),  # it is done
        (steps(30, rollout__entropy=[0.5 * 0.96**i for i in range(30)], reward__no_spread=0.6), []),
        (steps(30, reward__accuracy=[0.6] * 15 + [0.05] * 15), [(18, "accuracy-fell")]),
        (steps(30, reward__accuracy=[0.6, 0.3, 0.4] * 10), []),
        (steps(30, optim__held_unmoved=0.06), [(5, "rounding")]),
        (steps(30, optim__held_unmoved=0.001), []),
        (steps(30, rollout__mismatch=0.05), []),  # vLLM in bfloat16
        (steps(30, rollout__mismatch=[0.05] * 10 + [0.5] * 20), [(13, "mismatch")]),
        (steps(9, reward__accuracy=[0.4] + [0.0] * 8, rollout__finished=[0.9] + [0.0] * 8), [(6, "fell-apart")]),
        (steps(9, reward__accuracy=[0.0] * 9, rollout__finished=[0.3] + [0.0] * 8), [(5, "cut-off")]),
    ],
)  # fmt: skip
def test_scripted_metrics(lines, expected):
    assert said(lines) == expected


def test_fewer_prompts_need_more_steps():
    config = configs.load("tiny", ["prompts=4"])
    assert said(steps(30, reward__accuracy=0.0, **ALL_EQUAL), config) == [(10, "all-wrong")]


def test_missing_and_infinite_metrics_say_nothing():
    nothing = [dict.fromkeys(HEALTHY, value) for value in (None, math.nan, math.inf) for _ in range(9)]
    assert said([*nothing, {}, {"reward/accuracy": 0.0}]) == []
    assert said(steps(30, rollout__entropy=[0.5] * 20 + [None] * 10, reward__no_spread=0.6)) == []


def test_every_warning_has_a_place_in_the_docs():
    page, names = (ROOT / "docs/warnings.md").read_text(), [entry.name for entry in TABLE]
    for entry in TABLE:
        assert f"`{entry.name}`" in page
        assert set(entry.covers) <= set(names)


CUT = ["prompts=8", "group=2", "steps=6", "rollout.max_tokens=3", "rollouts_every=0", "evaluation.samples=1"]


class TestRuns:
    def test_a_run_that_cannot_learn_says_so_once(self, tmp_path, capsys):
        config = make(tmp_path, *CUT, "checkpoint_every=3")
        trainer.train(config)
        out = capsys.readouterr().out
        assert out.count("warning after step 5: 100% of recent responses were cut off at rollout.max_tokens=3") == 1
        assert "Raise rollout.max_tokens (to 6, say)" in out
        folder = RunFolder.open(config.run, resume=False)
        assert [(warning.name, warning.step) for warning in warnings.read(folder)] == [("cut-off", 5)]
        trainer.train(config.model_copy(update={"steps": 7}), resume=True)
        assert "warning after step" not in capsys.readouterr().out
        assert len(warnings.read(folder)) == 1

    def test_a_quiet_run_says_it_on_standard_error(self, tmp_path, capsys):
        trainer.train(make(tmp_path, *CUT), quiet=True)
        shown = capsys.readouterr()
        assert "warning" not in shown.out
        assert shown.err.count("warning after step 5") == 1
