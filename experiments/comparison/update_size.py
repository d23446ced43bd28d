"""How large are the updates of each arm? Gradients and the policy's drift, by learning rate, in a finished comparison.

    python experiments/comparison/update_size.py runs/main/steps4-w1 update-size.json

Reads the metrics of all runs, those for tuning included. For each arm and learning rate, means over batches and seeds:
``grad_norm``, the norm of the gradient before Adam divides by its size; ``drift``, the KL divergence from the policy
that sampled a batch, in nats a token, as the update's mini-batches see it (0 with one step a batch, where nothing has
moved yet); accuracy at the end. ``beside``: the ratio to the baseline at the same learning rate, over the seeds that
both have (geometric mean, and Student's 95 % interval of its logarithm from three seeds on).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from poise.referee.compare.statistics import student_interval
from poise.runs.folder import RunFolder

SIZES = {"grad_norm": "optim/grad_norm", "drift": "optim/drift"}
Rows = dict[int, dict[str, float]]  # by seed


def run_of(folder: Path) -> dict[str, float] | None:
    """Means over the batches of a run, and its accuracy; None if it has not finished."""
    summary = folder / "summary.json"
    if not summary.exists():
        return None
    metrics = RunFolder.open(folder, resume=False).metrics()
    found = {name: mean(row[key] for row in metrics if key in row) for name, key in SIZES.items()}
    return found | {"accuracy": json.loads(summary.read_text())["after"]["accuracy"]}


def variants_of(comparison: Path) -> dict[tuple[str, float], Rows]:
    """The finished runs by arm and learning rate."""
    found: dict[tuple[str, float], Rows] = {}
    for folder in sorted(comparison.glob("arms/*/seed-*")):
        config = json.loads((folder / "config.json").read_text())
        if row := run_of(folder):
            found.setdefault((config["regulator"], config["optim"]["lr"]), {})[config["seed"]] = row
    return found


def ratio(arm: Rows, baseline: Rows, size: str) -> dict[str, Any]:
    seeds = sorted(set(arm) & set(baseline))
    logs = [math.log(arm[seed][size] / baseline[seed][size]) for seed in seeds if baseline[seed][size] > 0]
    if not logs:
        return {"seeds": seeds}
    ends = student_interval(logs) if len(logs) > 2 else None
    return {"seeds": seeds, "mean": math.exp(mean(logs)), "interval": ends and [math.exp(end) for end in ends]}


def table(comparison: Path, baseline: str) -> list[dict[str, Any]]:
    variants = variants_of(comparison)
    rows = []
    for (arm, rate), runs in sorted(variants.items()):
        row = {"arm": arm, "rate": rate, "seeds": sorted(runs)}
        row |= {key: mean(run[key] for run in runs.values()) for key in (*SIZES, "accuracy")}
        peer = variants.get((baseline, rate))
        if peer is not None and arm != baseline:
            row["beside"] = {size: ratio(runs, peer, size) for size in SIZES}
        rows.append(row)
    return rows


def shown(found: dict[str, Any]) -> str:
    if "mean" not in found:
        return "—"
    ends = found["interval"]
    return f"{found['mean']:.2f}" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'arm':16} {'rate':>8} {'seeds':>5} {'accuracy':>8} {'grad_norm':>9} {'drift':>9}  gradient, drift beside")
    for row in rows:
        beside = ", ".join(shown(found) for found in row.get("beside", {}).values())
        print(
            f"{row['arm']:16} {row['rate']:8.1e} {len(row['seeds']):5} {row['accuracy']:8.3f} {row['grad_norm']:9.4f} "
            f"{row['drift']:9.2e}  {beside}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("json", type=Path)
    parser.add_argument("--baseline", default="grpo")
    args = parser.parse_args()
    rows = table(args.comparison, args.baseline)
    show(rows)
    args.json.write_text(
        json.dumps({"comparison": args.comparison.name, "baseline": args.baseline, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
