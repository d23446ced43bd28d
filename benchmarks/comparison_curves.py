"""Curves of comparisons with few seeds: python benchmarks/comparison_curves.py OUT.json OUT.png NAME=COMPARISON …

    python benchmarks/comparison_curves.py regulated.json regulated.png RLTR=runs/main/rltr ERL=runs/main/erl
    python benchmarks/comparison_curves.py regulated.json regulated.png    # only the picture, from regulated.json

COMPARISON is a folder of `poise compare`. OUT.json gets all evaluations of every run, and metrics of its first and last
ten steps. In the picture a line is the mean over seeds, as far as all of them go, a thin line one seed, the band from
the lowest seed to the highest: three seeds have no interval worth drawing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from poise.comparison.plots import STYLES
from poise.comparison.results import ACCURACY, RunResult
from poise.reports.recorded import read_metrics
from poise.runs.folder import RunFolder

ENDS = 10  # steps at either end of a run
METRICS = (
    *("reward/accuracy", "reward/no_spread", "rollout/entropy", "optim/grad_norm", "transfer/mean"),
    *("first/success", "second/success", "reflection/readable", "tokens/sampled", "tokens/receiver", "time/step"),
)


def read(comparison: Path) -> dict[str, Any]:
    """Settings of a comparison, and what its runs measured, by arm and seed, in the order of the arms."""
    known = json.loads((comparison / "comparison.json").read_text())
    arms: dict[str, dict[str, Any]] = {arm["name"]: {} for arm in known["arms"]}
    for folder in sorted((comparison / "arms").glob("*/seed-*")):
        run, lines = RunResult.read(folder), read_metrics(RunFolder.open(folder, resume=False))
        arms[json.loads((folder / "config.json").read_text())["regulator"]][str(run.seed)] = {
            "state": run.state,
            "optimizer_steps": run.cost.optimizer_steps,
            "flop": run.cost.flop,
            "curve": [[point.step, point.cost.tokens, dict(point.scores)] for point in run.curve],
            **{side: _means(part) for side, part in (("first", lines[:ENDS]), ("last", lines[-ENDS:]))},
        }
    return {"settings": known["settings"], "arms": arms}


def _means(lines: list[dict[str, Any]]) -> dict[str, float]:
    known = {name: [line[name] for line in lines if line.get(name) is not None] for name in METRICS}
    return {name: fmean(values) for name, values in known.items() if values}


def picture(path: Path, systems: dict[str, Any]) -> None:
    """Held-out accuracy over sampled tokens, a panel for each system."""
    figure = Figure(figsize=(5.5 * len(systems), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, system) in zip(figure.subplots(1, len(systems), squeeze=False)[0], systems.items(), strict=True):
        for (arm, runs), (colour, marker) in zip(system["arms"].items(), STYLES, strict=False):
            curves = [run["curve"] for run in runs.values() if run["state"] != "unfinished"]
            tokens = [[point[1] / 1000 for point in curve] for curve in curves]
            scores = [[100 * point[2][ACCURACY] for point in curve] for curve in curves]
            for x, y in zip(tokens, scores, strict=True):
                axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.6)
            x, y = ([fmean(values) for values in zip(*lines, strict=False)] for lines in (tokens, scores))
            low, high = ([end(values) for values in zip(*scores, strict=False)] for end in (min, max))
            axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
            axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=2, label=f"{arm}, {len(curves)} seeds")
        axes.set(title=name, xlabel="sampled tokens, thousands", ylabel="held-out accuracy, points")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small", loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("comparisons", nargs="*", metavar="NAME=COMPARISON")
    args = parser.parse_args()
    if args.comparisons:
        from measure import environment

        systems = {name: read(Path(folder)) for name, folder in (each.split("=", 1) for each in args.comparisons)}
        found = {**environment("cpu"), "systems": systems}
        args.results.write_text(json.dumps(found, indent=1) + "\n")
    picture(args.picture, json.loads(args.results.read_text())["systems"])


if __name__ == "__main__":
    main()
