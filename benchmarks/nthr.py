"""What NTHR's scores cost: poise beside the naive form, on the same groups, in one process.

    python benchmarks/nthr.py                               # small sizes, on the CPU
    python benchmarks/nthr.py --device cuda --json out.json --step-seconds 4

Naive is the pair sum with whole tokens × vocabulary arrays: in float32, as the maths says it (no TF32), and in
bfloat16. The contenders take turns; medians over the rounds after a warm-up, lowest and highest beside them. Memory is
what a call adds at its peak. Errors are those of s⁻ against the naive form in float64.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Way, environment, in_turns, median, spread, write
from torch import Tensor

from poise import Head, TokenBatch
from poise import regulators as registry
from poise.head.influence import Form, Scores, cheaper_form
from regulators import peak_memory, scores

RIGHT = WRONG = 4  # responses of a group
Tokens = tuple[Tensor, Tensor]


def naive(head: Tensor, positive: list[Tokens], negative: Tokens) -> Scores:
    """The definition with whole arrays, in the precision of its inputs: what one writes first."""
    hidden, targets = (torch.cat(parts) for parts in zip(*positive, strict=True))

    def errors(h: Tensor, y: Tensor) -> Tensor:
        pi = (h @ head.T).softmax(-1).neg_()
        pi[torch.arange(len(y), device=y.device), y] += 1
        return pi

    plus, minus = errors(hidden, targets), errors(*negative)
    among = (plus @ plus.T) * (hidden @ hidden.T)
    begin = 0
    for _, y in positive:
        among[begin : begin + len(y), begin : begin + len(y)] = 0
        begin += len(y)
    sums = among.sum(0, dtype=torch.promote_types(among.dtype, torch.float32))
    means = torch.stack([part.mean() for part in sums.split([len(y) for _, y in positive])])
    against = (plus @ minus.T) * (hidden @ negative[0].T)
    return Scores(against.sum(0, dtype=sums.dtype), means)


def make_head(device: str, width: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Logits are normal with a spread that leaves about three nats of entropy."""
    g = torch.Generator(device).manual_seed(0)
    spread = math.sqrt(2 * max(math.log(vocabulary) - 3, 0.5))
    weight = torch.randn(vocabulary, width, generator=g, device=device)
    return (weight * spread / math.sqrt(width)).to(dtype)


def sample(head: Tensor, count: int, seed: int = 1) -> tuple[Tensor, Tensor, float]:
    """Hidden states, tokens drawn from what the head makes of them, and the mean entropy in nats."""
    g = torch.Generator(head.device).manual_seed(seed)
    hidden = torch.randn(count, head.shape[1], generator=g, device=head.device).to(head.dtype)
    targets, entropy = [], 0.0
    for part in hidden.split(1024):
        logp = (part @ head.T).float().log_softmax(-1)
        targets.append(torch.multinomial(logp.exp(), 1, generator=g)[:, 0])
        entropy -= float((logp.exp() * logp).sum())
    return hidden, torch.cat(targets), entropy / count


def make_group(head: Tensor, length: int) -> tuple[list[Tokens], Tokens, float]:
    hidden, targets, entropy = sample(head, (RIGHT + WRONG) * length)
    sizes = [length] * RIGHT + [WRONG * length]
    *positive, negative = zip(hidden.split(sizes), targets.split(sizes), strict=True)
    return positive, negative, entropy


def cast(group: tuple[list[Tokens], Tokens], dtype: torch.dtype) -> tuple[list[Tokens], Tokens]:
    return [(h.to(dtype), y) for h, y in group[0]], (group[1][0].to(dtype), group[1][1])


def flop(form: Form, length: int, width: int, vocabulary: int) -> float:
    """Of the products over the vocabulary, for one group."""
    n, right = (RIGHT + WRONG) * length, RIGHT * length
    return 2.0 * n * vocabulary * (width + right) if form == "pair" else 6.0 * n * vocabulary * width


def compare(ways: dict[str, Way], device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each call, taking turns, their median in ms, and the MiB that a call adds."""
    times = in_turns(ways, device, repeats=rounds, warmup=2)  # compiles, and lets libraries take their workspace
    return {
        name: {"ms": 1e3 * median(times[name]), "seconds": times[name], "mib": peak_memory(way, device)}
        for name, way in ways.items()
    }


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def flags(result: Scores) -> Tensor:
    return result.negative > result.positive.min()


def one_group(head: Tensor, length: int, device: str, rounds: int, blocks: list[int]) -> dict[str, Any]:
    vocabulary, width = head.shape
    positive, negative, entropy = make_group(head, length)
    chosen = cheaper_form(RIGHT * length, width)
    other: Form = "linear" if chosen == "pair" else "pair"
    full, low = torch.float32, torch.bfloat16
    inputs = {dtype: (head.to(dtype), *cast((positive, negative), dtype)) for dtype in (full, low)}
    contenders: dict[str, Way] = {
        "poise": partial(scores, head, positive, negative),
        f"poise, {other}": partial(scores, head, positive, negative, form=other),
        "naive float32": partial(naive, *inputs[full]),
        "naive bfloat16": partial(naive, *inputs[low]),
    }
    for power in blocks:
        contenders[f"poise, block 2^{power}"] = partial(scores, head, positive, negative, block=1 << power)
    print(
        f"\nd/V = {width}/{vocabulary}, {RIGHT} + {WRONG} responses of {length} tokens, {entropy:.1f} nats; "
        f"{chosen} form, {flop(chosen, length, width, vocabulary) / 1e9:.0f} GFLOP "
        f"({other} {flop(other, length, width, vocabulary) / 1e9:.0f})"
    )
    rows: dict[str, Any] = dict(compare(contenders, device, rounds))
    exact = naive(head.double(), *cast((positive, negative), torch.float64))
    for name, run in contenders.items():
        row, result = rows[name], run()
        assert isinstance(result, Scores)
        form = other if name == f"poise, {other}" else "pair" if name.startswith("naive") else chosen
        row["tflops"] = flop(form, length, width, vocabulary) / row["ms"] / 1e9
        row["error"] = relative(result.negative, exact.negative)
        row["flags_differ"] = float((flags(result) != flags(exact)).double().mean())
        print(
            f"  {name:17s} {spread(row['seconds']):>24s} ms  +{row['mib']:7.1f} MiB  "
            f"{row['tflops']:6.1f} TFLOP/s  error {row['error']:.1e}  other flags {row['flags_differ']:.2%}",
            flush=True,
        )
    ours = rows["poise"]
    for name in ("naive float32", "naive bfloat16"):
        speed, memory = rows[name]["ms"] / ours["ms"], ours["mib"] / rows[name]["mib"]
        rows[f"against {name}"] = {"times_faster": speed, "share_of_memory": memory}
        print(f"  against {name}: {speed:.2f} times as fast, {memory:.3f} of its memory")
    rows |= {"entropy": entropy, "form": chosen, "gflop": flop(chosen, length, width, vocabulary) / 1e9}
    return rows


def whole_step(
    head: Tensor, length: int, device: str, rounds: int, groups: int, step_seconds: float | None
) -> dict[str, Any]:
    """The regulator on a rollout batch: everything that a training step pays for."""
    vocabulary, width = head.shape
    group, count = RIGHT + WRONG, groups * (RIGHT + WRONG)
    hidden, targets, _ = sample(head, count * length, seed=2)
    batch = TokenBatch(
        old_logp=torch.zeros(count, length, device=device),
        mask=torch.ones(count, length, dtype=torch.bool, device=device),
        advantages=torch.zeros(count, device=device),
        groups=torch.arange(groups, device=device).repeat_interleave(group),
        correct=torch.arange(count, device=device) % group < RIGHT,
        hidden=hidden.view(count, length, width),
        targets=targets.view(count, length),
        head=Head(head),
    )
    row: dict[str, Any] = compare({"step": partial(registry.get("nthr"), batch)}, device, rounds)["step"]
    total = groups * flop(cheaper_form(RIGHT * length, width), length, width, vocabulary)
    row |= {"tokens": count * length, "tflop": total / 1e12, "tflops": total / row["ms"] / 1e9}
    share = "" if step_seconds is None else f", {row['ms'] / 10 / step_seconds:.2f} % of {step_seconds:g} s"
    print(
        f"  the regulator on {groups} groups, {count * length} tokens: {spread(row['seconds'])} ms{share}, "
        f"+{row['mib']:.1f} MiB, {row['tflop']:.2f} TFLOP, {row['tflops']:.0f} TFLOP/s",
        flush=True,
    )
    return row


def growth(head: Tensor, lengths: list[int], device: str, rounds: int) -> dict[int, dict[str, Any]]:
    rows = {}
    print("  growth with the length of a response:")
    for length in lengths:
        positive, negative, _ = make_group(head, length)
        rows[length] = row = compare({"poise": partial(scores, head, positive, negative)}, device, rounds)["poise"]
        tokens = (RIGHT + WRONG) * length
        form = cheaper_form(RIGHT * length, head.shape[1])
        print(
            f"    {length:5d}: {row['ms']:9.2f} ms, {1e3 * row['ms'] / tokens:7.2f} µs a token, +{row['mib']:.1f} MiB, "
            f"{form}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--sizes", nargs="+", metavar="d/V", help="default: 576/49152 2048/151936; on a CPU 64/4096")
    parser.add_argument(
        "--lengths", nargs="+", type=int, help="tokens of a response; default 256 1024; on a CPU 32 128"
    )
    parser.add_argument("--growth", nargs="*", type=int, help="lengths for poise alone")
    parser.add_argument("--groups", type=int, help="of a whole step; default 64, on a CPU 4; 0 for none")
    parser.add_argument("--blocks", nargs="*", type=int, default=[], help="further block sizes, as powers of two")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step-seconds", type=float, help="length of an RL step, to say the share of it")
    args = parser.parse_args()
    gpu = args.device == "cuda"
    sizes = args.sizes or (["576/49152", "2048/151936"] if gpu else ["64/4096"])
    lengths = args.lengths or ([256, 1024] if gpu else [32, 128])
    longer = args.growth if args.growth is not None else [64, 128, 256, 512, 1024, 2048] if gpu else [16, 32, 64, 128]
    groups = args.groups if args.groups is not None else 64 if gpu else 4
    dtype = torch.bfloat16 if gpu else torch.float32
    rows: dict[str, Any] = environment(args.device) | {"dtype": str(dtype), "sizes": {}}
    print(f"torch {torch.__version__} on {rows['device']}, {dtype}")
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        for size in sizes:
            width, vocabulary = (int(part) for part in size.split("/"))
            head = make_head(args.device, width, vocabulary, dtype)
            found: dict[str, Any] = {"group": {}, "step": {}}
            rows["sizes"][size] = found
            for length in lengths:
                found["group"][length] = one_group(head, length, args.device, args.rounds, args.blocks)
                if groups:
                    found["step"][length] = whole_step(
                        head, length, args.device, min(args.rounds, 5), groups, args.step_seconds
                    )
            found["growth"] = growth(head, longer, args.device, args.rounds)
            write(args.json, rows)  # after each size: a run that is cut short leaves what it has


if __name__ == "__main__":
    main()
