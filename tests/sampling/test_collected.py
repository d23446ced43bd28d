"""Algorithms of one's own: what they return is checked, and their mistakes get a sentence."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from poise import advantages
from poise._lib.user_code import UserCodeError
from poise.batch import Prompt
from poise.sampling.algorithms import Trajectory
from poise.sampling.trajectories import collect, metrics_of
from poise.tasks import Problem, Score, TaskError

SCORE, PROBLEM = Score(1.0, True), Problem("p", "?", "all", {})
ROW = Trajectory(PROBLEM, Prompt((1,)), torch.tensor([2]), torch.tensor([True]), SCORE, "x", True)
PAIR = [replace(ROW, group=0)] * 2


class Mine:
    def __init__(self, result):
        self.result = result

    def collect(self, *_):
        return self.result() if callable(self.result) else self.result

    def metrics(self, samples):
        del samples
        return self.result


def collected(result, name="mine.py:Mine", advantage="group-zscore"):
    return collect(Mine(result), [], None, 0, name=name, advantage=advantages.get(advantage))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "must return a list of samples and the memory for the next step, got None"),
        (PAIR, "must return a list of samples and the memory"),
        (([], None), "no sample, so there is nothing to train on"),
        (([1, 2], None), "must return a list of poise.sampling.algorithms.Trajectory first"),
        ((PAIR, "text"), "must return its memory as a dict, or None, got 'text'"),
        ((PAIR, {"x": object()}), "goes into checkpoints as JSON: Object of type object"),
        (([ROW], None), "sample 0 has no other sample to be compared with: put it in a group"),
        (([*PAIR, replace(ROW, group=1)], None), "sample 2 has no other sample to be compared with"),
        (lambda: {}["boo"], r"KeyError: 'boo' \(.*test_collected.py, line"),
    ],
)
def test_mistakes_in_collect_get_a_sentence(result, message):
    with pytest.raises(UserCodeError, match="algorithm 'mine.py:Mine' failed: .*" + message):
        collected(result)


def test_what_is_right_passes():
    assert collected((PAIR, {"x": 1})) == (PAIR, {"x": 1})
    assert collected(([ROW], None), advantage="reinforce-pp") == ([ROW], None)
    own = [replace(ROW, advantage=1.0), replace(ROW, score=Score(0.0, False, failed="it hung"))]
    assert collected((own, None)) == (own, None)


def test_errors_that_say_enough_and_those_of_poises_own_algorithms_stay():
    def refuse():
        raise TaskError("no")

    with pytest.raises(TaskError, match=r"^no$"):
        collected(refuse)
    with pytest.raises(KeyError):
        collected(lambda: {}["boo"], name="grpo")


def test_metrics_are_numbers():
    assert metrics_of(Mine({"a": torch.tensor(0.5), "b": 2}), PAIR) == {"a": 0.5, "b": 2}
    for result, message in [({"a": "text"}, "a must be a number, got 'text'"), ([1], "a dict of numbers by name")]:
        with pytest.raises(UserCodeError, match=f"Mine.metrics.*{message}"):
            metrics_of(Mine(result), PAIR)
    assert metrics_of(object(), PAIR) == {}


def test_an_exception_in_metrics_is_a_sentence():
    class Broken:
        def metrics(self, samples):
            return {"a": samples[0].nothing}

    with pytest.raises(UserCodeError, match=r"Broken' failed: AttributeError: .*nothing.*test_collected\.py, line \d+"):
        metrics_of(Broken(), PAIR)

    class Own(Broken):
        __module__ = "poise.sampling.grpo"

    with pytest.raises(AttributeError):
        metrics_of(Own(), PAIR)


def test_the_trainer_checks_them(tmp_path, monkeypatch):
    from support.command_line import SMALL, fails

    monkeypatch.chdir(tmp_path)
    text = "import poise\n@poise.algorithm\nclass Mine:\n    def collect(self, *_): return [], None\n"
    Path("mine.py").write_text(text)
    said = fails("train", "tiny", *SMALL, "algorithm=mine.py:Mine", "run=run")
    assert "algorithm 'mine.py:Mine' failed: ValueError: collect returned no sample" in said


def test_an_advantage_per_token_has_the_length_of_the_tokens():
    row = replace(ROW, tokens=torch.tensor([2, 3]), own=torch.tensor([True, True]))
    for advantage in (1.0, torch.tensor(1.0), torch.ones(2)):
        assert collected(([replace(row, advantage=advantage)], None))
    message = r"sample 0: its advantage must be a number or \(2,\), one per token, got \(3,\)"
    with pytest.raises(UserCodeError, match=message):
        collected(([replace(row, advantage=torch.ones(3))], None))
