"""Python objects as settings: replace each object among the arguments of ``poise.train`` with text.

An instance of poise's own classes becomes the text that builds this instance: ``AdvantageReweighting(0.3)`` becomes
``ar(alpha=0.3)``. Any other object gets a name such as ``python:softer`` (``_lib.live``).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import isclass
from typing import Any

import torch

from poise import tasks
from poise._lib import live
from poise._lib.errors import short
from poise.tasks import rewards
from poise.tasks.data import Data
from poise.tasks.environment import Environment
from poise.tasks.reasoning_gym import ReasoningGym
from poise.training.config.documents import SHORT_FORMS, ConfigError, Document, join_settings

GROUP_OF_DATA = {"name", "weight", *(key.removeprefix("data.") for key in SHORT_FORMS if key.startswith("data."))}


def name_objects(settings: Mapping[str, Any], tokenizer: Any = None) -> tuple[Document, live.Objects]:
    """Return the settings as a document of text and numbers, and the objects that it names. Keys may be dotted."""
    namer = _Namer(tokenizer)
    plain = {key: namer.plain(key, value) for key, value in settings.items()}
    if tokenizer is not None and not namer.objects.by_name.keys() & {plain.get("model")}:
        raise ConfigError("tokenizer: it goes with a loaded model, model=…; a hub id or a folder has its own")
    return join_settings(plain), namer.objects


class _Namer:
    """Replaces objects with text."""

    def __init__(self, tokenizer: Any) -> None:
        self.objects, self._tokenizer = live.Objects(), tokenizer
        data, reward, environment = self._data, self._rewards, self._environment
        self._by_key: dict[str, Callable[[Any], Any]] = {
            "model": self._model,
            "data": data, "data.name": data, "task.file": data, "task.test_file": partial(data, name="test_data"),
            "reward": reward, "task.reward": reward,
            "environment": environment, "task.factory": environment,
            "task": self._task, "task.name": self._task_name,
            "regulator": self._regulator, "algorithm": self._algorithm,
            "advantage": self._advantage, "objective.surrogate": self._surrogate,
        }  # fmt: skip

    def plain(self, key: str, value: Any) -> Any:
        """Return a setting's value, with objects replaced by text."""
        if isinstance(value, str):
            return {"name": value} if key == "task" else value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, torch.device | torch.dtype):
            return str(value).removeprefix("torch.")
        if key in self._by_key and value is not None:
            return self._by_key[key](value)
        if type(value) is dict:
            return {inner: self.plain(f"{key}.{inner}", each) for inner, each in value.items()}
        return value

    def _model(self, model: Any) -> str:
        from poise.models.loading import LoadedModel

        return self.objects.add(LoadedModel.of(model, self._tokenizer), live.MODEL.removeprefix(live.PREFIX))

    def _data(self, data: Any, name: str = "data") -> Any:
        if isinstance(data, str | os.PathLike):
            return os.fspath(data)
        if _is_group(data):
            return data | {"name": self._data(data["name"], name)}
        # A list of names and groups is a mixture of data sets; any other list is a list of rows.
        if isinstance(data, list | tuple) and data and all(isinstance(each, str) or _is_group(each) for each in data):
            return [self._data(each, name) for each in data]
        return self.objects.add(data, name)

    def _rewards(self, reward: Any) -> Any:
        if not isinstance(reward, list | tuple):
            return self._reward(reward)
        named = [self._reward(each) for each in reward]
        return named[0] if len(named) == 1 and named[0] in self.objects.by_name else named

    def _reward(self, reward: Any) -> Any:
        if isinstance(reward, str | os.PathLike):
            return os.fspath(reward)
        if not callable(reward):
            raise TypeError(f"a reward must be a name, a callable or a list of these, got {short(reward)}")
        return _text(reward, rewards.TABLE, rewards.get) or self.objects.add(reward, _title(reward))

    def _environment(self, environment: Any) -> str:
        if not callable(environment) and callable(getattr(environment, "reset", None)):
            factory = partial(copy.deepcopy, environment)  # each episode gets its own environment
            return self.objects.add(factory, type(environment).__name__)
        if not callable(environment):
            raise TypeError(f"an environment is a class, a function or an object with reset, got {short(environment)}")
        return self.objects.add(environment, _title(environment))

    def _task(self, task: Any) -> Any:
        if type(task) is dict:
            return {key: self.plain(f"task.{key}", value) for key, value in task.items()}
        settings = None if isclass(task) else _task_settings(task)
        if settings is None:
            return {"name": self._task_name(task)}
        return {key: self.plain(f"task.{key}", value) for key, value in settings.items()}

    def _task_name(self, task: Any) -> str:
        if not (hasattr(task, "problems") or callable(task)):
            raise TypeError(f"a task has problems(split, seed) and score(problem, text), got {short(task)}")
        return self.objects.add(task, _title(task))

    def _regulator(self, regulator: Any) -> str:
        from poise import regulators
        from poise.regulators.base import Function, parts_of

        def name(part: regulators.Regulator) -> str:
            title = _title(part.function if isinstance(part, Function) else part)
            return _text(part, regulators.TABLE, regulators.parse) or self.objects.add(part, title)

        if isclass(regulator):
            regulator = regulator()
        return " | ".join(name(part) for part in parts_of(regulators.parse(regulator)))

    def _algorithm(self, algorithm: Any) -> str:
        from poise.sampling import algorithms

        if isclass(algorithm) or not callable(getattr(algorithm, "collect", None)):
            raise TypeError(f"an algorithm is an object with collect(…), got {short(algorithm)}")
        text = _text(algorithm, algorithms.TABLE, partial(algorithms.get, group=1), always=("group",))
        return text or self.objects.add(algorithm, _title(algorithm))

    def _advantage(self, advantage: Any) -> str:
        from poise import advantages

        if not callable(advantage):
            raise TypeError(f"an advantage is a name or a function of rewards, got {short(advantage)}")
        names = {function: name for name, function in advantages.TABLE.items()}
        return names.get(advantage) or self.objects.add(advantage, _title(advantage))

    def _surrogate(self, surrogate: Any) -> Any:
        from poise import surrogates

        if not isinstance(surrogate, surrogates.Surrogate):
            return surrogate
        return _text(surrogate, surrogates.TABLE, surrogates.parse) or self.objects.add(surrogate, _title(surrogate))


def _is_group(value: Any) -> bool:
    """Whether the value is a group that names a data set, with its settings."""
    return type(value) is dict and "name" in value and value.keys() <= GROUP_OF_DATA


def _title(thing: Any) -> str:
    """A readable name for a function, a class or an object."""
    while hasattr(thing, "func") and not hasattr(thing, "__name__"):  # functools.partial
        thing = thing.func
    return str(getattr(thing, "__name__", type(thing).__name__))


def _values(thing: Any, always: Sequence[str] = ()) -> Document:
    """The settings of a dataclass that differ from their defaults."""
    values = {each.name: getattr(thing, each.name) for each in fields(thing) if each.init}
    defaults = {each.name: each.default for each in fields(thing)}
    return {name: value for name, value in values.items() if name in always or not _same(value, defaults[name])}


def _text(thing: Any, table: Mapping[str, Any], build: Callable[[str], Any], always: Sequence[str] = ()) -> str | None:
    """``name(setting=value)`` for an instance of a class in the table; None if no text builds an equal instance."""
    name = next((name for name, kind in table.items() if kind is type(thing)), None)
    if name is None or not is_dataclass(thing):
        return None
    values = ", ".join(f"{key}={value!r}" for key, value in _values(thing, always).items())
    text = f"{name}({values})" if values else name
    try:
        return text if _same(build(text), thing) else None
    except (ValueError, TypeError):  # a value is not a literal
        return None


def _task_settings(task: Any) -> Document | None:
    """The settings that build an equal instance of one of poise's own tasks; None if there are no such settings."""
    if isinstance(task, ReasoningGym):
        own = {key: value for key, value in _values(task).items() if key not in ("dataset", "settings")}
        return {"name": task.name, **task.settings, **own}
    name = next((name for name, kind in tasks.TASKS.items() if kind is type(task)), None)
    if name is None:
        return None
    settings = _values(task)
    if not isinstance(task, Data | Environment) and not _same(tasks.get(name, **settings), task):
        return None
    return {"name": name, **settings}


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; False if the comparison fails, as for tables."""
    try:
        return bool(one == other)
    except Exception:  # a user's class may raise anything
        return False
