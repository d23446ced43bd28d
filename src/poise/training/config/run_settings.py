"""Settings for the commands that resume, evaluate, diagnose or show: read from a run folder or a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from poise import regulators
from poise._lib import live, user_code
from poise._lib.errors import short
from poise.models.location import SHIPPED, locate, with_revision
from poise.runs.checkpoint_files import dotted
from poise.runs.folder import RunFolder
from poise.runs.listing import is_run
from poise.training.config.documents import (
    SHORT_FORMS,
    ConfigError,
    Document,
    merge,
    parse,
    read,
    recipes,
    split_overrides,
)
from poise.training.config.groups import EvaluationConfig, RolloutConfig
from poise.training.config.messages import unknown_key
from poise.training.config.schema import GRPO, Config, keys, restore

# Settings with which ``poise eval`` measures a model that is not from a run.
_MEASUREMENT: Document = {"rollout": {"max_tokens": 512, "batch": 256}, "evaluation": {"samples": 8}}
# Keys that poise eval accepts without their group: the keys of evaluation and rollout.
SHORT_KEYS = {
    **{name: f"rollout.{name}" for name in RolloutConfig.model_fields},
    **{name: f"evaluation.{name}" for name in EvaluationConfig.model_fields if name != "every"},
}
# Settings that change an evaluation.
_EVALUATED = ("task", "rollout", "evaluation", "device", "dtype", "remote_code", "revision", "template")
_SHOWN = ("task", "model", "revision", "template", "remote_code")  # settings that change the prompt


def run_of(model: str) -> str | None:
    """The run folder if ``model`` is a run, a checkpoint of a run, or the model in a checkpoint; else None."""
    place = Path(model)
    above = [folder.parent for folder in place.absolute().parents if folder.name == "checkpoints" and place.is_dir()]
    return next((str(folder) for folder in (place, *above) if is_run(folder)), None)


def starting_model(model: str) -> str:
    """The model from which the run of ``model`` started; ``model`` itself if no run saved ``model``."""
    run = run_of(model)
    settings: Document = {} if run is None else RunFolder.open(run, resume=False).config
    named, revision = settings.get("model"), settings.get("revision")
    return with_revision(named, revision if isinstance(revision, str) else None) if isinstance(named, str) else model


def of_run(path: str, changes: Document, *, trust: bool = False, regulator: bool = True) -> Config:
    """Return the settings of the run in a folder, with ``changes``. Load code that the run names only with ``trust``.

    With ``regulator=False``, the run's regulator stays a string: a command that only samples does not need the
    regulator's code.
    """
    document = RunFolder.open(path, resume=False).config
    return _restored(document, changes, f"the run in {path}", trust=trust, regulator=regulator)


def to_evaluate(model: str, overrides: Sequence[str], *, trust: bool = False) -> Config:
    """Return the settings for ``poise eval``, read from the model's run or folder and changed by ``overrides``."""
    changes = split_overrides(overrides, SHORT_KEYS)
    evaluation = changes.get("evaluation")
    if isinstance(evaluation, dict) and evaluation.get("temperature") == 0:
        evaluation.setdefault("samples", 1)  # greedy samples are all the same
    if (run := run_of(model)) is None:
        _check_model(model)
        document = merge(_MEASUREMENT, _folder_task(model))
    else:
        document = RunFolder.open(run, resume=False).config
    if wrong := [key for key in changes if not _evaluated(key)]:
        task_keys = (key for key in keys({"task": merge(document, changes).get("task")}) if _evaluated(key))
        known = [*SHORT_KEYS, *SHORT_FORMS, *task_keys]
        raise ConfigError(*(unknown_key(key, known) for key in wrong))
    if isinstance(evaluation, dict) and evaluation.get("problems") == 0:
        raise ConfigError("problems = 0: must be at least 1")
    measured = document.get("evaluation")
    if isinstance(measured, dict) and measured.get("problems") == 0:  # the run had no evaluation
        own = measured != EvaluationConfig(problems=0).model_dump(mode="json")  # samples and temperature are the user's
        more = {} if own else _MEASUREMENT["evaluation"]
        document = merge(document, {"evaluation": {"problems": EvaluationConfig().problems, **more}})
    source = f"the model in {model}" if run is None else f"the run in {run}"
    return _restored(document, {**changes, "model": model}, source, trust=trust, regulator=False)


def to_diagnose(model: str, overrides: Sequence[str], *, trust: bool = False) -> Config:
    """Return the settings for ``poise diagnose``, from the model's run or from a recipe with small batches."""
    changes = split_overrides(overrides)
    if "regulator" in changes:
        raise ConfigError("regulator: name the methods to measure with --regulator, once for each")
    if options := [key for key in ("batches", "warmup", "intervals", "out") if key in changes]:
        raise ConfigError(*(f"{key}= is an option: --{key} {changes[key]}" for key in options))
    changes["model"] = model
    if (run := run_of(model)) is not None:
        RunFolder.open(run, resume=False).newest()  # raises an error if the run has no checkpoint
        return of_run(run, changes, trust=trust, regulator=False)
    _check_model(model)
    if model in SHIPPED:  # small, to finish within a minute on a laptop
        document = merge(read("tiny"), {"prompts": 6}) | _folder_task(model)
    else:
        document = merge(read("grpo"), {"prompts": 8, "rollout": {"max_tokens": 512}})
        document = {key: value for key, value in document.items() if key != "task"} | _folder_task(model)
    return _restored(document, changes, f"the model in {model}", trust=trust)


def task_to_show(words: Sequence[str]) -> tuple[Config, str]:
    """Return the settings and the split for ``poise tasks show``, from a task's name and overrides."""
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise ConfigError(f"one task at a time, got {' and '.join(names)}; settings are written key=value")
    overrides = [*(f"task.name={name}" for name in names), *(word for word in words if "=" in word)]
    changes = split_overrides(overrides)
    seed, split = changes.pop("seed", 0), str(changes.pop("split", "train"))
    if wrong := [key for key in changes if key not in _SHOWN]:
        tasks_own = (key for key in keys(changes) if key.startswith("task."))
        known = ["seed", "split", *_SHOWN[1:], *SHORT_FORMS, *tasks_own]
        raise ConfigError(*(unknown_key(key, known) for key in wrong))
    return restore({**changes, "seed": seed}, trust=True), split


def _restored(document: Document, changes: Document, source: str, *, trust: bool, regulator: bool = True) -> Config:
    """Return the settings of an untrusted ``document``, with changes that the user typed or passed from Python."""
    document = merge(document, changes)
    if "model" in changes:  # the run's revision belongs to the model with which it began
        document["revision"] = changes.get("revision")
    own: Document = {}  # settings that are added again without a check
    if not regulator:
        own["regulator"] = str(document.get("regulator", GRPO))
        document["regulator"] = GRPO
    if changes.get("remote_code") is True:  # the user asks for it, not the run
        own["remote_code"], document["remote_code"] = True, False
    if needed := live.missing(document):
        way = f"pass the same objects to {live.resume_call(document, document.get('run', 'DIR'))}"
        way = way if regulator else "name others, data=FILE reward=NAME or task.name=NAME"
        raise ConfigError(f"{source} uses Python objects that its folder cannot hold: {needed}; {way}")
    return restore(document, source=source, trust=trust, typed=changes).model_copy(update=own)


def _check_model(model: str) -> None:
    """Raise an error for a missing folder or the name of a recipe, before a missing task is reported."""
    if model in recipes() and not Path(model).exists():
        raise ConfigError(f"{model} is a recipe, not a model: name a run of it, such as {read(model)['run']}")
    locate(model)


def _folder_task(model: str) -> Document:
    """The task on which a model was warm-started, from ``warmstart.yaml`` next to its weights; empty if it has none."""
    path = SHIPPED.get(model, Path(model)) / "warmstart.yaml"
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    match settings:
        case {"task": str(name), "task_settings": dict(chosen)}:
            return {"task": {**chosen, "name": name}}
    return {}


def _evaluated(key: str) -> bool:
    return key.partition(".")[0] in _EVALUATED


def describe_task(config: Config) -> str:
    """Describe the task and its settings. Long values and None appear only if the user set them."""
    settings, task = config.task.settings, config.task.build()
    texts = {name: short(value) for name, value in settings.items()}
    if is_dataclass(task):
        values = {field.name: getattr(task, field.name) for field in fields(task) if field.init}
        plain = {name for name, value in values.items() if value is not None and len(repr(value)) < 40}
        texts = {name: short(value) for name, value in values.items() if name in settings or name in plain}
    return config.task.name + (f" ({', '.join(f'{name}={text}' for name, text in texts.items())})" if texts else "")


def describe_sampling(config: Config, temperature: float) -> str:
    """Describe the sampling settings."""
    rollout = config.rollout
    limits = f"top_p {rollout.top_p:g}, top_k {rollout.top_k}, up to {rollout.max_tokens} tokens"
    return f"temperature {temperature:g}, {limits}"


def differences(saved: Document, now: Document) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that differs, as (dotted key, saved value, new value).

    A setting that an older version lacked counts as equal, and so do two spellings of the same regulator. ``now``
    comes from the user. ``saved`` is untrusted, so code that only ``saved`` names is not loaded.
    """
    before, after = dict(dotted(merge(now, saved))), dict(dotted(now))
    for key in before | after:
        old, new = before.get(key), after.get(key)
        if old != new and not (key == "regulator" and _same_regulator(old, new)):
            yield key, old, new
    saved_template, template = saved.get("template"), now.get("template")
    if isinstance(saved_template, dict) and isinstance(template, dict) and saved_template.keys() < template.keys():
        yield "template", saved_template, template  # an added argument counts as a difference


def _same_regulator(saved: Any, now: Any) -> bool:
    """Whether two strings describe the same regulator, such as ``ar`` and ``ar(alpha=0.2)``."""
    try:
        with user_code.untrusted("the run", [now]):
            return regulators.text(regulators.parse(saved)) == regulators.text(regulators.parse(now))
    except (ValueError, TypeError):
        return False
