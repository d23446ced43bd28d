"""Draws how the cost of an update, or of sampling, grows, from what a script wrote.

python plots.py h200/update_growth.json update.png      # update.py --growth
python plots.py h200/rollout_growth.json rollout.png    # rollout.py --growth
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
    finish(figure, title, path)


def draw_sampling(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Tokens per second and peak memory by rows, by length and by model size, as far as they were measured."""
    kinds = {
        "rows": ("rows", "responses of 256 tokens"),
        "length": ("length", "tokens of each of 128 responses"),
        "size": ("parameters", "parameters; 512 responses of 256 tokens"),
    }
    shown = [kind for kind in kinds if sum(row["kind"] == kind for row in rows) > 1]
    figure, axes = plt.subplots(2, len(shown), figsize=(5 * len(shown), 7), sharey="row", squeeze=False)
    for column, kind in zip(axes.T, shown, strict=True):
        name, below = kinds[kind]
        line = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row[name])
        label = line[0]["shape"] if kind != "size" else None
        column[0].plot([row[name] for row in line], [row["tokens_per_s"] for row in line], "o-", label=label)
        column[1].plot([row[name] for row in line], [row["peak_bytes"] / 2**30 for row in line], "o-", label=label)
        for axis in column:
            axis.set(xscale="log", yscale="log", xlabel=below)
            ticks = {row[name]: row["shape"] if kind == "size" else f"{row[name]:,}" for row in line}
            axis.set_xticks(list(ticks), list(ticks.values()))
            axis.xaxis.set_minor_formatter("")
            axis.yaxis.set_major_formatter("{x:,g}")
            axis.grid(alpha=0.3, which="both", axis="y")
            if label:
                axis.legend()
    axes[0, 0].set_ylabel("tokens per second")
    axes[1, 0].set_ylabel("peak memory, GiB")
    finish(figure, title, path)


def finish(figure: Any, title: str, path: Path) -> None:
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
    rows, where = found["rows"], f"on {found['device']}, {found['date']}"
    if "kind" in rows[0]:
        draw_sampling(rows, f"poise's native engine {where}", args.figure)
    else:
        draw(rows, f"poise's update {where}", args.figure)


if __name__ == "__main__":
    main()
