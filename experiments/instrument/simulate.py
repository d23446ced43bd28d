"""Simulated comparisons, in which the truth is known: python experiments/instrument/simulate.py [COMPARISONS].

A run learns along ``start + (top − start) · (1 − exp(−(reach · speed · step / cut)^1.5))``. ``reach`` is how far the
baseline gets by the cut. Each run has a pace of its own, part of which its seed gives to all arms, and every evaluation
is a draw of ``problems`` answers. It prints how often arms that equal the baseline are called better or faster, how
often the interval of the speed factor covers the truth, and which controls are said to explain three planted methods.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from poise.referee.compare.analysis import analyse
from poise.referee.compare.results import ACCURACY, Arm, Cost, Point, RunResult
from poise.referee.compare.sign_flip import intervals
from poise.referee.compare.speed import is_flat, speeds

BASELINE = "grpo"
CUT = 64


@dataclass(frozen=True)
class World:
    """How runs learn, and how they are measured."""

    reach: float = 1.0
    start: float = 0.15
    top: float = 0.75
    problems: int = 1000
    evaluations: int = 8  # up to the cut
    shared: float = 0.2  # spread of the pace over seeds, in logarithms
    own: float = 0.1  # spread of the pace over the runs of a seed


WORLDS = {
    "steep": World(reach=0.5),
    "bent": World(),
    "bent, 200 problems": World(problems=200),
    "bent, 16 evaluations": World(evaluations=16),
    "bent, runs differ much": World(own=0.3),
    "nearly flat": World(reach=1.5),
    "flat": World(reach=2.0),
    "flat, 200 problems": World(reach=2.0, problems=200),
}
PLANTED = {  # speeds of a method and of its controls
    "twice the rate, disguised": {"method": 1.8, "1.5 × rate": 1.4, "2 × rate": 1.8, "two passes": 1.6},
    "a second pass, disguised": {"method": 1.6, "1.5 × rate": 1.3, "2 × rate": 1.35, "two passes": 1.6},
    "a real improvement": {"method": 1.8, "1.5 × rate": 1.3, "2 × rate": 1.5, "two passes": 1.4},
}


def run(world: World, seed: int, speed: float, shared: float, longer: int, generator: np.random.Generator) -> RunResult:
    """A run of a method with this speed; ``shared`` is the pace that its seed gives to all arms."""
    steps = np.linspace(0, longer * CUT, longer * world.evaluations + 1)
    pace = world.reach * speed * np.exp(shared + generator.normal(0, world.own))
    truth = world.start + (world.top - world.start) * (1 - np.exp(-((pace * steps / CUT) ** 1.5)))
    measured = generator.binomial(world.problems, truth) / world.problems
    measured[0] = world.start
    scores = zip(steps.tolist(), measured.tolist(), strict=True)
    curve = tuple(Point(int(step), Cost(1000 * step, step, step), {ACCURACY: score}) for step, score in scores)
    return RunResult(seed, "finished", longer * CUT, curve, curve[-1].cost)


def comparison(world: World, speed_of: Mapping[str, float], seeds: int, generator: np.random.Generator) -> list[Arm]:
    """The baseline, which runs twice as long, and an arm for each speed."""
    paces = generator.normal(0, world.shared, seeds)
    arms = []
    for name, speed in {BASELINE: 1.0, **speed_of}.items():
        longer = 2 if name == BASELINE else 1
        runs = {seed: run(world, seed, speed, pace, longer, generator) for seed, pace in enumerate(paces)}
        arms.append(Arm(name, {}, runs))
    return arms


def false_claims(world: World, comparisons: int, seeds: int = 10, arms: int = 3) -> tuple[float, float]:
    """How often any of several arms that equal the baseline is called better or worse, and faster or slower."""
    generator = np.random.default_rng(0)
    wrong = np.zeros(2)
    for _ in range(comparisons):
        made = comparison(world, {f"arm {i}": 1.0 for i in range(arms)}, seeds, generator)
        rows = analyse(made, BASELINE, cut=CUT)["arms"][1:]
        wrong += [any(row[key]["p_adjusted"] <= 0.05 for row in rows) for key in ("difference", "speed")]
    return tuple(wrong / comparisons)


def coverage(world: World, speed: float, comparisons: int, seeds: int = 10) -> dict[str, float]:
    """How often the interval covers this speed, the mean factor, and how often the curve is called flat.

    Where the baseline never reaches an arm's accuracy, the interval has no upper end.
    """
    generator = np.random.default_rng(1)
    factors, flat, open_ended = [], 0, []
    for _ in range(comparisons):
        base, arm = comparison(world, {"arm": speed}, seeds, generator)
        found = speeds(arm, base, ACCURACY, CUT)
        factors.append(list(found.factors.values()))
        open_ended.append(bool(found.beyond))
        flat += is_flat(base, ACCURACY, CUT)
    logs = np.log(factors)
    low, high = intervals(logs)
    covered = (low <= log(speed)) & (np.array(open_ended) | (log(speed) <= high))
    return {"covered": covered.mean(), "mean": np.exp(logs.mean()), "flat": flat / comparisons}


def explanations(world: World, speed_of: Mapping[str, float], comparisons: int, seeds: int = 10) -> dict[str, Any]:
    """How often the method is called faster, and then each control an explanation, or none."""
    generator = np.random.default_rng(2)
    controls = [name for name in speed_of if name != "method"]
    counts = dict.fromkeys(["faster", *controls, "none"], 0)
    for _ in range(comparisons):
        made = comparison(world, speed_of, seeds, generator)
        made = [Arm(arm.name, {}, arm.runs, "a control" if arm.name in controls else "") for arm in made]
        row = analyse(made, BASELINE, cut=CUT, controls={"method": controls})["arms"][1]
        if row["speed"]["p_adjusted"] <= 0.05 and row["speed"]["mean"] > 1:
            found = [each["name"] for each in row["controls"]["faster"] if each["explains"]]
            for name in ["faster", *(found or ["none"])]:
                counts[name] += 1
    return {name: count / comparisons for name, count in counts.items()}


def main() -> None:
    """Print the three tables."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print("| curve at the cut | falsely better or worse | falsely faster or slower |\n|---|---|---|")
    for name, world in WORLDS.items():
        print(f"| {name} | " + " | ".join(f"{100 * share:.1f} %" for share in false_claims(world, count)) + " |")
    print("\n| curve at the cut | true speed | mean factor | interval covers it | called flat |\n|---|---|---|---|---|")
    for name, world in WORLDS.items():
        for speed in (1.0, 1.3, 1.6):
            found = coverage(world, speed, count)
            shares = f"{100 * found['covered']:.1f} % | {100 * found['flat']:.0f} %"
            print(f"| {name} | {speed} | {found['mean']:.2f} | {shares} |")
    print("\n| planted | called faster | explained by |\n|---|---|---|")
    for name, planted in PLANTED.items():
        found = explanations(World(reach=0.5), planted, count // 4)
        words = ", ".join(f"{key} {100 * share:.0f} %" for key, share in found.items() if key != "faster")
        print(f"| {name} | {100 * found['faster']:.0f} % | {words} |")


if __name__ == "__main__":
    main()
