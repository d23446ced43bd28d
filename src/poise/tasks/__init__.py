"""Tasks: problems and their verifiers. One table maps the names to the classes."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from poise._lib.errors import unknown
from poise.rewards.base import RewardError
from poise.tasks.base import (
    SPLITS,
    Attempt,
    Demonstrates,
    Episode,
    Finite,
    Message,
    Problem,
    Score,
    ScoresTogether,
    SingleTurn,
    Split,
    Task,
    TaskError,
    available,
    begin,
    draw,
    explained,
    judge,
    judge_all,
    training_problems,
)
from poise.tasks.countdown import Countdown
from poise.tasks.data import Data, Math
from poise.tasks.environment import environment
from poise.tasks.frozenlake import FrozenLake
from poise.tasks.knights_knaves import KnightsKnaves
from poise.tasks.search_qa import SearchQA
from poise.tasks.sokoban import Sokoban

TASKS: dict[str, Callable[..., Any]] = {
    "kk": KnightsKnaves,
    "countdown": Countdown,
    "data": Data,
    "environment": environment,
    "frozenlake": FrozenLake,
    "sokoban": Sokoban,
    "search-qa": SearchQA,
    "math": Math,
}

__all__ = [
    "SPLITS",
    "TASKS",
    "Attempt",
    "Demonstrates",
    "Episode",
    "Finite",
    "Message",
    "Problem",
    "RewardError",
    "Score",
    "ScoresTogether",
    "SingleTurn",
    "Split",
    "Task",
    "TaskError",
    "available",
    "begin",
    "draw",
    "explained",
    "get",
    "judge",
    "judge_all",
    "names",
    "settings_of",
    "training_problems",
]


def names() -> list[str]:
    """The names ``get`` knows."""
    return list(TASKS)


def settings_of(name: str) -> list[str]:
    """The settings that the task of that name takes."""
    if name not in TASKS:
        raise ValueError(unknown("task", str(name), TASKS))
    return list(signature(TASKS[name]).parameters)


def get(name: str, **settings: Any) -> Task:
    """The task of that name with these settings: ``get("kk", people="3-7")``."""
    allowed = settings_of(name)
    for setting in settings:
        if setting not in allowed:
            raise TypeError(f"task {name!r}: " + unknown("setting", setting, allowed))
    task: Task = TASKS[name](**settings)
    return task
