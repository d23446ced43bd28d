"""Rewards by name: the one table, and the text form that recipes and command lines use."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poise._lib import user_code as _user_code
from poise._lib.calls import read_call
from poise._lib.errors import short, unknown
from poise.rewards import worker
from poise.rewards.maths import Math
from poise.rewards.simple import Choice, Exact, Format, Number, Overlong, Regex

TABLE: dict[str, type] = {
    "exact": Exact,
    "choice": Choice,
    "number": Number,
    "math": Math,
    "regex": Regex,
    "format": Format,
    "overlong": Overlong,
}


@dataclass(frozen=True)
class Spec:
    """A reward, and how another process finds it (``module`` is None: it cannot). ``foreign``: not poise's own."""

    reward: Callable[..., Any]
    foreign: bool = False
    module: str | None = None
    name: str = ""
    args: list[Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """The names ``get`` knows."""
    return list(TABLE)


def get(text: str | Callable[..., Any], *args: Any, **settings: Any) -> Callable[..., Any]:
    """The reward of that name: ``get("regex(pattern='x')")``, ``get("file.py:name")``, ``get("package.module.name")``.

    With settings in brackets, what stands before them is called with them: a class, or a function that makes a reward.
    """
    return find(text, *args, **settings).reward


def find(text: str | Callable[..., Any], *args: Any, **settings: Any) -> Spec:
    """What ``get`` returns, with what a worker process needs to find it."""
    if not isinstance(text, str):
        if not callable(text):
            raise TypeError(f"a reward is a name or a callable, got {short(text)}")
        return Spec(worker.build(text, None, {}))
    name, given, named = _read(text)
    brackets = bool(args or settings) or text.rstrip().endswith(")")
    given, named = [*given, *args], {**named, **settings}
    if name in TABLE:
        kind = TABLE[name]
        _check_settings(name, named, list(inspect.signature(kind).parameters))
        if given:
            raise TypeError(f"{name}: give its settings by name, such as {name}(setting=value)")
        return Spec(kind(**named), False, kind.__module__, kind.__qualname__, [], named)
    if name.endswith(".py"):
        raise ValueError(f"reward {name!r}: say which function of the file, {name}:name")
    if not re.search(r"[.:]", name):
        raise ValueError(
            unknown("reward", name, TABLE)
            + "; for one of your own write file.py:name, or its dotted path, package.module.name"
        )
    _check_reach(name)
    found = _user_code.load("reward", name, object)
    module, _, inner = name.rpartition(":") if ":" in name else name.rpartition(".")
    call = given if brackets else None
    try:
        reward = worker.build(found, call, named)
    except Exception as error:  # a user's class may raise anything
        hint = _user_code.forgotten_dataclass(found) if brackets and isinstance(error, TypeError) else ""
        raise ValueError(f"reward {text!r}: {type(error).__name__}: {error}{hint}") from error
    module = str(Path(module).expanduser().resolve()) if module.endswith(".py") else module
    return Spec(reward, True, module, inner, call, named)


def _check_reach(name: str) -> None:
    """Raise where a path leads to functions that no one wrote as rewards: what is found there may be called."""
    if not _user_code.is_foreign(name):  # needs nobody's consent, so nothing but the table is reached
        raise ValueError(f"reward {name!r}: poise's own rewards go by their short names: {', '.join(TABLE)}")
    if re.split("[.:]", name)[0] in sys.stdlib_module_names and ".py:" not in name:  # os.system, subprocess.Popen
        raise ValueError(f"reward {name!r} is part of Python itself, and no reward")


def _read(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name and its settings. A path may have characters that ``read_call`` refuses in a name, such as a slash."""
    name, bracket, rest = text.strip().partition("(")
    if not name or any(char in name for char in "'\"\n"):
        raise ValueError(f"cannot read the reward {short(text)}; write name, name(setting=value) or file.py:name")
    _, args, settings = read_call(f"settings{bracket}{rest}", text)
    return name.strip(), args, settings


def _check_settings(name: str, settings: dict[str, Any], allowed: list[str]) -> None:
    for key in settings:
        if key not in allowed:
            raise TypeError(unknown(f"setting of {name}", key, allowed))
