"""What stops a run, or only seems to: signals, readers that have gone, a full disk."""

import json
import os
import signal
import subprocess
import sys

import pytest

from poise import trainer
from poise.runs.folder import RunFolder
from poise.trainer import Trainer
from poise.training.interrupts import Stopper
from support.small_runs import SMALL, command, make, run

pytestmark = pytest.mark.usefixtures("short_evaluation")
QUICK = ["prompts=2", "group=2", "rollout.max_tokens=8", "evaluation.problems=1", "evaluation.samples=1"]


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

    def step(held, number, console):
        os.kill(os.getpid(), getattr(signal, name))
        os.kill(os.getpid(), getattr(signal, name))  # a terminal that closes may send it twice
        return real(held, number, console)

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


def test_a_signal_during_the_evaluation_before_training_begins_no_step(tmp_path, monkeypatch):
    config, real = make(tmp_path, *QUICK), trainer.Trainer._evaluate

    def interrupted(held, console):
        signal.raise_signal(signal.SIGTERM)
        return real(held, console)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(config, quiet=True)
    folder = RunFolder.open(config.run)
    assert folder.metrics() == []
    assert folder.read_json("before.json")  # what was measured is kept
    trainer.train(config, resume=True, quiet=True)
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3, 4]
