"""Tables and figure of the miniature, from raw.json: python experiments/miniature/analyse.py.

The speed factor of an arm with a seed: the batch at which GRPO with the same seed reaches the accuracy that the arm has
at the cut, divided by the cut. Both curves are made monotone first; between evaluations they are straight lines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from poise.referee.compare.sign_flip import holm, interval, p_value
from poise.referee.compare.speed import Curve, rising, speed_factor

HERE = Path(__file__).parent
CUT = 64
BASELINE = "grpo"
ARMS = {  # the name of an arm by its regulator and rate
    ("grpo", 1.5e-6): BASELINE,
    ("grpo", 2.25e-6): "grpo, 1.5 × rate",
    ("grpo", 3e-6): "grpo, 2 × rate",
    ("grpo(passes=2)", 1.5e-6): "two passes",
    ("lopti(threshold=0.4)", 1.5e-6): "lopti",
    ("random-split(like='lopti(threshold=0.4)')", 1.5e-6): "random split like lopti",
    ("ar(alpha=0.2)", 1.5e-6): "ar",
    ("constant(like='ar(alpha=0.2)')", 1.5e-6): "constant like ar",
    ("ar(alpha=0.3) | lopti(threshold=0.5)", 1.5e-6): "ar + lopti",
}
PAIRS = (("lopti", "random split like lopti"), ("ar", "constant like ar"), ("ar + lopti", "grpo, 2 × rate"))


def curve(run: dict[str, Any]) -> Curve:
    """A run's greedy accuracy, made monotone."""
    return rising((int(step), value) for step, value in run["greedy"].items())


def runs() -> dict[str, dict[int, dict[str, Any]]]:
    """The runs of each arm, by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in json.loads((HERE / "raw.json").read_text()).values():
        if name := ARMS.get((run["regulator"], run["lr"])):
            found[name][run["seed"]] = run
    return {name: dict(sorted(found[name].items())) for name in ARMS.values() if name in found}


def speeds(arms: dict[str, dict[int, dict[str, Any]]]) -> dict[str, dict[int, float]]:
    """The speed factors of each arm, by seed. An accuracy that GRPO never reaches counts as twice as fast."""
    base = {seed: curve(run) for seed, run in arms[BASELINE].items()}
    return {
        name: {seed: speed_factor(curve(run).at(CUT), CUT, base[seed]) for seed, run in seeds.items() if seed in base}
        for name, seeds in arms.items()
        if name != BASELINE
    }


def shown(values: list[float]) -> str:
    """The geometric mean of speed factors and its interval; "≥" where a seed was cut at the end of GRPO's curve."""
    logs = [log(value) for value in values]
    low, high = interval(logs) if len(values) >= 6 else (-inf, inf)
    bounds = f" [{exp(low):.2f}, {exp(high):.2f}]" if high < inf else ""
    return f"{'≥ ' if max(values) >= 1.99 else ''}{exp(float(np.mean(logs))):.2f}{bounds}"


def tables() -> str:
    """The two tables of the page, in Markdown."""
    arms = runs()
    fast = speeds(arms)
    tested = {name: p_value([log(v) for v in by_seed.values()]) for name, by_seed in fast.items() if len(by_seed) >= 6}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    lines = [
        "| arm | seeds | greedy at batch 64 | speed factor | p (Holm) | cut off at the end | length at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seeds in arms.items():
        at_cut = [100 * curve(run).at(CUT) for run in seeds.values()]
        cut_off = [100 * run["cut_off"][1] / run["problems"] for run in seeds.values()]
        length = [run["steps"]["rollout/length"][CUT - 1] for run in seeds.values()]
        factor = shown(list(fast[name].values())) if fast.get(name) else "1" if name == BASELINE else "–"
        p = f"{adjusted[name]:.3f}" if name in adjusted else "–"
        lines.append(
            f"| {name} | {len(seeds)} | {np.mean(at_cut):.1f} | {factor} | {p} | {np.mean(cut_off):.1f} % "
            f"| {np.mean(length):.0f} |"
        )
    lines += ["", "| pair | seeds | ratio of speeds | p |", "|---|---|---|---|"]
    for one, other in PAIRS:
        both = sorted(fast.get(one, {}).keys() & fast.get(other, {}).keys())
        ratios = [fast[one][seed] / fast[other][seed] for seed in both]
        p = f"{p_value([log(ratio) for ratio in ratios]):.3f}" if len(both) >= 6 else "–"
        lines.append(f"| {one} / {other} | {len(both)} | {shown(ratios) if both else '–'} | {p} |")
    return "\n".join(lines)


def picture() -> None:
    """The mean curve of every arm."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, seeds in runs().items():
        curves = [curve(run) for run in seeds.values()]
        steps = curves[0][0]
        axes.plot(steps, 100 * np.mean([values for _, values in curves], 0), marker=".", label=f"{name} ({len(seeds)})")
    axes.axvline(CUT, color="0.7", linestyle=":")
    axes.set_xlabel("batches")
    axes.set_ylabel("greedy accuracy on 1,000 held-out sums, %")
    axes.legend(frameon=False, fontsize="small", title="arm (seeds)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "miniature.png", dpi=150)


if __name__ == "__main__":
    print(tables())
    picture()
