"""Worker processes from the parent's side: start one, ask it with a time limit, kill it. Each runs ``worker.py``."""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from typing import Any

from poise.rewards import worker

LOADING = 300.0  # seconds that a worker may take to import what it needs


class LostError(Exception):
    """A worker that did not answer in time, or that has ended. It is killed already."""


class Process:
    """One worker. It dies with this object, and with this process, however that ends."""

    def __init__(self, service: str = "reward") -> None:
        watched, self._life = os.pipe()
        command = [sys.executable, "-P", worker.__file__, str(watched), service]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, bufsize=0, pass_fds=(watched,), start_new_session=True
            )
        except BaseException:
            os.close(self._life)
            raise
        finally:
            os.close(watched)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._finalizer = weakref.finalize(self, _end, self._process, self._life, os.getpid())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it was not killed yet."""
        return self._finalizer.alive

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Its reply. A worker that takes longer than ``seconds``, or dies, is killed: ``LostError``."""
        data = worker.pack(request)
        deadline = time.monotonic() + seconds
        try:
            self._send(data, deadline)
            size = struct.unpack(">I", self._receive(4, deadline))[0]
            return json.loads(self._receive(size, deadline))
        except TimeoutError:
            self.kill()
            raise LostError(f"took longer than {seconds:g} seconds") from None
        except (OSError, EOFError):
            self.kill()  # one that has died keeps the exit code that it died with
            raise LostError(f"ended its process ({_ending(self._process.returncode)})") from None
        except BaseException:  # interrupted half-way: what it says next would be taken for the answer to something else
            self.kill()
            raise

    def kill(self) -> None:
        """End it, with all that it has started."""
        self._finalizer()

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._in, select.POLLOUT, deadline)
            with suppress(BlockingIOError):
                view = view[os.write(self._in, view) :]

    def _receive(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            self._wait(self._out, select.POLLIN, deadline)
            part = os.read(self._out, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _wait(self, file: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(file, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError


def _end(process: subprocess.Popen[bytes], life: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner is about to end: the worker is not its own
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    os.close(life)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _ending(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
