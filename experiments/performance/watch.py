"""The watch server under load, on this machine's loopback: python experiments/performance/watch.py

It gets 200 and 1,000 requests at once, for the stamp and for the index.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import made_up

PATIENCE = 90.0  # seconds until a client gives up


@contextmanager
def server(run: Path) -> Iterator[int]:
    """``poise report --watch`` in a process of its own: its port."""
    command = [sys.executable, "-m", "poise", "report", "--watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().split()[0].rpartition(":")[2])
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
    with server(run) as port:
        asyncio.run(ask(port, "/index"))  # the files are read once
        for path in ("/stamp", "/index"):
            for count in (200, 1000):
                found[f"{count} × {path}"] = summary(asyncio.run(_at_once(port, path, count)))
    return found


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8000), hard))  # the clients' own descriptors
    with tempfile.TemporaryDirectory() as folder:
        run = made_up(Path(folder) / "run", steps=4, responses=128, length=200)  # as much as a short run of recipe tiny
        print(json.dumps(many(run), indent=1), flush=True)


if __name__ == "__main__":
    main()
