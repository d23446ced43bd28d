"""Checks a second of the reward ``math``, beside math-verify alone, in one run: GSM8K, and answers that need algebra.

python experiments/tasks/reward_checks.py gsm8k_train.jsonl.gz    # GSM8K's training split, 7,473 rows
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from poise import rewards
from poise.tasks.rewards import equality, maths

Pairs = list[tuple[str, str]]  # reply, gold


def gsm8k(path: str) -> Pairs:
    """Worked solutions as replies: each with its own answer, and each with that of another row."""
    with gzip.open(path, "rt") as lines:
        golds = [json.loads(line)["answer"] for line in lines]
    others = random.Random(0).sample(golds, len(golds))
    return [*zip(golds, golds, strict=True), *zip(others, golds, strict=True)]


def algebra(count: int) -> Pairs:
    """Answers in another form than the gold one, none of them twice; every other one is wrong."""
    pairs = []
    for n in range(2, 2 + count // 4):
        wrong = n % 2
        pairs += [
            (rf"\boxed{{(x+{n})^2}}", f"x^2+{2 * n}x+{n * n + wrong}"),
            (rf"\boxed{{\sqrt{{{3 * n * n}}}}}", rf"{n + wrong}\sqrt{{3}}"),
            (rf"\boxed{{\frac{{{n}\pi}}{{{2 * n + 2}}}}}", rf"\frac{{\pi {n}}}{{2({n}+{1 + wrong})}}"),
            (rf"\boxed{{y={n}x+{n}}}", f"y-{n}x={n + wrong}"),
        ]
    assert all(equality.equal(reply[7:-1], gold) is None for reply, gold in pairs)
    return pairs


def alone(pairs: Pairs) -> list[float | None]:
    """math-verify as its page shows it, in this process, without time limits."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    return [
        float(verify(parse(gold, parsing_timeout=None), parse(reply, parsing_timeout=None), timeout_seconds=None))
        for reply, gold in pairs
    ]


def ours(pairs: Pairs) -> list[float | None]:
    return rewards.Math()([reply for reply, _ in pairs], answer=[gold for _, gold in pairs])


def rate(run: Callable[[Pairs], Any], pairs: Pairs) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    values = run(pairs)
    seconds = time.perf_counter() - start
    return {
        "checks": len(pairs),
        "right": sum(values),
        "checks_per_s": round(len(pairs) / seconds),
        "processor_s_of_this_process": round(time.process_time() - cpu, 2),
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    pairs, formulas = gsm8k(sys.argv[1]), algebra(400)
    dollars = [(f"${reply[7:-1]}$", f"${gold}$") for reply, gold in formulas]  # what math-verify takes for a formula
    warm_up = [(r"\boxed{x+1}", f"{n}+x") for n in range(2, 40)]
    ours(warm_up)  # starts the processes
    alone(dollars[:8])
    step = len(pairs) // 500
    found = {
        "cores": len(os.sched_getaffinity(0)),
        "workers": min(len(os.sched_getaffinity(0)), maths.MOST_WORKERS),
        "gsm8k": {"math": rate(ours, pairs), "math-verify alone": rate(alone, pairs[::step])},
        "algebra": {"math": rate(ours, formulas), "math-verify alone": rate(alone, dollars)},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
