"""The table of algorithms. An algorithm decides what a step samples, and which samples are normalised together."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isclass, signature
from typing import Any, cast

from poise._lib import user_code as _user_code
from poise._lib.calls import read_call
from poise._lib.errors import short
from poise.sampling.erl import Erl
from poise.sampling.grpo import Grpo
from poise.sampling.rltr import Rltr
from poise.sampling.trajectories import Algorithm, Memory, Trajectory, algorithm

__all__ = ["TABLE", "Algorithm", "Grpo", "Memory", "Rltr", "Trajectory", "algorithm", "get"]


TABLE: dict[str, Callable[..., Algorithm]] = {"grpo": Grpo, "erl": Erl, "rltr": Rltr}


def get(text: str, group: int) -> Algorithm:
    """Build the algorithm that ``text`` describes, such as ``"grpo"``, with ``group`` attempts at each problem.

    ``text`` may also be the dotted path of user code that is marked with ``@poise.algorithm``.
    """
    name, args, settings = read_call(text)
    factory: Any = _user_code.find("algorithm", name, TABLE)
    if hasattr(factory, "collect") and not isclass(factory):  # an instance, passed from Python
        return cast(Algorithm, factory)
    if args:
        raise TypeError(f"{name}: pass an algorithm's settings by name, {name}(setting=value)")
    if "group" in signature(factory).parameters:
        settings.setdefault("group", group)
        if type(settings["group"]) is not int or settings["group"] < 1:
            raise ValueError(f"{name}: group must be a whole number of at least 1, got {short(settings['group'])}")
    return cast(Algorithm, _user_code.build(name, factory, settings))
