"""What stops a run, or only seems to: signals, readers that have gone, a full disk."""

import json
import os
import signal
import subprocess
import sys

import pytest

from poise import trainer
from poise.runs.folder import RunFolder
from poise.runs.subscribers import evaluation_schedule
from poise.runs.subscribers.evaluation_schedule import EvaluationSchedule
from poise.trainer import Trainer
from poise.training.evaluation import Evaluation
from poise.training.interrupts import Stopper
from support.small_runs import SMALL, command, make, run

QUICK = ["prompts=2", "group=2", "rollout.max_tokens=4", "evaluation.problems=1", "evaluation.samples=1"]


@pytest.mark.slow
def test_ctrl_c_leaves_a_resumable_folder_and_says_how(tmp_path):
    small = [*SMALL, *QUICK, "steps=5000", "checkpoint_every=9999", "rollouts_every=0"]
    with command("train", *small, f"run={tmp_path / 'run'}") as process:
        for line in process.stdout:
            if line.startswith("step") and " 2/5000 " in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait() == 130, rest
    assert f"poise train --resume run={tmp_path / 'run'}" in rest
    assert "Traceback" not in rest
    folder = RunFolder.open(tmp_path / "run")
    assert folder.checkpoints()[-1] == folder.metrics()[-1]["step"] >= 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_signals_finish_the_step_and_save_it(tmp_path, monkeypatch, name):
    real = Trainer.step

    def step(held, state):
        os.kill(os.getpid(), getattr(signal, name))
        os.kill(os.getpid(), getattr(signal, name))  # a terminal that closes may send it twice
        return real(held, state)

    monkeypatch.setattr(Trainer, "step", step)
    outside = signal.signal(getattr(signal, name), signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, *QUICK, "checkpoint_every=100")
        assert RunFolder.open(tmp_path / "run").checkpoints() == [1]
        assert signal.getsignal(getattr(signal, name)) == signal.SIG_DFL
    finally:
        signal.signal(getattr(signal, name), outside)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper(print) as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stopper.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_reader_that_has_gone_does_not_end_the_run(tmp_path):
    """``poise train 2>&1 | head -1``, and not even the first line."""
    read, write = os.pipe()
    os.close(read)
    small = [*SMALL, *QUICK, "steps=1", f"run={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-m", "poise", "train", *small], stdout=write, stderr=write)
    os.close(write)
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


def test_a_line_that_cannot_be_logged_is_no_finished_step(tmp_path, monkeypatch):
    config = make(tmp_path, *QUICK, "checkpoint_every=100")
    real = RunFolder.log

    def log(folder, step, metrics):
        if step == 3:
            raise OSError(28, "No space left on device")
        real(folder, step, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", log)
        with pytest.raises(OSError, match="No space"):
            trainer.train(config, quiet=True)
    trainer.train(config, resume=True, quiet=True)
    assert [line["step"] for line in RunFolder.open(config.run).metrics()] == [1, 2, 3, 4]


def interrupt(monkeypatch, number):
    """Let SIGTERM come in that evaluation of a run."""
    calls, real = [], evaluation_schedule.held_out

    def interrupted(*args):
        calls.append(args)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the evaluation went on")
        return real(*args)

    monkeypatch.setattr(evaluation_schedule, "held_out", interrupted)


def lines(path):
    """The lines of a run's metrics, in order, without times."""
    records = RunFolder.open(path, resume=False).metrics()
    return [[(key, value) for key, value in line.items() if not key.startswith("time/")] for line in records]


EVALUATED = [*QUICK, "objective.entropy_coef=0.01", "evaluation.every=2", "checkpoint_every=100"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that no signal reached: its metrics and its summary."""
    folder, summary = run(tmp_path_factory.mktemp("whole"), *EVALUATED)
    return lines(folder.path), summary


@pytest.mark.parametrize(("number", "steps"), [(1, 0), (2, 2), (3, 4)])  # before training, after step 2, at the end
def test_a_signal_ends_an_evaluation_at_once_and_the_resumed_run_does_it_again(
    tmp_path, monkeypatch, capsys, whole, number, steps
):
    expected, summary = whole
    config = make(tmp_path, *EVALUATED)
    with monkeypatch.context() as patch:
        interrupt(patch, number)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(config)
    assert f"stopped; continue with: poise train --resume run={config.run}" in capsys.readouterr().out
    folder = RunFolder.open(config.run)
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3, 4][:steps]
    assert folder.checkpoints() == [steps][: bool(steps)]
    assert (folder.read_json("before.json") is None) == (not steps)
    resumed = trainer.train(config, resume=True, quiet=True)
    assert lines(config.run) == expected
    assert resumed["after"] == summary["after"]
    assert resumed["before"] == summary["before"]


def test_an_evaluation_that_is_done_again_may_reach_the_goal(tmp_path, monkeypatch):
    config = make(tmp_path, *QUICK, "evaluation.every=2", "stop_at=0.0001")
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(config, quiet=True)
    reached = {"eval/kk/avg@1": 1.0}
    monkeypatch.setattr(Evaluation, "metrics", lambda _: reached)
    assert trainer.train(config, resume=True, quiet=True)["steps"] == 2
    assert RunFolder.open(config.run).metrics()[-1].items() >= reached.items()


def test_a_run_that_has_reached_its_goal_only_does_the_final_evaluation_again(tmp_path, monkeypatch):
    config = make(tmp_path, *QUICK, "evaluation.every=2", "stop_at=0.0001")
    monkeypatch.setattr(Evaluation, "metrics", lambda _: {"eval/kk/avg@1": 1.0})
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(config, quiet=True)
    assert RunFolder.open(config.run).checkpoints() == [2]
    assert trainer.train(config, resume=True, quiet=True)["steps"] == 2


@pytest.mark.parametrize("every", [2, 0])
def test_a_run_that_goes_on_beyond_its_end_keeps_its_evaluation_and_does_it_once(tmp_path, monkeypatch, every):
    folder, summary = run(tmp_path, *QUICK, f"evaluation.every={every}", "steps=2")
    assert not any(key.startswith("eval/") for line in folder.metrics() for key in line)
    config, real, calls = make(tmp_path, *QUICK, f"evaluation.every={every}", "steps=3"), EvaluationSchedule.measure, []
    monkeypatch.setattr(EvaluationSchedule, "measure", lambda held: calls.append(1) or real(held))
    trainer.train(config, resume=True, quiet=True)
    assert len(calls) == 1  # after step 3
    _, second, third = folder.metrics()
    assert second["eval/kk/avg@1"] == summary["after"]["accuracy"]
    assert second["eval/kk/greedy"] == summary["after"]["greedy"]
    assert not any(key.startswith("eval/") for key in third)


def test_a_signal_before_an_evaluation_begins_none(tmp_path, monkeypatch):
    config, real = make(tmp_path, *QUICK), EvaluationSchedule.on_start

    def interrupted(held, state):
        signal.raise_signal(signal.SIGTERM)
        return real(held, state)

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationSchedule, "on_start", interrupted)
        patch.setattr(evaluation_schedule, "held_out", lambda *_: pytest.fail("an evaluation began"))
        with pytest.raises(KeyboardInterrupt):
            trainer.train(config, quiet=True)
    folder = RunFolder.open(config.run)
    assert folder.metrics() == []
    trainer.train(config, resume=True, quiet=True)
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3, 4]
