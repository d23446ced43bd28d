"""Call one reward on a batch, in this process or in a worker process, which poise kills if it hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from poise._lib.errors import counted
from poise._lib.user_code import code_of, edited
from poise.tasks.rewards import worker
from poise.tasks.rewards.base import RewardError, TrainerState

if TYPE_CHECKING:
    from poise.tasks.rewards.run import Spec

LOADING = 300.0  # seconds; the time limit for a worker's imports
MOST_FAILED = 0.05  # the share of a batch's rows that may fail; waiting for more timeouts would take hours


class LostError(Exception):
    """The worker process did not answer in time, or has ended. The process has already been killed."""


class Process:
    """A process that runs ``worker.py``. The process ends with this object or the parent process.

    ``worker.py`` runs as a script, because multiprocessing would run the user's main script a second time.
    """

    def __init__(self, service: str, **load: Any) -> None:
        self._connection, end = Pipe()
        command = [sys.executable, "-P", worker.__file__, str(end.fileno()), service]
        with end:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(end.fileno(),), start_new_session=True
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, os.getpid())
        self._requests = 0
        loaded = self.ask({"path": sys.path, **load}, LOADING)
        if "wrong" in loaded:
            self.kill()
            raise LostError(loaded["wrong"])

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False after the process has been killed."""
        return self._finalizer.alive

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Return the worker's reply to a request. After ``seconds`` or a crash, kill the worker and raise
        ``LostError``."""
        self._requests += 1
        data = json.dumps({**request, "number": self._requests}).encode()
        late = threading.Event()
        timer = threading.Timer(seconds, _hang_up, (self._connection, late))
        timer.daemon = True
        timer.start()
        try:
            self._connection.send_bytes(data)
            reply = json.loads(self._connection.recv_bytes())
            if reply["number"] != self._requests:
                raise LostError("replied to a different request")
        except (OSError, EOFError):
            self.kill()
            if late.is_set():
                raise LostError(f"took longer than {seconds:g} seconds") from None
            raise LostError(f"ended its process ({_ending(self._process.returncode)})") from None
        except BaseException:  # an interrupt: the reply must not be taken for that of the next request
            self.kill()
            raise
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():  # the timer has just closed the connection
            self.kill()
        return reply

    def kill(self) -> None:
        """Kill the process and all its children."""
        self._finalizer()


def _hang_up(connection: Connection, late: threading.Event | None = None) -> None:
    """Shut down the connection, including other processes' copies, so that every waiting process wakes up."""
    if late is not None:
        late.set()
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # the process that ends is a fork, which does not own the worker
        return
    _hang_up(connection)  # the supervisor then kills the worker
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    connection.close()


def _ending(code: int) -> str:
    with suppress(ValueError):
        return f"signal {signal.Signals(code - 128).name}"
    return f"exit code {code}"


@dataclass
class Batch:
    """The arguments of a call. ``shared`` maps each argument name to one value per row."""

    shared: Mapping[str, Sequence[Any]]
    ids: list[str]
    state: TrainerState
    environments: Sequence[Any] | None

    def __post_init__(self) -> None:
        for name, values in {**self.shared, "environments": self.environments or self.ids}.items():
            if len(values) != len(self.ids):
                raise ValueError(f"{name} has {len(values)} rows for {len(self.ids)} completions")

    def arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the shared arguments for these rows, in new lists that the reward may change."""
        return {name: [values[row] for row in rows] for name, values in self.shared.items()}


@dataclass
class Outcome:
    """One reward's values for a batch. ``failed`` maps each row without a value to the reason."""

    values: list[float | None]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, row: int, single: Outcome) -> None:
        """Add the outcome of a call with only this row."""
        self.values[row] = single.values[0]
        self.metrics += single.metrics
        for column, values in single.extra.items():
            self.extra.setdefault(column, [None] * len(self.values))[row] = values[0]


class InProcess:
    """A reward that runs in this process, where no call can be cut off."""

    def __init__(self, name: str, spec: Spec):
        self.name, self.spec = name, spec

    def values(self, batch: Batch) -> Outcome:
        """Call the reward on the whole batch. If it fails, raise a ``RewardError`` with the row, if known."""
        try:
            return self._attempt(batch, range(len(batch.ids)))
        except worker.WrongError as error:
            row, text = (error.row, error.text) if not error.raised else self._culprit(batch, error)
            where = "" if row is None else f" (row {batch.ids[row]})"
            raise RewardError(f"reward {self.name!r} {text}{where}") from error

    def close(self) -> None:
        """Release resources; does nothing for a reward in this process."""

    def _attempt(self, batch: Batch, rows: Sequence[int]) -> Outcome:
        log = worker.Log(len(rows))
        arguments = batch.arguments(rows)
        arguments |= {"trainer_state": batch.state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        if batch.environments is not None:
            arguments["environments"] = [batch.environments[row] for row in rows]
        return Outcome(worker.call(self.spec.reward, arguments, len(rows)), log.extra, log.metrics)

    def _culprit(self, batch: Batch, error: worker.WrongError) -> tuple[int | None, str]:
        """Call the reward row by row to find the row that raises an error. Return this row and the message."""
        for row in range(len(batch.ids)):
            try:
                self._attempt(batch, [row])
            except worker.WrongError as alone:
                return row, alone.text
            except LostError:
                break  # the search takes too long
        return None, error.text


class InWorker(InProcess):
    """A reward that runs in a worker process, where a call that takes too long is cut off."""

    def __init__(self, name: str, spec: Spec, timeout: float):
        super().__init__(name, spec)
        self.timeout = timeout
        self._process: Process | None = None
        self._warned = False

    def values(self, batch: Batch) -> Outcome:
        """Call the reward on the batch. If this call is cut off, call it row by row; rows that are cut off again
        fail."""
        try:
            return super().values(batch)
        except LostError as error:
            return self._one_by_one(batch, str(error))

    def close(self) -> None:
        """End the worker process."""
        if self._process is not None:
            self._process.kill()

    def _one_by_one(self, batch: Batch, why: str) -> Outcome:
        count = len(batch.ids)
        whole = Outcome([None] * count)
        for row, row_id in enumerate(batch.ids):
            try:
                whole.add(row, self._attempt(batch, [row]))
            except LostError as error:
                whole.failed[row] = f"reward {self.name!r} {error} (row {row_id})"
                if len(whole.failed) > max(1, MOST_FAILED * count):
                    raise RewardError(
                        f"reward {self.name!r} has no value for {len(whole.failed)} of the first {row + 1} rows (of "
                        f"{count}), but at most {MOST_FAILED:.0%} may fail; the last one: {whole.failed[row]}"
                    ) from None
            except worker.WrongError as error:
                raise RewardError(f"reward {self.name!r} {error.text} (row {row_id})") from error
        if not whole.failed and not self._warned:
            self._warned = True
            warnings.warn(
                f"reward {self.name!r} {why} on {counted(count, 'row')} together, so poise called it row by row, which "
                "is slow: raise its time limit (reward_timeout)",
                RuntimeWarning,
                stacklevel=2,
            )
        return whole

    def _attempt(self, batch: Batch, rows: Sequence[int]) -> Outcome:
        if self._process is None or not self._process.alive:
            self._process = self._start()
        request = {"count": len(rows), "arguments": batch.arguments(rows), "state": asdict(batch.state)}
        try:
            reply = self._process.ask(request, self.timeout)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"reward {self.name!r}: the columns cannot be sent to the reward's process ({error}); only text, "
                "numbers, lists and dicts can; reward_quick=true runs the reward in the trainer's process"
            ) from error
        if "wrong" in reply:
            raise worker.WrongError(reply["wrong"], reply["row"], reply["raised"])
        if len(reply["values"]) != len(rows):
            self._process.kill()
            raise LostError("replied with values for other rows")
        return Outcome(reply["values"], reply["extra"], [(name, value) for name, value in reply["metrics"]])

    def _start(self) -> Process:
        spec = self.spec
        if files := edited(spec.code, code_of({"task": {"reward": [*spec.code]}})):
            raise RewardError(
                f"reward {self.name!r}: {', '.join(files)} was edited after loading, so a new worker process would run "
                "another version: restore the old version, or restart the run"
            )
        try:
            return Process("reward", module=spec.module, name=spec.name, args=spec.args, settings=spec.settings)
        except LostError as error:
            raise RewardError(
                f"reward {self.name!r} could not be loaded in a worker process: {error}; "
                "reward_quick=true runs the reward in the trainer's process"
            ) from None
