"""Allows one process per run folder, with a lock file that names the process. The system frees a dead process's lock.

``check_free`` checks that a new run may begin in a folder; ``free_folder`` finds a free folder. This file does not
import torch, so both are quick.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from poise._lib.files import TEMPORARY, expand, read_json
from poise._lib.live import named_in, resume_call
from poise._lib.user_code import asks_for_code

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]

OWNER = "owner.json"  # exists while a process trains; a crash leaves the file, but frees its lock
OTHER = "choose another run=DIR"
_START = b'{"pid": '  # a lock file begins with this, or is empty; poise touches no other file


class BusyError(OSError):
    """Another process trains in this run folder."""


@contextmanager
def owned(folder: Path, *, make: bool) -> Iterator[None]:
    """Lock a run folder within this context; ``make`` creates it if it is missing.

    A path that is missing or is not a folder is not locked; the code that opens the path reports the error.
    """
    new = make and not folder.exists()
    if new:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise type(error)(f"run folder {folder} cannot be created ({why}): choose another run=DIR") from error
    handle = _acquire(folder / OWNER) if fcntl and folder.is_dir() else None
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                (folder / OWNER).unlink()  # before releasing the lock: see _acquire
            os.close(handle)
        if new:
            with suppress(OSError):
                folder.rmdir()  # succeeds only if the folder is empty, because the run never began


def is_owned(folder: Path) -> bool:
    """Whether a process is training in a run folder now. False on systems without locks."""
    if not fcntl or not (folder / OWNER).is_file() or (folder / OWNER).is_symlink():
        return False
    with suppress(OSError):
        handle = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False


def _acquire(path: Path) -> int | None:
    """The file handle that holds the lock; None if the file system has no locks."""
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
        os.close(handle)  # the last holder removed this file just before we locked it: retry with the new one
    os.ftruncate(handle, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode() + b"\n")
    return handle


def _open(path: Path) -> int:
    """Open the lock file and return its handle. Links are refused, because locking would empty the link's target."""
    if path.is_symlink():
        raise FileExistsError(f"{path} is a link, and poise writes a file there: remove it first")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileExistsError(f"{path} is a pipe or a device, and poise writes a file there: remove it first")
    begins = os.pread(handle, len(_START), 0)
    if not _START.startswith(begins):
        os.close(handle)
        raise FileExistsError(
            f"{path} is not a lock file of poise, which writes one there: move it, or choose another run=DIR"
        )
    return handle


def _busy(folder: Path, holder: bytes) -> str:
    try:
        owner = json.loads(holder)
        who = f"process {owner['pid']} on {owner['host']} has been training in it since {owner['since']}"
    except (ValueError, KeyError, TypeError):  # the holder has not written its process id yet
        who = "another process is training in it"
    return f"run folder {folder} is in use: {who}; wait for it, stop it, or choose another run=DIR"


def check_free(path: Path, remedy: str = "") -> None:
    """Raise FileExistsError unless ``path`` is empty or can be created. ``remedy`` replaces the advice about runs."""
    if file := next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), None):
        what = "is a file" if file == path else "is a file and cannot contain a folder"
        raise FileExistsError(f"{file} {what}; {remedy or OTHER}")
    entries = path.iterdir() if path.exists() else []
    if any(not entry.name.startswith(TEMPORARY) and entry.name != OWNER for entry in entries):
        continued = not remedy and (path / "config.json").exists()
        way = f", or continue the run in it: {resume_command(path)}" if continued else ""
        raise FileExistsError(f"{path} is not empty; {remedy or OTHER}{way}")


def free_folder(run: str, say: Callable[[str], None], what: str = "run") -> str:
    """Return ``run``, or the next free folder (``runs/mine-2``) if ``run`` is taken (a notebook cell ran twice)."""
    folder = expand(run)
    if not (folder / "config.json").exists():
        return run
    if folder.name in ("", ".."):  # such as run=., whose name is known only after resolving it
        folder = folder.resolve()
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    free = next(str(other) for other in numbered if not other.exists() and not other.is_symlink())
    remedy = " (to continue the first, resume it)" if what == "run" else ""
    say(f"{folder} already has a {what}, so this one goes to {free}{remedy}")
    return free


def resume_command(path: Path, more: str = "") -> str:
    """The command that resumes the run in a folder; a Python call if the run names objects. ``more`` is appended."""
    settings = None
    with suppress(ValueError, OSError):
        settings = read_json(path / "config.json")
    settings = settings if isinstance(settings, dict) else {}
    if named_in(settings):
        return resume_call(settings, path, more)
    command = f"poise train --resume run={shlex.quote(str(path))}" + (" --trust" if asks_for_code(settings) else "")
    return f"{command} {more}" if more else command
