"""Draws how the cost of an update grows, from what ``benchmarks/update.py --growth --json growth.json`` wrote.

python benchmarks/plots.py growth.json docs/figures/update.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

AT = 512  # the length at which sizes are compared


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Time and peak memory by response length, a line for each model, and by model size."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharey="row")
    by_length = sorted({row["shape"] for row in rows if row["length"] != AT}, key=lambda shape: size(rows, shape))
    for shape in by_length:
        line = sorted((row for row in rows if row["shape"] == shape), key=lambda row: row["length"])
        series(axes[:, 0], [row["length"] for row in line], line, shape)
    same = sorted((row for row in rows if row["length"] == AT), key=lambda row: row["parameters"])
    series(axes[:, 1], [row["parameters"] for row in same], same, f"{AT} tokens")
    lengths = {row["length"]: f"{row['length']:,}" for row in rows}
    sizes = {row["parameters"]: row["shape"] for row in same}
    for row, label in zip(axes, ("seconds per update", "peak memory, GiB"), strict=True):
        row[0].set_ylabel(label)
        for axis, below, ticks in zip(row, ("tokens of each of 32 responses", "model"), (lengths, sizes), strict=True):
            axis.set(xscale="log", yscale="log", xlabel=below)
            axis.set_xticks(list(ticks), list(ticks.values()))
            axis.yaxis.set_major_formatter("{x:g}")
            for one in (axis.xaxis, axis.yaxis):
                one.set_minor_formatter("")
            axis.grid(alpha=0.3, which="both", axis="y")
            axis.legend()
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def series(axes: Any, x: list[float], rows: list[dict[str, Any]], label: str) -> None:
    axes[0].plot(x, [statistics.median(row["seconds"]) for row in rows], "o-", label=label)
    if all(row["peak_bytes"] for row in rows):
        axes[1].plot(x, [row["peak_bytes"] / 2**30 for row in rows], "o-", label=label)


def size(rows: list[dict[str, Any]], shape: str) -> int:
    return int(next(row["parameters"] for row in rows if row["shape"] == shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    found = json.loads(args.results.read_text())
    draw(found["rows"], f"poise's update on {found['device']}, {found['date']}", args.figure)


if __name__ == "__main__":
    main()
