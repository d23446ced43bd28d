"""One owner per run folder: a lock that names its holder, and that the system frees when the holder dies."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock, as before
    fcntl = None  # type: ignore[assignment]

OWNER = "owner.json"  # there while a process trains; after a crash it is left over, and nobody holds its lock


class BusyError(OSError):
    """Another process trains in this run folder."""


@contextmanager
def owned(folder: Path, *, make: bool) -> Iterator[None]:
    """Hold a run folder for the time of the context; ``make`` makes it where it is missing.

    A folder that is none of ours to hold (a file, or not there) is passed over: whoever opens it says what is wrong.
    """
    if make and not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
    handle = _acquire(folder / OWNER) if fcntl and folder.is_dir() else None
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                (folder / OWNER).unlink()  # before the lock goes: see _acquire
            os.close(handle)
        with suppress(OSError):
            folder.rmdir()  # only where it is empty: a run that never began


def _acquire(path: Path) -> int | None:
    """The handle that holds the lock; None where the file system has no locks."""
    while True:
        handle = _open(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 4096)
            os.close(handle)
            raise BusyError(_busy(path.parent, holder)) from None
        except OSError:
            os.close(handle)
            path.unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                break
        os.close(handle)  # its last holder removed this file just before we locked it: take the one that is there now
    os.ftruncate(handle, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode() + b"\n")
    return handle


def _open(path: Path) -> int:
    """A handle on a regular file, which what a link leads to is not: it would be emptied."""
    if path.is_symlink():
        raise FileExistsError(f"{path} is a link, and poise writes a file there: remove it first")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileExistsError(f"{path} is a pipe or a device, and poise writes a file there: remove it first")
    return handle


def _busy(folder: Path, holder: bytes) -> str:
    try:
        found = json.loads(holder)
        who = f"process {found['pid']} on {found['host']} has been training in it since {found['since']}"
    except (ValueError, KeyError, TypeError):  # it has only just begun
        who = "another process is training in it"
    return f"run folder {folder} is in use: {who}; wait for it, stop it, or choose another run=DIR"
