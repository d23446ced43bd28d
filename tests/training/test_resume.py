"""What a resumed run may change, what it refuses, and what is written down of every start."""

import json
from datetime import datetime

import pytest
import torch

from poise import trainer
from poise.models import prompts
from poise.runs.checkpoint_files import CHANGEABLE
from poise.runs.folder import CheckpointError, DamagedError, RunFolder
from poise.runs.subscribers.evaluation_schedule import EvaluationSchedule
from poise.runs.subscribers.recorder import write_start
from poise.training import building, checkpoints
from poise.training import config as configs
from poise.training.config.documents import merge
from poise.training.config.schema import keys
from poise.training.resume import TrainError, check_same_code, keep_changes, open_to_resume
from poise.training.steps import State
from support.command_line import fails, poise
from support.small_runs import SHORT, make, run

FREE = [
    "tracking=tensorboard", "checkpoint_every=1", "keep_checkpoints=5", "rollouts_every=1", "steps=3", "budget=1e9",
    "rollout.vllm_memory=0.5",
]  # fmt: skip
NOTED = ["optim.micro_tokens=300", "rollout.batch=3", "device=cpu", "compile=false", "rollout.max_prompt=600"]


def settings(copy, **changes):
    """The settings of the run in a folder, changed."""
    return configs.restore(merge(RunFolder(copy).config, {"run": str(copy), **changes}))


def test_one_table_says_what_may_change():
    typed = {item.partition("=")[0] for item in FREE + NOTED}
    assert typed | {"run", "stop_at", "task.reward_timeout"} == CHANGEABLE.keys()
    known = set(keys({"task": {"name": "data"}}))
    assert CHANGEABLE.keys() <= known


@pytest.mark.usefixtures("short_evaluation")
def test_what_cannot_change_the_result_may_change_and_the_checkpoint_is_still_the_runs_own(copy):
    assert poise("train", "--resume", copy, "--quiet", *FREE, *NOTED).exit_code == 0
    folder = RunFolder(copy)
    assert len(folder.metrics()) == 3
    assert folder.config["optim"]["micro_tokens"] == 300
    assert folder.config["tracking"] == ["tensorboard"]
    assert (copy / "tensorboard").is_dir()
    poise("train", "--resume", copy, "steps=4", "--quiet")  # from a checkpoint with the new settings
    assert len(folder.metrics()) == 4


def test_notes_name_what_changed(copy, capsys):
    open_to_resume(settings(copy, optim={"micro_tokens": 300}, tracking=["wandb"]))
    said = capsys.readouterr().err
    assert "optim.micro_tokens was None and is 300 now: the remaining steps round differently" in " ".join(said.split())
    assert "tracking" not in said


def test_a_start_that_is_refused_leaves_the_settings_alone(copy):
    before = RunFolder(copy).config
    said = fails("train", "--resume", copy, "steps=3", "device=cuda:99", "optim.micro_tokens=300")
    assert "cuda" in said
    assert RunFolder(copy).config == before


def test_max_prompt_may_only_rise(copy):
    with pytest.raises(TrainError, match=r"rollout.max_prompt=20: a resumed run may only raise it"):
        open_to_resume(settings(copy, rollout={"max_prompt": 20}))


def test_an_edited_config_gets_the_right_sentence(copy):
    folder = RunFolder(copy)
    folder.write_config(merge(folder.config, {"optim": {"lr": 0.5}}))
    said = " ".join(fails("train", "--resume", copy, "steps=3").split())
    assert "config.json was edited since the run began (optim.lr = 0.5 instead of 0.0002): undo the changes" in said
    assert "no checkpoint" not in said
    assert folder.checkpoints() == [1, 2]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_running_out_of_memory_is_no_damage(copy, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(checkpoints, "load_file", full)
    with pytest.raises(CheckpointError, match=r"out of memory while reading .*step-000002, which is intact"):
        trainer.train(settings(copy, steps=3), resume=True, quiet=True)
    assert RunFolder(copy).checkpoints() == [1, 2]
    assert len(RunFolder(copy).metrics()) == 2
    assert not list((copy / "checkpoints").glob("set-aside-*"))


def test_every_start_is_kept(copy):
    folder = RunFolder(copy)
    first = folder.read_json("environment.json")
    assert {"torch", "transformers", "package", "threads", "device", "python", "began", "parameters"} <= first.keys()
    assert first["after_step"] == 0
    assert write_start(folder, first, 2) == []
    (said,) = write_start(folder, first | {"threads": 99, "torch": "9.9"}, 2)
    assert said.startswith("changed since the last start: ")
    assert f"torch 9.9 instead of {first['torch']}, threads 99 instead of {first['threads']}" in said
    now = folder.read_json("environment.json")
    assert (now["threads"], now["began"], now["after_step"]) == (99, first["began"], 2)
    assert [(start["after_step"], start["threads"]) for start in now["earlier_starts"]] == [(0, 1), (2, 1)]
    assert poise("report", copy).exit_code == 0


def test_starts_of_older_versions_and_damaged_ones_are_told(copy):
    folder = RunFolder(copy)
    first = folder.read_json("environment.json")
    older = {key: value for key, value in first.items() if key not in ("package", "began", "after_step")}
    folder.write_json("environment.json", older | {"earlier_starts": None})
    (said,) = write_start(folder, first, 2)
    assert f"the code of poise {first['package']} instead of an unknown one;" in said
    assert folder.read_json("environment.json")["earlier_starts"] == [older]


def test_the_final_evaluation_is_none_of_those_that_stop_at_watches(copy):
    """It has other problems: a run that goes on must not stop by the accuracy that it reports."""
    folder = RunFolder(copy)
    config = settings(copy, steps=3).model_copy(update={"stop_at": 0.5})
    assert not EvaluationSchedule(None, config, folder, None, None, None).catch_up(2)
    assert not any(key.startswith("eval/") for key in folder.metrics()[-1])


def test_templates_show_the_date_on_which_the_run_began(copy, monkeypatch):
    folder = RunFolder(copy)
    folder.write_json("environment.json", folder.read_json("environment.json") | {"began": "2020-02-03T04:05:06"})
    assert folder.began() == datetime(2020, 2, 3, 4, 5, 6)
    monkeypatch.setattr(prompts, "_DATE", [datetime(2026, 1, 1)])

    shown = []
    monkeypatch.setattr(building, "load_policy", lambda *_, **__: shown.append(prompts._DATE[0]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train(settings(copy, steps=3), resume=True, quiet=True)
    assert shown == [datetime(2020, 2, 3, 4, 5, 6)]


def test_an_adapter_is_described_alike_after_a_resume(tmp_path):
    lora = (*SHORT, "lora.rank=2", "checkpoint_every=1", "evaluation=off")
    folder, _ = run(tmp_path, *lora, "steps=1")
    first = (folder.newest() / "model" / "adapter_config.json").read_bytes()
    targets = json.loads(first)["target_modules"]
    assert targets == sorted(targets)  # not in the order of a set, which differs from process to process
    trainer.train(configs.restore(folder.config | {"steps": 2}), resume=True, quiet=True)
    assert (folder.newest() / "model" / "adapter_config.json").read_bytes() == first


SOFTER = """
import poise
import resumed_helper

@poise.regulator
def softer(batch):
    return [poise.Phase.of(batch, resumed_helper.weight)]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("short_evaluation")
def test_edited_code_is_refused_by_name_and_may_be_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "softer.py").write_text(SOFTER)
    (tmp_path / "resumed_helper.py").write_text("weight = 0.5\n")
    folder, _ = run(tmp_path, *SHORT, "regulator=softer.py:softer", "steps=1")
    assert poise("train", "--resume", folder.path, "steps=2", "--trust", "--quiet").exit_code == 0
    (tmp_path / "resumed_helper.py").write_text("weight = 2.5\n")
    said = " ".join(fails("train", "--resume", folder.path, "steps=3", "--trust").split())
    assert "resumed_helper.py: this code was edited since the run in" in said
    assert "--trust-changed" in said
    assert "softer.py" not in said
    assert len(folder.metrics()) == 2
    (tmp_path / "resumed_helper.py").write_text("weight = None\n")
    fails("train", "--resume", folder.path, "steps=3", "--trust-changed")  # in its first trial
    assert len(folder.code_versions()) == 1
    (tmp_path / "resumed_helper.py").write_text("weight = 2.5\n")
    shown = poise("train", "--resume", folder.path, "steps=3", "--trust-changed").output
    assert "resumed_helper.py: edited since the run began" in shown
    assert [line["reg/all/weight_mean"] for line in folder.metrics()] == [0.5, 0.5, 2.5]
    assert len(folder.code_versions()) == 2
    assert [each["after_step"] for each in json.loads((folder.path / "code.json").read_text())] == [0, 2]
    assert poise("train", "--resume", folder.path, "steps=4", "--trust", "--quiet").exit_code == 0  # accepted


def test_a_run_without_a_record_of_its_code_goes_on(tmp_path, monkeypatch):
    """Runs of older versions have none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "softer.py").write_text(SOFTER)
    (tmp_path / "resumed_helper.py").write_text("weight = 0.5\n")
    config = configs.load("tiny", ["regulator=softer.py:softer", f"run={tmp_path / 'run'}"])
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    assert check_same_code(config, folder) == []
    keep_changes(config, folder, 0)
    assert folder.code_versions() == [config.code]
    assert config.code["softer.py:softer"].keys() == {"softer.py", "resumed_helper.py"}


@pytest.mark.parametrize("state", [State(2, 70, {"lessons": ["a"]}), State(3, 99)])
def test_the_state_is_saved_and_restored_whole(tmp_path, state):
    """In the two files that run folders have always had: those of older versions resume."""
    config = make(tmp_path, "evaluation=off")
    held = trainer.Trainer(config, RunFolder.create(config.run, config.model_dump(mode="json")), quiet=True)
    assert held.checkpoints.restore() == State()
    for step in range(1, 5):
        held.folder.log(step, {"a": 1.0})
    held.checkpoints.save(state)
    place = held.folder.newest()
    assert json.loads((place / "progress.json").read_text()) == {"tokens": state.tokens}
    assert (place / "memory.json").exists() == (state.memory is not None)
    assert held.checkpoints.restore() == state
    assert [line["step"] for line in held.folder.metrics()] == [*range(1, state.step + 1)]


@pytest.mark.parametrize("text", ["5", "{}", "[]", "null", "[5]", '[{"code": 7}]', '[{"code": {"mine.py:x": 5}}]'])
def test_damaged_hashes_of_code_are_refused(tmp_path, text):
    """Taken for those of an older version, edited code would be accepted."""
    (tmp_path / "code.json").write_text(text)
    with pytest.raises(DamagedError, match=r"code.json does not hold hashes of code"):
        RunFolder(tmp_path).code_versions()
