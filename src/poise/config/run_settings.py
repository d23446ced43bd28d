"""The settings of a run folder or a model, for the commands that go on with a run, measure one or look at one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from poise import regulators
from poise._lib import user_code
from poise._lib.errors import short
from poise.config.documents import SHORT_FORMS, ConfigError, Document, merge, parse, read, split_overrides
from poise.config.groups import EvaluationConfig, RolloutConfig
from poise.config.messages import unknown_key
from poise.config.schema import Config, keys, restore
from poise.models.places import EMBEDDED, locate
from poise.runs.folder import RunFolder
from poise.runs.listing import is_run
from poise.tasks import Task

# How a model is measured that no run made.
_MEASUREMENT: Document = {"rollout": {"max_tokens": 512, "batch": 256}, "evaluation": {"samples": 8, "problems": 200}}
# The keys of poise eval that need no group: those of evaluation and of rollout.
SHORT_KEYS = {
    **{name: f"rollout.{name}" for name in RolloutConfig.model_fields},
    **{name: f"evaluation.{name}" for name in EvaluationConfig.model_fields if name != "every"},
}
_EVALUATED = ("task", "rollout", "evaluation", "device", "dtype", "remote_code")  # what changes an evaluation


def run_of(model: str) -> str | None:
    """The run folder that a model belongs to, if it is a run, a checkpoint of one, or the model in a checkpoint."""
    place = Path(model)
    above = [folder.parent for folder in place.absolute().parents if folder.name == "checkpoints" and place.is_dir()]
    return next((str(folder) for folder in (place, *above) if is_run(folder)), None)


def starting_model(model: str) -> str:
    """The model with which the run of ``model`` started; ``model`` itself if no run made it."""
    run = run_of(model)
    named = None if run is None else RunFolder.open(run, resume=False).config.get("model")
    return named if isinstance(named, str) else model


def of_run(path: str, changes: Document, *, trust: bool = False, regulator: bool = True) -> Config:
    """The settings of the run in a folder, changed. Code that the run names is loaded only with ``trust``.

    Without ``regulator`` the run's regulator stays a text: a command that only samples does not need its code.
    """
    document = RunFolder.open(path, resume=False).config
    return _restored(document, changes, f"the run in {path}", trust=trust, regulator=regulator)


def to_evaluate(model: str, overrides: Sequence[str], *, trust: bool = False) -> Config:
    """What ``poise eval`` measures a model with: the settings of its run or its folder, changed by ``overrides``."""
    changes = split_overrides(overrides, SHORT_KEYS)
    evaluation = changes.get("evaluation")
    if isinstance(evaluation, dict) and evaluation.get("temperature") == 0:
        evaluation.setdefault("samples", 1)  # greedy samples are all the same
    if (run := run_of(model)) is None:
        locate(model)  # raises where there is no such folder, before anything is said about its task
        document = merge(_MEASUREMENT, _folder_task(model))
    else:
        document = RunFolder.open(run, resume=False).config
    if wrong := [key for key in changes if not _evaluated(key)]:
        task = merge(document, changes).get("task")
        raise ConfigError([unknown_key(key, evaluation_keys(task)) for key in wrong])
    if isinstance(evaluation, dict) and evaluation.get("problems") == 0:
        raise ConfigError(["problems = 0: must be at least 1"])
    measured = document.get("evaluation")
    if isinstance(measured, dict) and measured.get("problems") == 0:  # the run measured nothing
        own = measured != EvaluationConfig(problems=0).model_dump(mode="json")  # samples and temperature are the user's
        document = merge(document, {"evaluation": {"problems": 200} if own else _MEASUREMENT["evaluation"]})
    source = f"the model in {model}" if run is None else f"the run in {run}"
    return _restored(document, {**changes, "model": model}, source, trust=trust, regulator=False)


def to_diagnose(model: str, overrides: Sequence[str], *, trust: bool = False) -> Config:
    """What ``poise diagnose`` measures a model with: the settings of its run, or a recipe's with small batches."""
    changes = split_overrides(overrides)
    if "regulator" in changes:
        raise ConfigError(["regulator: name the methods to measure with --regulator, once for each"])
    changes["model"] = model
    if (run := run_of(model)) is not None:
        RunFolder.open(run, resume=False).newest()  # raises where there is none
        return of_run(run, changes, trust=trust, regulator=False)
    locate(model)
    if model == "embedded":  # within a minute on a laptop
        document = merge(read("demo"), {"prompts": 6})
    else:
        document = merge(read("grpo"), {"prompts": 8, "rollout": {"max_tokens": 512}})
        document = {key: value for key, value in document.items() if key != "task"} | _folder_task(model)
    return _restored(document, changes, f"the model in {model}", trust=trust)


def task_to_show(words: Sequence[str]) -> tuple[Task, int, str]:
    """The task, the seed and the split that ``poise tasks show`` is given: a task's name, and overrides."""
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise ConfigError([f"one task at a time, got {' and '.join(names)}; settings are written key=value"])
    overrides = [*(f"task.name={name}" for name in names), *(word for word in words if "=" in word)]
    changes = split_overrides(overrides)
    seed, split = changes.pop("seed", 0), str(changes.pop("split", "train"))
    if wrong := [key for key in changes if key != "task"]:
        known = ["seed", "split", *SHORT_FORMS, *(key for key in keys(changes) if key.startswith("task."))]
        raise ConfigError([unknown_key(key, known) for key in wrong])
    config = restore({**changes, "seed": seed}, trust=True)
    return config.task.build(), config.seed, split


def _restored(document: Document, changes: Document, source: str, *, trust: bool, regulator: bool = True) -> Config:
    """``document``, which may be anybody's, with changes that the user typed."""
    document = merge(document, changes)
    kept: Document = {}
    if not regulator:
        kept["regulator"] = str(document.get("regulator", "grpo"))
        document["regulator"] = "grpo"
    if changes.get("remote_code") is True:  # the user's own word, not the run's
        kept["remote_code"], document["remote_code"] = True, False
    return restore(document, source=source, trust=trust, typed=changes).model_copy(update=kept)


def _folder_task(model: str) -> Document:
    """The task that a model was made for: ``warmstart.yaml`` beside its weights says; nothing for others."""
    path = (EMBEDDED if model == "embedded" else Path(model)) / "warmstart.yaml"
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    match settings:
        case {"task": str(name), "task_settings": dict(chosen)}:
            return {"task": {**chosen, "name": name}}
    return {}


def evaluation_keys(task: Any = None) -> list[str]:
    """The keys that ``poise eval`` takes; ``task`` is the group of a task's settings."""
    return [*SHORT_KEYS, *SHORT_FORMS, *(key for key in keys({"task": task}) if _evaluated(key))]


def _evaluated(key: str) -> bool:
    return key.partition(".")[0] in _EVALUATED


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


class Difference(NamedTuple):
    """One setting that differs: its dotted key and both values."""

    key: str
    saved: Any
    now: Any


def differences(saved: Document, now: Document) -> Iterator[Difference]:
    """What differs. A setting that an older version lacked counts as equal, and so does a regulator written otherwise.

    ``now`` is the user's own; ``saved`` may be anybody's, and code that it alone names is not loaded.
    """
    for found in _differences(merge(now, saved), now, ""):
        if found.key != "regulator" or not _same_regulator(found.saved, found.now):
            yield found


def _differences(saved: Document, now: Document, prefix: str) -> Iterator[Difference]:
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(now.get(key), dict):
            yield from _differences(value, now[key], f"{prefix}{key}.")
        elif value != now.get(key):
            yield Difference(f"{prefix}{key}", value, now.get(key))


def _same_regulator(saved: Any, now: Any) -> bool:
    """Whether two texts mean the same: ``ar`` and ``ar(alpha=0.2)``."""
    try:
        with user_code.untrusted("the run", [now]):
            return regulators.text(regulators.parse(saved)) == regulators.text(regulators.parse(now))
    except (ValueError, TypeError):
        return False
