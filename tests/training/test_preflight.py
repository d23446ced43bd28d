"""The trial before the first evaluation: what it finds, and that it leaves no traces."""

import random
import shutil
import sys
from types import SimpleNamespace

import pytest

from poise import regulators, tasks, trainer
from poise._lib.user_code import UserCodeError
from poise.models.policy import ModelError, Policy
from poise.runs.folder import CheckpointError, RunFolder
from poise.runs.subscribers.evaluation_schedule import EvaluationSchedule
from poise.runs.trackers import TrackerError
from poise.tasks import Score
from poise.tasks.knights_knaves.task import KnightsKnaves
from poise.training import config as configs
from poise.training import preflight as module
from poise.training.resume import TrainError
from support.small_runs import SHORT, make, parameters, run

REGULATOR = """
import poise

class Mine(poise.Regulator):
    def phases(self, batch):
        {body}
"""


def refused(config, error, match):
    """Training is refused, and there is no folder that blocks the next attempt."""
    with pytest.raises(error, match=match):
        trainer.train(config, quiet=True)
    assert not (config_path := RunFolder(config.run).path).exists(), list(config_path.iterdir())


def test_it_changes_nothing_of_a_run_not_even_with_a_task_that_draws_global_random_numbers(tmp_path, monkeypatch):
    def score(self, problem, text, real=KnightsKnaves.score):
        return Score(real(self, problem, text).reward + random.random(), False)

    monkeypatch.setattr(KnightsKnaves, "score", score)
    random.seed(3)
    with_it, _ = run(tmp_path, *SHORT, "steps=1", name="with")
    monkeypatch.setattr(trainer, "preflight", lambda *_: None)
    random.seed(3)
    without, _ = run(tmp_path, *SHORT, "steps=1", name="without")
    assert without.read_json("before.json") == with_it.read_json("before.json")
    for one, two in zip(with_it.metrics(), without.metrics(), strict=True):
        assert {k: v for k, v in one.items() if "time/" not in k} == {k: v for k, v in two.items() if "time/" not in k}
    assert all(value.equal(parameters(without)[name]) for name, value in parameters(with_it).items())


@pytest.mark.parametrize("name", regulators.TABLE)
def test_every_regulator_passes(tmp_path, monkeypatch, name):
    monkeypatch.setattr(trainer.Trainer, "run", lambda *_: {})
    assert trainer.train(make(tmp_path, f"regulator={name}"), quiet=True) == {}


@pytest.mark.parametrize("name", ["frozenlake", "search-qa", "sokoban"])
def test_other_tasks_pass(tmp_path, monkeypatch, name):
    monkeypatch.setattr(trainer.Trainer, "run", lambda *_: {})
    config = configs.load(None, ["model=embedded", "device=cpu", f"task.name={name}", "rollout.max_prompt=800"])
    assert trainer.train(config.model_copy(update={"run": str(tmp_path / "run")}), quiet=True) == {}


def test_a_regulator_that_fails(tmp_path):
    (tmp_path / "mine.py").write_text(REGULATOR.format(body="return [poise.Phase.of(batch, batch.prob / 0 - 1)]"))
    refused(make(tmp_path, f"regulator={tmp_path / 'mine.py'}:Mine"), UserCodeError, "Mine.* failed: ")


@pytest.mark.parametrize(("bad", "message"), [(float("nan"), "is nan"), (None, "reward")])
def test_a_reward_that_is_no_number(tmp_path, monkeypatch, bad, message):
    monkeypatch.setattr(KnightsKnaves, "score", lambda *_: Score(bad, False))
    refused(make(tmp_path), tasks.RewardError, message)


def test_a_prompt_that_cannot_be_encoded(tmp_path):
    refused(make(tmp_path, "rollout.max_prompt=20"), ModelError, "more than rollout.max_prompt=20: raise it")


def test_probabilities_that_are_not_finite(tmp_path, monkeypatch):
    def padded(self, *args, real=Policy.head):
        head = real(self, *args)
        return type(head)(head.weight * float("nan")) if trial else head

    trial = False

    def preflight(*args, real=module.preflight):
        nonlocal trial
        trial = True
        real(*args)

    monkeypatch.setattr(Policy, "head", padded)
    monkeypatch.setattr(trainer, "preflight", preflight)
    refused(make(tmp_path), TrainError, "not finite, before any training: set dtype=float32")


def test_a_disk_without_room_for_the_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40_000_000))
    message = r"3 checkpoints of 23.4 MB need 70.1 MB, but the disk has 40 MB free \(keep_checkpoints=2"
    refused(make(tmp_path), CheckpointError, message)
    monkeypatch.setattr(trainer.Trainer, "run", lambda *_: {})
    assert trainer.train(make(tmp_path, "checkpoint_every=0"), quiet=True) == {}  # one is all it writes


def test_a_checkpoint_of_lora_has_the_adapters_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))  # the model has 5.8 MB
    monkeypatch.setattr(trainer.Trainer, "run", lambda *_: {})
    assert trainer.train(make(tmp_path, "lora.rank=2"), quiet=True) == {}


def test_a_tracker_that_cannot_be_imported_or_started(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(make(tmp_path, "tracking=wandb"), TrackerError, "tracker 'wandb' cannot be imported")

    def init(dir, **_):  # noqa: A002 - W&B's name
        (RunFolder(dir).path / "wandb").mkdir()
        raise PermissionError("api_key not configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    refused(make(tmp_path, "tracking=[tensorboard, wandb]"), TrackerError, "cannot be started .*api_key not configured")


@pytest.mark.usefixtures("short_evaluation")
class TestFolder:
    def test_an_empty_folder_that_was_there_stays(self, tmp_path, monkeypatch):
        monkeypatch.setattr(KnightsKnaves, "score", lambda *_: Score(float("nan"), False))
        (tmp_path / "run").mkdir()
        with pytest.raises(tasks.RewardError):
            run(tmp_path)
        assert list((tmp_path / "run").iterdir()) == []

    def test_a_run_to_resume_stays_as_it_was(self, tmp_path, monkeypatch):
        folder, _ = run(tmp_path, *SHORT, "steps=1", "checkpoint_every=1")
        (folder.path / "summary.json").unlink()  # it was killed before its end
        before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
        monkeypatch.setattr(KnightsKnaves, "score", lambda *_: Score(float("nan"), False))
        with pytest.raises(tasks.RewardError):
            trainer.train(make(tmp_path, *SHORT, "steps=1", "checkpoint_every=1"), resume=True, quiet=True)
        assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before

    @pytest.mark.parametrize(("error", "stays"), [(RuntimeError, False), (KeyboardInterrupt, True)])
    def test_a_first_evaluation_that_fails_leaves_none_and_one_that_is_stopped_does(
        self, tmp_path, monkeypatch, error, stays
    ):
        def evaluate(*_):
            raise error

        monkeypatch.setattr(EvaluationSchedule, "measure", evaluate)
        with pytest.raises(error):
            run(tmp_path)
        assert (tmp_path / "run").exists() == stays

    def test_without_evaluation_a_first_step_that_fails_can_be_resumed(self, tmp_path, monkeypatch):
        def step(*_):
            raise RuntimeError

        monkeypatch.setattr(trainer.Trainer, "step", step)
        with pytest.raises(RuntimeError):
            run(tmp_path, "evaluation=off")
        monkeypatch.undo()
        assert RunFolder.open(tmp_path / "run").metrics() == []
