"""The watch server under load, on this machine's loopback: many requests at once, silent clients, few descriptors.

python experiments/performance/watch.py              # everything, about two minutes
python experiments/performance/watch.py many         # 200 and 1,000 requests at once
python experiments/performance/watch.py silent       # 1,000 connections that never send a request, then one that does
python experiments/performance/watch.py descriptors  # 200 such connections, 64 file descriptors
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import made_up

PATIENCE = 90.0  # seconds until a client gives up
CLIENTS = 1000
WATCHED = 15.0  # seconds over which the processor time is taken


@contextmanager
def server(run: Path, descriptors: int | None = None) -> Iterator[tuple[int, int]]:
    """``poise report --watch`` in a process of its own: its port and its process id."""

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    command = [sys.executable, "-m", "poise", "report", "--watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().split()[0].rpartition(":")[2]), process.pid
        finally:
            process.kill()


async def ask(port: int, path: str) -> float | None:
    """Seconds until the answer is whole; None where there was none."""
    start = time.perf_counter()
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
    except OSError:  # TimeoutError is one
        return None
    return time.perf_counter() - start if answer.startswith(b"HTTP/1.0 200") else None


def summary(took: list[float | None]) -> dict[str, float | int]:
    answered = sorted(seconds for seconds in took if seconds is not None)
    return {
        "requests": len(took),
        "unanswered": len(took) - len(answered),
        "median_s": round(statistics.median(answered), 3) if answered else float("nan"),
        "slowest_s": round(answered[-1], 3) if answered else float("nan"),
        "over_1_s": sum(seconds > 1 for seconds in answered),
    }


async def _at_once(port: int, path: str, count: int) -> list[float | None]:
    return await asyncio.gather(*(ask(port, path) for _ in range(count)))


def many(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with server(run) as (port, _):
        asyncio.run(ask(port, "/index"))  # the files are read once
        for path in ("/stamp", "/index"):
            for count in (200, 1000):
                found[f"{count} × {path}"] = summary(asyncio.run(_at_once(port, path, count)))
    return found


async def _connect(port: int) -> asyncio.StreamWriter | None:
    """A connection that sends nothing. None where the server does not take it within a few seconds."""
    try:
        async with asyncio.timeout(5):
            return (await asyncio.open_connection("127.0.0.1", port))[1]
    except OSError:
        return None


async def _beside_silent(port: int, pid: int, clients: int) -> dict[str, Any]:
    held = [await asyncio.gather(*(_connect(port) for _ in range(100))) for _ in range(clients // 100)]
    before, start = _processor_time(pid), time.perf_counter()
    first = await ask(port, "/stamp")
    await asyncio.sleep(max(0.0, WATCHED - (time.perf_counter() - start)))
    busy = (_processor_time(pid) - before) / (time.perf_counter() - start)
    later = await ask(port, "/stamp")
    threads = len(os.listdir(f"/proc/{pid}/task"))
    connected = sum(writer is not None for batch in held for writer in batch)
    return {"connected": connected, "a_request_s": first, "later_s": later, "processor": busy, "threads": threads}


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def silent(run: Path) -> dict[str, Any]:
    with server(run) as (port, pid):
        return {"silent clients": asyncio.run(_beside_silent(port, pid, CLIENTS))}


def descriptors(run: Path) -> dict[str, Any]:
    with server(run, descriptors=64) as (port, pid):
        return {"silent clients, 64 descriptors": asyncio.run(_beside_silent(port, pid, 200))}


def main() -> None:
    measures: dict[str, Callable[[Path], dict[str, Any]]] = {
        "many": many,
        "silent": silent,
        "descriptors": descriptors,
    }
    chosen = sys.argv[1:] or list(measures)
    if not set(chosen) <= set(measures):
        sys.exit(__doc__)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8 * CLIENTS), hard))  # the clients' own descriptors
    with tempfile.TemporaryDirectory() as folder:
        run = made_up(Path(folder) / "run", steps=4, responses=128, length=200)  # as much as a short run of the demo
        for name in chosen:
            print(json.dumps(measures[name](run), indent=1), flush=True)


if __name__ == "__main__":
    main()
