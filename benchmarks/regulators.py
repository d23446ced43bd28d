"""What regulators cost: time and peak memory of each on one rollout batch, and NTHR's scores against the naive form.

    python benchmarks/regulators.py                  # everything, on the CPU
    python benchmarks/regulators.py --device cuda --json out.json

Medians over repetitions after a warm-up. Memory is what the call itself adds at its peak: resident set on the CPU
(Linux), allocator statistics on CUDA.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poise import TokenBatch, regulators
from poise.head.influence import Scores, group_scores


def scores(head: Any, positive: list[Any], negative: tuple[Tensor, Tensor], **settings: Any) -> Scores:
    """``group_scores`` of one group: (hidden, targets) of each correct response, and of all incorrect ones together."""
    parts = [*positive, negative]
    hidden, targets = (torch.cat(each) for each in zip(*parts, strict=True))
    return group_scores(head, hidden, targets, [[len(y) for _, y in parts]], **settings)


def peak_memory(run: Callable[[], Any], device: str) -> float:
    """MiB that a call adds at its peak."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = float(torch.cuda.memory_allocated())
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    if not Path("/proc/self/clear_refs").exists():
        return float("nan")
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from the present size
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 2**10


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1])
    raise KeyError(field)


def measure(run: Callable[[], Any], device: str, repeats: int) -> dict[str, float]:
    memory = peak_memory(run, device)  # also the warm-up
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"ms": 1e3 * statistics.median(times), "worst_ms": 1e3 * max(times), "peak_mib": memory}


def rollout_batch(device: str, prompts: int = 64, group: int = 8, length: int = 1024, width: int = 64) -> TokenBatch:
    g = torch.Generator(device).manual_seed(0)
    n = prompts * group

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, device=device)

    lengths = (length * rand(n, 1)).long() + 1
    return TokenBatch(
        old_logp=-4 * rand(n, length) ** 6,  # most tokens are near certain, as in real rollouts
        mask=torch.arange(length, device=device) < lengths,
        advantages=torch.randn(n, generator=g, device=device),
        groups=torch.arange(prompts, device=device).repeat_interleave(group),
        correct=rand(n) < 0.5,
        entropy=2 * rand(n, length),
        hidden=torch.randn(n, length, width, generator=g, device=device),
        head=torch.randn(4096, width, generator=g, device=device) / 8,
        targets=torch.randint(0, 4096, (n, length), generator=g, device=device),
    )


def naive_scores(head: Tensor, positive: list[tuple[Tensor, Tensor]], negative: tuple[Tensor, Tensor]) -> Tensor:
    """The pair sum with every tokens × vocabulary array whole: what one writes first."""
    hidden, targets = (torch.cat(parts) for parts in zip(*positive, strict=True))

    def errors(h: Tensor, y: Tensor) -> Tensor:
        pi = (h @ head.T).softmax(-1).neg_()
        pi[torch.arange(len(y)), y] += 1
        return pi

    plus, minus = errors(hidden, targets), errors(*negative)
    ((plus @ plus.T) * (hidden @ hidden.T)).sum(0)  # the correct ones, for the threshold
    return ((plus @ minus.T) * (hidden @ negative[0].T)).sum(0)


def nthr_group(
    device: str, n: int, width: int, vocabulary: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    g = torch.Generator(device).manual_seed(0)

    def tokens(count: int) -> tuple[Tensor, Tensor]:
        hidden = torch.randn(count, width, generator=g, device=device)
        return hidden, torch.randint(0, vocabulary, (count,), generator=g, device=device)

    head = torch.randn(vocabulary, width, generator=g, device=device) / width**0.5
    return head, [tokens(n // 4) for _ in range(4)], tokens(n)


def import_seconds(statement: str) -> float:
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    return statistics.median(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--tokens", type=int, default=4096, help="N⁺ = N⁻ of the largest NTHR group")
    args = parser.parse_args()
    machine = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"torch {torch.__version__} on {machine}")
    rows: dict[str, Any] = {"torch": torch.__version__, "machine": machine, "regulators": {}, "nthr": {}}

    batch = rollout_batch(args.device)
    tokens = int(batch.mask.sum())
    print(f"\nregulators, B × T = {tuple(batch.mask.shape)}, {tokens} response tokens (nthr: d = 64, V = 4096)")
    for name in regulators.TABLE:
        row = measure(partial(regulators.get(name), batch), args.device, 1 if name == "nthr" else 7)
        rows["regulators"][name] = row
        print(f"  {name:13s} {row['ms']:9.1f} ms (worst {row['worst_ms']:.1f})  +{row['peak_mib']:.0f} MiB", flush=True)

    width, vocabulary = 512, 32768
    print(f"\nNTHR scores of one group, d = {width}, V = {vocabulary}, four correct responses")
    for n in (args.tokens // 8, args.tokens // 4, args.tokens // 2, args.tokens):
        group = nthr_group(args.device, n, width, vocabulary)
        ours = measure(partial(scores, *group), args.device, 1)
        found, expected = scores(*group).negative, naive_scores(*group)
        error = float((found - expected).norm() / expected.norm())
        naive = measure(partial(naive_scores, *group), args.device, 1)
        rows["nthr"][n] = {"ours": ours, "naive": naive, "relative_difference": error}
        print(
            f"  N⁺ = N⁻ = {n:5d}: {ours['ms']:8.0f} ms +{ours['peak_mib']:5.0f} MiB | naive {naive['ms']:8.0f} ms "
            f"+{naive['peak_mib']:5.0f} MiB | memory ratio {ours['peak_mib'] / naive['peak_mib']:.3f} "
            f"| differ by {error:.1e}",
            flush=True,
        )

    if args.device == "cpu":
        bare, ours_s = import_seconds("import torch"), import_seconds("import poise")
        rows["import_s"] = {"torch": bare, "poise": ours_s}
        print(f"\nimport torch {bare:.2f} s, import poise {ours_s:.2f} s")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
