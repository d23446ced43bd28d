"""The settings of a run folder, for the commands that go on with a run or look at one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

from poise._lib.errors import short
from poise._lib.files import read_json
from poise.config.documents import Document, merge
from poise.config.schema import Config, restore
from poise.runs.folder import RunFolder

# How a model is measured that is no run's.
_MEASURED: Document = {"rollout": {"max_tokens": 512, "batch": 256}, "evaluation": {"samples": 8, "problems": 200}}


def is_run(model: str) -> bool:
    """Whether a folder is a run's, be it one that was stopped before its first checkpoint."""
    try:
        found = read_json(Path(model) / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "rollout" in found


def run_of(model: str) -> str | None:
    """The folder of the run that a model is of: of a run itself, of a checkpoint, or of the model in one."""
    place = Path(model)
    above = [folder.parent for folder in place.absolute().parents if folder.name == "checkpoints" and place.is_dir()]
    return next((str(folder) for folder in (place, *above) if is_run(str(folder))), None)


def of_run(path: str, changes: Document, *, trust: bool = False, regulator: bool = True) -> Config:
    """The settings of the run in a folder, changed. Code that they name is loaded only with ``trust``.

    Without ``regulator`` the run's regulator stays a text: whoever only samples has no use for its code.
    """
    document = merge(RunFolder.open(path, resume=False).config, changes)
    kept: Document = {}
    if not regulator:
        kept["regulator"] = str(document.get("regulator", "grpo"))
        document["regulator"] = "grpo"
    if changes.get("remote_code") is True:  # the user's own word, not the run's
        kept["remote_code"], document["remote_code"] = True, False
    return restore(document, source=f"the run in {path}", trust=trust).model_copy(update=kept)


def to_evaluate(model: str, changes: Document, *, trust: bool = False) -> Config:
    """What ``poise eval`` measures a model with: the task and the settings of its run, where it has one, changed."""
    changes = {**changes, "model": model}
    if (run := run_of(model)) is not None:
        return of_run(run, changes, trust=trust, regulator=False)
    return restore(merge(_MEASURED, changes), trust=True)  # typed, all of it


def describe_task(config: Config) -> str:
    """The task with its settings; long ones, such as texts of instructions, only where they were changed."""
    given, task = config.task.settings, config.task.build()
    shown = {name: short(value) for name, value in given.items()}
    if is_dataclass(task):
        values = {field.name: getattr(task, field.name) for field in fields(task) if field.init}
        shown = {name: short(value) for name, value in values.items() if name in given or len(repr(value)) < 40}
    return config.task.name + (f" ({', '.join(f'{name}={value}' for name, value in shown.items())})" if shown else "")


def describe_sampling(config: Config, temperature: float) -> str:
    """How responses are sampled."""
    rollout = config.rollout
    limits = f"top_p {rollout.top_p:g}, top_k {rollout.top_k}, up to {rollout.max_tokens} tokens"
    return f"temperature {temperature:g}, {limits}"
