"""Curves of comparisons with few seeds.

    python experiments/comparison/comparison_curves.py OUT.json OUT.png NAME=COMPARISON …
    python experiments/comparison/comparison_curves.py OUT.json OUT.png    # only the picture, from OUT.json

COMPARISON is a folder of `poise compare`; with commas, further such folders, or runs, whose results belong to it.
OUT.json gets all evaluations of every run, with means of metrics over the steps before each. In the picture a line is
the mean over seeds, as far as all of them go, a thin line one seed, the band from the lowest seed to the highest: three
seeds have no interval worth drawing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from poise.referee.compare.output import STYLES
from poise.referee.compare.results import ACCURACY, RunResult
from poise.runs.folder import RunFolder

METRICS = (
    *("reward/accuracy", "reward/no_spread", "rollout/entropy", "optim/grad_norm", "transfer/mean"),
    *("first/success", "second/success", "reflection/readable", "tokens/sampled", "tokens/receiver", "time/step"),
)


def read(first: Path, *others: Path) -> dict[str, Any]:
    """Settings of a comparison, and what its runs measured, by arm and seed, in the order of the arms."""
    known = json.loads((first / "comparison.json").read_text())
    arms: dict[str, dict[str, Any]] = {arm["name"]: {} for arm in known["arms"]}
    for place in (first, *others):
        for folder in sorted(place.glob("arms/*/seed-*")) or [place]:
            settings = json.loads((folder / "config.json").read_text())
            run, lines = RunResult.read(folder), RunFolder.open(folder, resume=False).metrics()
            arms[settings["regulator"]][str(run.seed)] = {
                "state": run.state, "planned": settings["steps"], "steps": run.steps, "curve": _curve(run, lines),
            }  # fmt: skip
    return {"settings": known["settings"], "arms": {arm: dict(sorted(runs.items())) for arm, runs in arms.items()}}


def _curve(run: RunResult, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every evaluation: scores, what the training until then has cost, and its metrics since the one before."""
    found, before = [], 0
    for point in run.curve:
        cost = {"tokens": point.cost.tokens, "optimizer_steps": point.cost.optimizer_steps, "flop": point.cost.flop}
        found.append({"step": point.step, **cost, **point.scores, "metrics": _means(lines[before : point.step])})
        before = point.step
    return found


def _means(lines: list[dict[str, Any]]) -> dict[str, float]:
    known = {name: [line[name] for line in lines if line.get(name) is not None] for name in METRICS}
    return {name: fmean(values) for name, values in known.items() if values}


def picture(path: Path, systems: dict[str, Any]) -> None:
    """Held-out accuracy over sampled tokens, a panel for each system."""
    figure = Figure(figsize=(5.5 * len(systems), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, system) in zip(figure.subplots(1, len(systems), squeeze=False)[0], systems.items(), strict=True):
        for (arm, runs), (colour, marker, _) in zip(system["arms"].items(), STYLES, strict=False):
            curves = [run["curve"] for run in runs.values()]
            tokens = [[point["tokens"] / 1000 for point in curve] for curve in curves]
            scores = [[100 * point[ACCURACY] for point in curve] for curve in curves]
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

        named = (each.split("=", 1) for each in args.comparisons)
        systems = {name: read(*map(Path, folders.split(","))) for name, folders in named}
        found = {**environment("cpu"), "systems": systems}
        args.results.write_text(json.dumps(found, indent=1) + "\n")
    picture(args.picture, json.loads(args.results.read_text())["systems"])


if __name__ == "__main__":
    main()
