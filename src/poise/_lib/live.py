"""Python objects in settings: ``python:softer`` is the name of an object that was passed to ``poise.train``.

Settings are plain text, so each object gets a name. This module finds the object by its name while ``poise.train``
runs. The run folder stores the name and, in ``code.json`` or ``data.json``, a fingerprint of the object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poise._lib import fingerprint as _fingerprint

PREFIX = "python:"
MODEL = "python:model"  # the name of a loaded model
# The settings that may name an object, and the argument of poise.train that accepts it.
ARGUMENTS = {
    "model": "model",
    "task.name": "task",
    "task.file": "data",
    "task.test_file": "task.test_file",
    "task.factory": "environment",
    "task.reward": "reward",
    "regulator": "regulator",
    "algorithm": "algorithm",
    "advantage": "advantage",
    "objective.surrogate": "objective.surrogate",
}


@dataclass(frozen=True)
class Objects:
    """Objects by name, such as ``python:softer``."""

    by_name: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, dict[str, str]] = field(default_factory=dict)  # computed once: a model takes seconds

    def add(self, thing: Any, name: str) -> str:
        """Register an object and return its name: ``name``, with a number if another object has that name."""
        base = PREFIX + re.sub(r"\W+", "_", name).strip("_")
        names = (base if number == 1 else f"{base}_{number}" for number in range(1, len(self.by_name) + 2))
        chosen = next(each for each in names if self.by_name.get(each, thing) is thing)
        self.by_name[chosen] = thing
        return chosen

    @contextmanager
    def available(self) -> Iterator[None]:
        """Within this context, settings may name these objects."""
        token = _OBJECTS.set(self)
        try:
            yield
        finally:
            _OBJECTS.reset(token)


_OBJECTS: ContextVar[Objects | None] = ContextVar("objects", default=None)


def is_name(value: Any) -> bool:
    """Whether a setting names a Python object."""
    return isinstance(value, str) and value.startswith(PREFIX)


def known(name: str) -> bool:
    """Whether an object with this name was passed."""
    objects = _OBJECTS.get()
    return objects is not None and name in objects.by_name


def get(name: str) -> Any:
    """The object with this name. Raises ValueError if it was not passed."""
    if not known(name):
        raise ValueError(f"{name} stands for a Python object, which only poise.train(…) takes: pass it there")
    return _OBJECTS.get().by_name[name]  # type: ignore[union-attr]


def resolve(value: Any) -> Any:
    """The object that a setting names; the setting itself if it names none."""
    return get(value) if is_name(value) else value


def fingerprint(name: str) -> dict[str, str]:
    """The fingerprint of a named object; empty if the object was not passed.

    If the object has a method ``__fingerprint__``, its result is used.
    """
    if not known(name):
        return {}
    thing, computed = get(name), _OBJECTS.get().fingerprints  # type: ignore[union-attr]
    if name not in computed:
        own = getattr(type(thing), "__fingerprint__", None)
        computed[name] = own(thing) if own else _fingerprint.fingerprint(thing)
    return computed[name]


def named_in(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of Python objects in a run's settings, grouped by the argument of ``poise.train`` that accepts them."""
    names = {argument: _names(_value(settings, key.split("."))) for key, argument in ARGUMENTS.items()}
    return {argument: found for argument, found in names.items() if found}


def missing(settings: Mapping[str, Any]) -> str | None:
    """For a message: the objects that the settings name but the user did not pass. None if there are none."""
    lacking = {argument: [name for name in names if not known(name)] for argument, names in named_in(settings).items()}
    if not any(lacking.values()):
        return None
    return ", ".join(f"{argument} ({', '.join(names)})" for argument, names in lacking.items() if names)


def resume_call(settings: Mapping[str, Any], run: str | Path, more: str = "") -> str:
    """The Python call that resumes a run with these settings; ``more`` adds an argument, such as ``steps=200``."""
    wanted = [f"{argument}=…" if "." not in argument else f'**{{"{argument}": …}}' for argument in named_in(settings)]
    arguments = [f'resume="{run}"', *wanted, *([more.replace("=null", "=None")] if more else [])]
    return f"poise.train({', '.join(arguments)})"


def _value(settings: Any, keys: list[str]) -> Any:
    for key in keys:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _names(value: Any) -> list[str]:
    """The names in the value of a setting, which may be a composition (``ar | python:softer``), a list or a group."""
    if isinstance(value, str):
        names = (part.strip() for part in value.split("|"))
        return [name for name in names if re.fullmatch(rf"{PREFIX}\w+", name)]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [name for part in parts for name in _names(part)]
