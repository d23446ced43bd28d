"""Training curves of several seeds as one line: python benchmarks/curves.py PICTURE.png NAME=RUN,RUN,… [NAME=RUN,…]

    python benchmarks/curves.py engines.png native=runs/native-0,runs/native-1 transformers=runs/cached-0,runs/cached-1

A line is the mean over runs of a running mean over five steps, the band one standard deviation. Below, the table of
every run's evaluation before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SMOOTH = 5  # steps


def curve(run: Path, metric: str) -> list[float]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [step[metric] for step in steps if metric in step]
    return [statistics.mean(values[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("sets", nargs="+", metavar="NAME=RUN,RUN")
    parser.add_argument("--metric", default="reward/accuracy")
    args = parser.parse_args()
    figure, axis = plt.subplots(figsize=(7, 4))
    for given in args.sets:
        name, runs = given.split("=", 1)
        folders = [Path(run) for run in runs.split(",")]
        curves = list(zip(*(curve(run, args.metric) for run in folders), strict=True))
        mean = [statistics.mean(values) for values in curves]
        width = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in curves]
        steps = range(1, len(mean) + 1)
        axis.plot(steps, mean, label=f"{name}, {len(folders)} seeds")
        low, high = ([m + sign * w for m, w in zip(mean, width, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, low, high, alpha=0.2)
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
    axis.set(xlabel="step", ylabel=args.metric)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(args.picture, dpi=130)
    print(f"wrote {args.picture}")


if __name__ == "__main__":
    main()
