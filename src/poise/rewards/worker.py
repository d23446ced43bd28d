"""How a reward is called; and, run as a script, a process of its own in which one is called, so that it can be killed.

As a script it needs the standard library alone: it imports neither poise nor torch, unless the reward does. It reads
requests from standard input and writes replies to standard output, each as JSON behind its length in four bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

HANDED = ("trainer_state", "log_extra", "log_metric", "environments")  # arguments that are no columns


class WrongError(Exception):
    """What is wrong with a reward. ``row`` is the one it is about, if that is known."""

    def __init__(self, text: str, row: int | None = None, raised: bool = False):
        super().__init__(text)
        self.text, self.row, self.raised = text, row, raised


def call(reward: Callable[..., Any], arguments: Mapping[str, Any], count: int) -> list[float | None]:
    """The reward's values for ``count`` completions, as Python's own numbers."""
    _check_arguments(reward, arguments)
    try:
        values = reward(**arguments)
        if inspect.isawaitable(values):
            values = _awaited(values)
    except (Exception, SystemExit) as error:
        raise WrongError(f"raised {type(error).__name__}: {error}{_place(error)}", raised=True) from error
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise WrongError(
            f"returned {type(values).__name__}; a list with one number (or None) per completion is expected"
        )
    values = list(values)
    if len(values) != count:
        raise WrongError(f"returned {len(values)} values for {count} completions; one per completion is expected")
    return [_number(row, value) for row, value in enumerate(values)]


def _number(row: int, value: Any) -> float | None:
    if value is None:
        return None
    number = None
    if not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = float(value)
    if number is None or not math.isfinite(number):
        shown = repr(value)[:100] if number is None else str(number)
        raise WrongError(f"returned {shown}; a finite number, or None where it does not apply, is expected", row)
    return number


def _check_arguments(reward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise if the reward cannot take the arguments, and say what to do."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # functions written in C may have none
        return
    columns = [name for name in arguments if name not in HANDED]
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise WrongError(
            f"needs {', '.join(missing)}, and is called with {', '.join(columns)}: name its arguments after the "
            "columns of your data, or rename the columns"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if surplus := [name for name in arguments if name not in taken]:
        raise WrongError(
            f"takes no argument {', '.join(surplus)}: add **kwargs to its arguments, since every reward is called with "
            f"all columns of the data (here {', '.join(columns)}) and {', '.join(HANDED[:3])}"
        )


def _awaited(values: Any) -> Any:
    async def outcome() -> Any:
        return await values

    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(outcome())
    found: list[Any] = []  # in a notebook a loop is running here: wait in a thread of one's own

    def run() -> None:
        try:
            found.append(asyncio.run(outcome()))
        except BaseException as error:
            found.extend((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if len(found) == 2:
        raise found[1]
    return found[0]


def _place(error: BaseException) -> str:
    """Where in the user's code it happened: the last line of the traceback that lies outside this file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and f.filename[:1] != "<"]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def resolve(module: str, name: str) -> Any:
    """The object of that name in a module, or in the file if ``module`` ends in ``.py``."""
    if module.endswith(".py"):
        path = Path(module).resolve()
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        found: Any = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, found)
        spec.loader.exec_module(found)
    else:
        found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def build(found: Any, args: list[Any] | None, settings: dict[str, Any]) -> Callable[..., Any]:
    """The reward: what was found, or what it makes of its settings. A class without settings is called as well."""
    reward = found(*(args or []), **settings) if args is not None or inspect.isclass(found) else found
    if not callable(reward):
        raise TypeError(f"{reward!r} is not callable")
    return reward  # type: ignore[no-any-return]


class Log:
    """What a reward reports with ``log_extra`` and ``log_metric``."""

    def __init__(self, count: int):
        self.count = count
        self.extra: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Record a column with one value per completion."""
        values = list(values)
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self.count} completions")
        self.extra[str(column)] = values

    def log_metric(self, name: str, value: float) -> None:
        """Record a number about the whole batch."""
        self.metrics.append((str(name), float(value)))


def write(stream: BinaryIO, message: Any) -> None:
    """Send one message."""
    data = json.dumps(message, default=str).encode()
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


def read(stream: BinaryIO) -> Any:
    """The next message; ``EOFError`` where there is none."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    data = stream.read(struct.unpack(">I", head)[0])
    return json.loads(data)
