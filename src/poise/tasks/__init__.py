"""Tasks: problems and their verifiers. One table maps the names to the classes."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from poise._errors import unknown
from poise.tasks.base import SPLITS, Demonstrates, Problem, Score, Split, Task
from poise.tasks.knights_knaves import KnightsKnaves

TASKS: dict[str, Callable[..., Task]] = {
    "kk": KnightsKnaves,
}

__all__ = ["SPLITS", "TASKS", "Demonstrates", "Problem", "Score", "Split", "Task", "get", "names"]


def names() -> list[str]:
    """The names ``get`` knows."""
    return list(TASKS)


def get(name: str, **settings: Any) -> Task:
    """The task of that name with these settings: ``get("kk", people="3-7")``."""
    if name not in TASKS:
        raise ValueError(unknown("task", str(name), TASKS))
    made = TASKS[name]
    allowed = list(signature(made).parameters)
    for setting in settings:
        if setting not in allowed:
            raise TypeError(f"task {name!r}: " + unknown("setting", setting, allowed))
    return made(**settings)
