"""Call a reward. As a script, this file is the worker process that runs a reward and that poise can kill.

The script imports only the standard library, neither poise nor torch; a reward may import both.
Requests and replies are JSON, and nothing is unpickled. A reply has the number of its request.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import mmap
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

MEMORY = 4 << 30  # bytes; the memory limit for comparing formulas
NO_COLUMNS = ("trainer_state", "log_extra", "log_metric", "environments")  # arguments of a reward that are not columns


class WrongError(Exception):
    """A reward raised an error, or its values or arguments are wrong. ``row`` is the index of the row, if known."""

    def __init__(self, text: str, row: int | None = None, raised: bool = False):
        super().__init__(text)
        self.text, self.row, self.raised = text, row, raised


def call(reward: Callable[..., Any], arguments: Mapping[str, Any], count: int) -> list[float | None]:
    """Call the reward, and return its values for ``count`` completions as Python floats or None."""
    _check_arguments(reward, arguments)
    try:
        values = result_of(reward(**arguments))
    except KeyboardInterrupt:  # Ctrl-C
        raise
    except BaseException as error:  # not only Exception: asyncio.CancelledError, SystemExit
        text = f": {error}" if str(error) else ""
        raise WrongError(f"raised {type(error).__name__}{text}{_place(error)}", raised=True) from error
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise WrongError(f"returned {type(values).__name__}, not a list with one number (or None) per completion")
    values = list(values)
    if len(values) != count:
        raise WrongError(f"returned {len(values)} values instead of {count}, one per completion")
    return [_number(row, value) for row, value in enumerate(values)]


def _number(row: int, value: Any) -> float | None:
    if value is None:
        return None
    number = None
    if not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = float(value)
    if number is None or not math.isfinite(number):
        text = repr(value)[:100] if number is None else str(number)
        raise WrongError(f"returned {text}, not a finite number (or None if the reward does not apply)", row)
    return number


def _check_arguments(reward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise an error that says what to do if the reward does not accept the arguments."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        columns = ", ".join(name for name in arguments if name not in NO_COLUMNS)
        raise WrongError(
            f"cannot be called ({error}): it gets {columns}, and {', '.join(NO_COLUMNS[:3])}; name its arguments after "
            "the columns of your data, and add **kwargs for the other arguments"
        ) from None


def result_of(value: Any) -> Any:
    """Return the value or, if it is a coroutine, its result.

    The coroutine runs in a new thread, because a notebook's thread already runs an event loop.
    """
    if not inspect.isawaitable(value):
        return value

    async def outcome() -> Any:
        return await value

    import asyncio  # slower to import than all other modules here

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, outcome()).result()


def _place(error: BaseException) -> str:
    """Return the user's file and line: the last entry of the traceback that is not in this file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and f.filename[:1] != "<"]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def resolve(module: str, name: str) -> Any:
    """Return the object ``name`` from a module, or from a file if ``module`` ends in ``.py``."""
    if module.endswith(".py"):
        target: Any = _from_file(Path(module))
    else:
        target = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _from_file(file: Path) -> Any:
    sys.path += [str(file.parent)] * (str(file.parent) not in sys.path)  # the file may import modules from its folder
    name = f"{file.stem}_reward"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def build(target: Any, args: list[Any] | None, settings: dict[str, Any]) -> Callable[..., Any]:
    """Return ``target``, or the result of calling ``target`` if it is a class or has settings (``args``)."""
    reward = target(*(args or []), **settings) if args is not None or inspect.isclass(target) else target
    if not callable(reward):
        raise TypeError(f"{reward!r} is not callable")
    return reward  # type: ignore[no-any-return]


class Log:
    """Collects the values that a reward reports with ``log_extra`` and ``log_metric``."""

    def __init__(self, count: int):
        self.count = count
        self.extra: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Record a column with one value per completion."""
        values = list(values)
        if len(values) != self.count:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values instead of {self.count}")
        self.extra[str(column)] = values

    def log_metric(self, name: str, value: float) -> None:
        """Record a metric of the whole batch."""
        self.metrics.append((str(name), float(value)))


def receive(connection: Connection) -> dict[str, Any]:
    """Return the next request. Exit the process if the connection is closed."""
    try:
        return json.loads(connection.recv_bytes())  # type: ignore[no-any-return]
    except (EOFError, OSError):
        sys.exit()


def reply(connection: Connection, request: Mapping[str, Any], **answer: Any) -> None:
    """Answer a request."""
    with suppress(BrokenPipeError):  # no process waits for the reply
        connection.send_bytes(json.dumps({"number": request["number"], **answer}, default=str).encode())


def serve_reward(connection: Connection) -> NoReturn:
    """Load one reward, and call the reward for each request."""
    owner, request = os.getpid(), receive(connection)
    sys.path[:] = request["path"]
    try:
        reward = build(resolve(request["module"], request["name"]), request["args"], request["settings"])
    except (Exception, SystemExit) as error:
        reply(connection, request, wrong=f"{type(error).__name__}: {error}{_place(error)}")
        sys.exit()
    reply(connection, request)
    while True:
        request = receive(connection)
        answer = _outcome(reward, request["count"], request["arguments"], request["state"])
        if os.getpid() != owner:  # this process is a fork that the reward created
            os._exit(0)
        reply(connection, request, **answer)


def _outcome(
    reward: Callable[..., Any], count: int, arguments: dict[str, Any], state: dict[str, Any]
) -> dict[str, Any]:
    log = Log(count)
    extras = {"trainer_state": SimpleNamespace(**state), "log_extra": log.log_extra, "log_metric": log.log_metric}
    try:
        values = call(reward, {**arguments, **extras}, count)
    except WrongError as error:
        return {"wrong": error.text, "row": error.row, "raised": error.raised}
    return {"values": values, "extra": log.extra, "metrics": log.metrics}


def serve_math(connection: Connection) -> NoReturn:
    """Load math-verify once, and compare formulas in a fork.

    If a check exceeds its limit of CPU time, the operating system kills the fork, and a new fork is ready in a few
    milliseconds. Unlike wall-clock time, CPU time does not depend on other processes on a busy machine.
    """
    request = receive(connection)
    sys.path[:] = request["path"]
    try:
        check = _math_check()
    except Exception as error:
        reply(connection, request, wrong=f"{type(error).__name__}: {error}")
        sys.exit()
    reply(connection, request)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # stderr: parsers write warnings about models' texts
    current = mmap.mmap(-1, 8)  # the number of the fork's current request
    while True:
        if (fork := os.fork()) == 0:
            _check_all(connection, check, current)
        code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        if code in (0, -signal.SIGKILL, -signal.SIGTERM):  # no more requests, or killed by another process
            sys.exit(abs(code))
        reply(connection, {"number": int.from_bytes(current[:], "big")}, equal=None)


def _check_all(connection: Connection, check: Callable[[str, str, bool], bool], current: mmap.mmap) -> NoReturn:
    limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while True:
        request = receive(connection)
        current[:] = request["number"].to_bytes(8, "big")
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            equal = check(*request["pair"])
        except MemoryError:
            os._exit(1)
        except Exception:
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(connection, request, equal=equal)


def limit_memory() -> None:
    """Limit the memory of this process to ``MEMORY`` bytes."""
    import resource  # not available on Windows

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _math_check() -> Callable[[str, str, bool], bool]:
    """Return a function that compares two formulas. Warm up sympy, because the first use of each module is slow."""
    import logging
    from dataclasses import replace

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    # Only LaTeX: math-verify evaluates plain expressions as Python. Units are already removed, and math-verify may take
    # a product for a unit: 3\sqrt{2}ab.
    own = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    ours = replace(own, normalization_config=replace(own.normalization_config, units=False))

    def check(gold: str, answer: str, lenient: bool = False) -> bool:
        formulas = [
            parse(
                f"\\boxed{{{formula}}}",
                extraction_config=[own if lenient else ours],
                fallback_mode="no_fallback",
                parsing_timeout=None,
            )
            for formula in (gold, answer)
        ]
        return bool(verify(*formulas, timeout_seconds=None, raise_on_error=True))

    for gold, answer in WARM_UP:
        check(gold, answer)
    return check


WARM_UP = (
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"\sqrt{12}", r"3\sqrt{2}"),
    (r"y=2x+1", r"y-2x=2"),
    (r"\sin^2{x}+\cos^2{x}", r"1"),
    (r"(1,2)\cup(3,x)", r"[1,2]"),
    (r"\frac{\pi}{2}", r"1.5"),
    (r"\{1,\sqrt{2}\}", r"\{\sqrt{2},2\}"),
    (r"x>2", r"x<2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\log_2{3}", r"e^{2i}"),
)


def supervise(worker: int, connection: Connection) -> NoReturn:
    """Wait until the worker ends, or the trainer ends or disconnects; then kill every process that the worker started.

    No user code runs in this process, so no user code can prevent the kill. On Linux, orphaned processes become
    children of this process, even in another session.
    """
    threading.Thread(target=_kill_at_hang_up, args=(worker, connection), daemon=True).start()
    while True:
        ended, status = os.wait()
        if ended == worker:
            break
    if sys.platform != "linux":
        os.killpg(0, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for children in Path("/proc/self/task").glob("*/children"):
                for child in children.read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _kill_at_hang_up(worker: int, connection: Connection) -> None:
    poll = select.poll()
    poll.register(connection, 0)  # reports only when the other end is closed
    poll.poll()
    os.kill(worker, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call prctl on Linux; do nothing on other systems."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main() -> None:
    """Fork a worker for the service, and supervise it. Arguments: the connection's file descriptor, the service."""
    connection, service = Connection(int(sys.argv[1])), sys.argv[2]
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    if worker := os.fork():
        supervise(worker, connection)
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the supervisor
    {"reward": serve_reward, "math": serve_math}[service](connection)


if __name__ == "__main__":
    main()
