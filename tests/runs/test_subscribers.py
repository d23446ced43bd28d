"""Callbacks: what a user's own object is told of a run, in which order, and how it ends one."""

from types import SimpleNamespace

import pytest

from poise import trainer
from poise.runs.folder import RunFolder
from poise.runs.subscribers import evaluation_schedule
from poise.training.steps import State
from support.small_runs import make, parameters

QUICK = ["prompts=2", "group=2", "rollout.max_tokens=4", "objective.entropy_coef=0.01", "evaluation=off"]


class Told:
    """Notes what it is told of, and what is in the run folder then; ends the run after ``last``."""

    def __init__(self, config, last=None):
        self.folder, self.last, self.events = RunFolder(config.run), last, []

    def on_start(self, state):
        self.events.append(("start", state))

    def on_step(self, result):
        step = result.state.step
        assert self.folder.metrics()[-1]["step"] == step  # logged before
        assert step not in self.folder.checkpoints()  # saved afterwards
        assert len(result.trajectories) == len(result.batch.mask) == 4
        assert result.phases
        self.events.append((step, result.state, result.metrics))
        return step != self.last

    def on_end(self, state):
        assert self.folder.read_json("summary.json")["steps"] == state.step
        self.events.append(("end", state))


def test_a_callback_ends_a_run_which_is_saved_and_resumes_bit_for_bit(tmp_path, capsys):
    whole, cut = (make(tmp_path, *QUICK, "steps=3", "checkpoint_every=1", name=name) for name in ("whole", "cut"))
    first, second = Told(whole), Told(cut, last=2)
    assert trainer.train(whole, quiet=True, callbacks=[first])["steps"] == 3
    assert trainer.train(cut, callbacks=[second])["steps"] == 2
    assert "a callback ended the run after step 2\n" in capsys.readouterr().out
    assert [event[0] for event in first.events] == ["start", 1, 2, 3, "end"]
    assert [event[0] for event in second.events] == ["start", 1, 2, "end"]
    assert first.events[0][1] == State()
    assert (
        first.events[-1][1] == first.events[-2][1] == State(3, sum(e[2]["tokens/sampled"] for e in first.events[1:4]))
    )
    folder = RunFolder(cut.run)
    assert folder.checkpoints()[-1] == 2
    resumed = Told(cut)
    assert trainer.train(cut, resume=True, quiet=True, callbacks=[resumed])["steps"] == 3
    assert [event[0] for event in resumed.events] == ["start", 3, "end"]
    assert resumed.events[0][1] == second.events[-1][1]
    assert parameters(folder).keys() == parameters(RunFolder(whole.run)).keys()
    assert all(value.equal(parameters(folder)[name]) for name, value in parameters(RunFolder(whole.run)).items())


@pytest.mark.parametrize("trained", [0, 1])
def test_a_callback_ends_a_run_at_its_start_which_resumes_bit_for_bit(tmp_path, capsys, trained):
    whole, cut = (make(tmp_path, *QUICK, "steps=2", name=name) for name in ("whole", "cut"))
    trainer.train(whole, quiet=True)
    if trained:
        trainer.train(cut, quiet=True, callbacks=[SimpleNamespace(on_step=lambda _: False)])
    ends = [SimpleNamespace(on_start=lambda _: False)]
    capsys.readouterr()
    assert trainer.train(cut, resume=bool(trained), callbacks=ends)["steps"] == trained
    assert f"a callback ended the run at its start (step {trained})\n" in capsys.readouterr().out
    assert RunFolder(cut.run).checkpoints() == [trained]
    assert trainer.train(cut, resume=True, callbacks=[SimpleNamespace(on_start=lambda _: None)])["steps"] == 2
    assert "a callback ended" not in capsys.readouterr().out
    ended, expected = (parameters(RunFolder(config.run)) for config in (cut, whole))
    assert all(value.equal(ended[name]) for name, value in expected.items())


@pytest.mark.parametrize(
    ("callback", "steps", "measured"),
    [
        ({"on_start": lambda _: False}, 0, 1),  # before training
        ({"on_step": lambda _: False}, 1, 2),  # before training, and after step 1, where an evaluation is due
    ],
)
def test_a_run_that_a_callback_ends_measures_the_same_weights_once(tmp_path, monkeypatch, callback, steps, measured):
    calls, real = [], evaluation_schedule.held_out
    monkeypatch.setattr(evaluation_schedule, "held_out", lambda *args: calls.append(1) or real(*args))
    config = make(tmp_path, *QUICK, "evaluation={problems: 3, every: 1}", "steps=3")
    summary = trainer.train(config, quiet=True, callbacks=[SimpleNamespace(**callback)])
    assert (summary["steps"], len(calls)) == (steps, measured)
    assert summary["after"]["n"] == 3
    if steps:
        assert RunFolder(config.run).metrics()[-1]["eval/kk/greedy"] == summary["after"]["greedy"]
    else:
        assert summary["before"] == summary["after"]


def test_a_callback_that_raises_loses_no_step(tmp_path):
    config = make(tmp_path, *QUICK, "steps=3", "checkpoint_every=100")

    def broken(result):
        return 1 / 0 if result.state.step == 2 else None

    with pytest.raises(ZeroDivisionError):
        trainer.train(config, quiet=True, callbacks=[SimpleNamespace(on_step=broken)])
    assert RunFolder(config.run).checkpoints() == [2]


@pytest.mark.parametrize("given", [print, Told, 3])
def test_what_cannot_be_told_of_anything_is_no_callback(tmp_path, given):
    with pytest.raises(TypeError, match=r"callbacks: expected objects with on_start\(state\), on_step\(result\) or"):
        trainer.train(make(tmp_path), callbacks=[given])
    assert not (tmp_path / "run").exists()
