"""Which processes run, from /proc."""

import time
from pathlib import Path


def running():
    """(process, parent, session) of every process that has not ended."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = file.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended meanwhile
            continue
        if state not in "ZX":
            found.append((int(file.parent.name), int(parent), int(session)))
    return found


def alive(pids):
    return {pid for pid, _, _ in running()} & set(pids)


def children(pid):
    return {each for each, parent, _ in running() if parent == pid}


def session(pid):
    return {each for each, _, own in running() if own == pid}


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
