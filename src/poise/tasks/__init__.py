"""Tasks: problems and their verifiers. The table ``TASKS`` maps names to classes.

Settings refer to a task by its name in the table (``kk``), by a prefix and a name (``rg/chain_sum``), or by the path of
the user's own class (``file.py:Mine``, ``package.module.Mine``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, isclass, signature
from typing import Any, TypeVar

from poise._lib import user_code as _user_code
from poise._lib.errors import short, unknown
from poise.tasks.base import (
    SPLITS,
    Attempt,
    Episode,
    Finite,
    Message,
    Problem,
    Score,
    ScoresTogether,
    Split,
    Task,
    TaskError,
    check_kinds,
)
from poise.tasks.data import Data, Math
from poise.tasks.environment import Environment
from poise.tasks.episodes import (
    SingleTurn,
    begin,
    explained,
    feedback_on,
    gold_answer,
    heard,
    judge,
    judge_all,
    several_turns,
)
from poise.tasks.frozenlake import FrozenLake
from poise.tasks.knights_knaves import KnightsKnaves
from poise.tasks.reasoning_gym import reasoning_gym
from poise.tasks.rewards.base import RewardError
from poise.tasks.search_qa import SearchQA
from poise.tasks.sokoban import Sokoban
from poise.tasks.streams import data_fingerprint, draw, epochs, training_problems

TASKS: dict[str, Callable[..., Any]] = {
    "kk": KnightsKnaves,
    "data": Data,
    "environment": Environment,
    "frozenlake": FrozenLake,
    "sokoban": Sokoban,
    "search-qa": SearchQA,
    "math": Math,
}
# For ``rg/chain_sum`` the function of "rg" is called with "chain_sum". It returns the function that builds that task,
# or raises ValueError if there is no such task.
PREFIXES: dict[str, Callable[[str], Callable[..., Any]]] = {"rg": reasoning_gym}

C = TypeVar("C", bound=Callable[..., Any])

__all__ = [
    "PREFIXES",
    "SPLITS",
    "TASKS",
    "Attempt",
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
    "begin",
    "data_fingerprint",
    "draw",
    "epochs",
    "explained",
    "feedback_on",
    "get",
    "gold_answer",
    "heard",
    "judge",
    "judge_all",
    "names",
    "settings_of",
    "several_turns",
    "task",
    "training_problems",
    "unknown_settings",
]


def names() -> list[str]:
    """Return the task names that ``get`` accepts, including prefixes."""
    return [*TASKS, *(f"{prefix}/NAME" for prefix in PREFIXES)]


def task(thing: C) -> C:
    """Mark a task class, or a function that returns a task, so that settings can refer to it by name.

    >>> @poise.task
    ... def easy(size: int = 3):
    ...     return Mine(size=size, hints=True)

    Then ``task.name=mymodule.easy task.size=4`` uses this task. A class needs no mark if it has ``problems`` and one of
    ``score``, ``score_all`` and ``episode``.
    """
    return _user_code.mark("task", thing)


def get(name: str, **settings: Any) -> Task:
    """Build a task from its name and settings: ``get("kk", people="3-7")``, ``get("mine.py:Mine", size=3)``."""
    maker = _maker(name)
    for setting in unknown_settings(name, settings):
        raise TypeError(f"task {name!r}: " + unknown("setting", setting, settings_of(name)) + settings_hint(name))
    required = [
        key for key, p in signature(maker).parameters.items() if p.default is p.empty and p.kind != p.VAR_KEYWORD
    ]
    if missing := [key for key in required if key not in settings]:
        raise ValueError(f"task {name!r} needs a {missing[0]}: task.{missing[0]}=…{_SHORT_FORMS.get(missing[0], '')}")
    if not _user_code.is_foreign(name):  # do not enforce a user's annotations
        check_kinds(name, maker, settings)
    try:
        built: Task = maker(**settings)
    except (ValueError, OSError):  # most likely a check of settings, whose message is enough
        raise
    except Exception as error:  # a user's class may raise anything
        if not _user_code.is_foreign(name) or not (place := _user_code.place_of(error)):
            raise
        raise ValueError(f"task {name!r}: {type(error).__name__}: {error}{place}") from error
    if _user_code.is_foreign(name) and not _is_task(built):
        raise TypeError(f"task {name!r} is not a task: it lacks {_EXPECTED}")
    return built


_SHORT_FORMS = {"file": ", the path of the data", "factory": ", or environment=file.py:Class"}


def settings_of(name: str) -> list[str]:
    """Return the names of the settings of the task ``name``."""
    return list(signature(_maker(name)).parameters)


def settings_hint(name: str) -> str:
    """Return a hint for the error message about a setting that the task does not have."""
    return _user_code.forgotten_dataclass(_maker(name))


def unknown_settings(name: str, settings: Iterable[str]) -> list[str]:
    """Return the entries of ``settings`` that the task ``name`` does not have."""
    allowed: Mapping[str, Parameter] = signature(_maker(name)).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in allowed.values()):
        return []
    return [setting for setting in settings if setting not in allowed]


def _maker(name: str) -> Callable[..., Any]:
    """Return the class or function that builds the task ``name`` from its settings."""
    if not isinstance(name, str):
        raise TypeError(f"task.name = {short(name)}: must be text, the name of a task ({', '.join(names())})")
    if name in TASKS:
        return TASKS[name]
    prefix, slash, rest = name.partition("/")
    if slash and prefix in PREFIXES:
        return PREFIXES[prefix](rest)
    if not any(sign in name for sign in ".:"):
        raise ValueError(unknown("task", name, names()) + "; for your own task, write file.py:Class")
    maker: Callable[..., Any] = _user_code.load("task", name, accepts=_is_task, expected=f"give a class {_EXPECTED}")
    kind: Any = maker if isclass(maker) else type(maker)
    if not _is_task(maker) and (isclass(maker) or not callable(maker)):
        raise TypeError(f"{name} is not a task: give {kind.__name__} {_EXPECTED}")
    if _is_task(maker) and not hasattr(maker, "name"):
        kind.name = kind.__name__  # its name in metrics
    return maker if isclass(maker) or not _is_task(maker) else lambda: maker  # an instance takes no settings


_EXPECTED = "problems(split, seed) and one of score, score_all and episode"


def _is_task(thing: Any) -> bool:
    return hasattr(thing, "problems") and any(hasattr(thing, name) for name in ("score", "score_all", "episode"))
