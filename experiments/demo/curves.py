"""Training curves of several seeds as one line.

    python experiments/demo/curves.py PICTURE.png NAME=RUN,RUN,… [NAME=RUN,…]

A line is the mean over runs of a running mean over five steps, the band one standard deviation. ``--x tokens`` or ``--x
seconds`` draws it over those, as far as all runs of a line go. Below, the table of every run's evaluation before and
after.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib
import numpy as np

from poise.runs.axes import AXES, x_values

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SMOOTH = 5  # steps
POINTS = 200  # of a line that is not over steps


def curve(run: Path, metric: str, axis: str) -> tuple[list[float], list[float]]:
    """Places on the axis, and the metric there."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    places = x_values(steps, axis)
    if places is None:
        raise SystemExit(f"{run} has no {AXES[axis]}: choose another --x")
    shown = [(x, step[metric]) for x, step in zip(places, steps, strict=True) if metric in step]
    values = [value for _, value in shown]
    means = [statistics.mean(values[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(values))]
    return [x for x, _ in shown], means


def together(runs: list[tuple[list[float], list[float]]], axis: str) -> tuple[list[float], list[tuple[float, ...]]]:
    """Places, and the values of all runs at each of them."""
    if axis == "step":
        return runs[0][0], list(zip(*(values for _, values in runs), strict=True))
    first, last = max(places[0] for places, _ in runs), min(places[-1] for places, _ in runs)
    grid = np.linspace(first, last, POINTS)
    return grid.tolist(), list(zip(*(np.interp(grid, *run).tolist() for run in runs), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("sets", nargs="+", metavar="NAME=RUN,RUN")
    parser.add_argument("--metric", default="reward/accuracy")
    parser.add_argument("--x", choices=[*AXES], default="step")
    args = parser.parse_args()
    figure, axis = plt.subplots(figsize=(7, 4))
    for given in args.sets:
        name, runs = given.split("=", 1)
        folders = [Path(run) for run in runs.split(",")]
        places, curves = together([curve(run, args.metric, args.x) for run in folders], args.x)
        mean = [statistics.mean(values) for values in curves]
        width = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in curves]
        axis.plot(places, mean, label=f"{name}, {len(folders)} seeds")
        low, high = ([m + sign * w for m, w in zip(mean, width, strict=True)] for sign in (-1, 1))
        axis.fill_between(places, low, high, alpha=0.2)
        gains = []
        for run in folders:
            summary = json.loads((run / "summary.json").read_text())
            before, after = summary["before"], summary["after"]
            gains.append(after["accuracy"] - before["accuracy"])
            greedy = f"greedy {before['greedy']:.3f} → {after['greedy']:.3f}"
            print(f"{run}: avg {before['accuracy']:.3f} → {after['accuracy']:.3f} ({gains[-1]:+.3f}), {greedy}")
        if len(gains) > 1:
            spread = statistics.stdev(gains)
            print(f"{name}: gain {statistics.mean(gains):+.3f}, standard deviation over seeds {spread:.3f}")
    axis.set(xlabel=AXES[args.x], ylabel=args.metric)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(args.picture, dpi=130)
    print(f"wrote {args.picture}")


if __name__ == "__main__":
    main()
