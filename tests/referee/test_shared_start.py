"""The accuracy before training that runs share: when it is the same to the bit, and when it is not taken."""

import os

import pytest
import torch

from poise import trainer
from poise.models.loading import resolve_device
from poise.referee.compare import shared_start
from poise.runs.folder import RunFolder
from poise.runs.subscribers import evaluation_schedule
from poise.runs.subscribers.recorder import environment
from poise.training.config.schema import load
from poise.training.resume import keep_changes
from support.comparisons import evaluation, make, write_rows
from support.small_runs import make as make_run


def test_arms_and_seeds_begin_alike_and_other_models_or_measurements_do_not(tmp_path):
    plan = make(tmp_path, regulator="grpo; ar; lopti")
    first, *others = plan.all_runs()
    assert all(shared_start.same_start(first, other) for other in others)
    others = (
        "rollout.temperature=0.5",
        "evaluation.seed=1",
        "dtype=bfloat16",
        "deterministic=true",
        "steps=3",
        "task.people=3",
    )
    for setting in others:
        other = make(tmp_path, setting).all_runs()[0]
        assert not shared_start.same_start(first, other), setting


class StopError(Exception):
    pass


@pytest.fixture
def sampled(tmp_path, monkeypatch):
    """The responses of a run's evaluation before training: tokens and log-probabilities."""

    def sampled(*settings):
        found, real = [], evaluation_schedule.held_out

        def first(*args):
            found.extend(real(*args).attempts)
            raise StopError

        with monkeypatch.context() as patch:
            patch.setattr(evaluation_schedule, "held_out", first)
            with pytest.raises(StopError):
                trainer.train(make_run(tmp_path, "rollout.max_tokens=12", *settings, name=str(settings)), quiet=True)
        return found

    return sampled


@pytest.mark.parametrize("lora", [[], ["lora.rank=4"]])
def test_it_is_the_same_to_the_bit_whatever_is_trained_and_with_which_seed(sampled, lora):
    arms = [
        ["seed=1"],
        ["algorithm=rltr"],
        ["regulator=lopti", "group=2", "prompts=7", "objective.kl_coef=0.1"],
    ]
    expected = sampled(*lora)
    assert len(expected) == 6
    for arm in arms:
        for one, other in zip(expected, sampled(*lora, *arm), strict=True):
            assert torch.equal(one.tokens, other.tokens), arm
            assert torch.equal(one.logp, other.logp), arm


def test_what_was_measured_elsewhere_is_not_taken(tmp_path):
    config = load("tiny", ["device=cpu"])
    folder = RunFolder.create(tmp_path / "run", config.model_dump(mode="json"))
    here = environment(resolve_device("cpu"))

    def read(**changes):
        folder.write_json("environment.json", {**here, **changes})
        folder.write_json("before.json", evaluation(0.2))
        return shared_start.read(folder.path / "before.json", config)

    assert read() == read(poise="0.1") == evaluation(0.2)
    for changes in ({"device": "cuda: H200"}, {"threads": here["threads"] + 1}, {"torch": "2.0"}):
        assert read(**changes) is None
    assert read() is not None
    later = (folder.path / "before.json").stat().st_mtime_ns + 10**9
    os.utime(folder.path / "environment.json", ns=(later, later))  # the run was resumed, maybe on another machine
    assert shared_start.read(folder.path / "before.json", config) is None
    assert read() is not None
    folder.write_json("before.json", {"accuracy": 1})
    assert shared_start.read(folder.path / "before.json", config) is None


def test_it_is_not_taken_if_the_data_were_edited_since(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    settings = ["model=embedded", f"data={rows}", "reward=math", "device=cpu", f"run={tmp_path / 'run'}"]
    config = load(None, settings)
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    folder.write_json("data.json", {"fingerprint": config.task.build().fingerprint})
    folder.write_json("environment.json", environment(resolve_device("cpu")))
    folder.write_json("before.json", evaluation(0.5))
    assert shared_start.read(folder.path / "before.json", config) == evaluation(0.5)
    rows.write_text(rows.read_text().replace("3 + 1?", "4 + 0?"))
    assert shared_start.read(folder.path / "before.json", load(None, settings)) is None


def test_it_is_not_taken_if_the_code_of_the_task_was_edited_since(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "mine.py").write_text("def right(completions, **columns):\n    return [1.0 for _ in completions]\n")
    (tmp_path / "softer.py").write_text("import poise\n\n@poise.regulator\ndef softer(batch): ...\n")
    settings = ["model=embedded", f"data={rows}", "reward=mine.py:right", "device=cpu", f"run={tmp_path / 'run'}"]
    config = load(None, [*settings, "regulator=softer.py:softer"])
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    keep_changes(config, folder, 0)
    folder.write_json("environment.json", environment(resolve_device("cpu")))
    folder.write_json("before.json", evaluation(0.5))
    (tmp_path / "softer.py").write_text("import poise\n\n@poise.regulator\ndef softer(batch): pass\n")
    assert shared_start.read(folder.path / "before.json", load(None, settings)) == evaluation(0.5)  # no regulator
    (tmp_path / "mine.py").write_text("def right(completions, **columns):\n    return [0.0 for _ in completions]\n")
    assert shared_start.read(folder.path / "before.json", load(None, settings)) is None
