"""Arms of a comparison with made-up runs."""

from __future__ import annotations

import numpy as np

from poise.referee.compare.results import Arm, Cost, Point, RunResult


def made_run(seed, final, *, start=0.3, steps=100, every=20, state="finished", passes=1, **changes):
    """A run whose accuracy rises in a straight line from ``start`` to ``final``."""
    curve = []
    for step in range(0, steps + 1, every):
        share = step / steps
        accuracy = start + share * (final - start)
        cost = Cost(1000.0 * step, 2.0 * step * passes, 0.5 * step * passes, 1e9 * step * passes)
        scores = {"accuracy": accuracy, "avg@4": accuracy, "pass@4": accuracy / 2 + 0.5, "greedy": 0.6 + accuracy / 100}
        curve.append(Point(step, cost, scores))
    return RunResult(seed, state, steps, tuple(curve), curve[-1].cost, **{"entropy": (0.5,) * steps, **changes})


def made_arm(name, gain, *, seeds=10, noise=0.01, passes=1, settings=None, **changes):
    """An arm that ends ``gain`` above 0.5, up to what the seed adds (the same for all arms) and noise of its own."""
    own = np.random.default_rng(sum(map(ord, name)))
    runs = {}
    for seed in range(seeds):
        shared = np.random.default_rng(seed).normal(0, 0.05)
        final = float(0.5 + shared + gain + own.normal(0, noise))
        runs[seed] = made_run(seed, final, passes=passes, **changes)
    return Arm(name, settings or {"regulator": name}, runs)
