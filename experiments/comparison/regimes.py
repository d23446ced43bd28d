"""All regimes of comparison.md together: a line for each method, and the picture.

    python experiments/comparison/regimes.py experiments/comparison/figures/regimes.png

The mean over regimes counts each of them once. Its standard error comes from the spread over seeds within regimes, its
interval is Student's with Welch's degrees of freedom, and p flips the sign of every seed's difference (at random, since
there are some seventy). It speaks of these regimes, not of others: how much regimes differ is not in the error, but in
the random effects, whose sample they are: the interval of their mean, the prediction for one more regime, and I².
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from poise.referee.compare.output import STYLES
from poise.referee.compare.random_effects import random_effects
from poise.referee.compare.sign_flip import interval, p_value

RESULTS = Path(__file__).parent
REGIMES = {  # the file of a comparison, and what a picture calls it
    "h200/main-w1": "K&K, wording 1",
    "h200/steps4-w1": "K&K, wording 1, 4 steps a batch",
    "h200/main-w05": "K&K, wording ½",
    "h200/main-w0": "K&K, wording 0",
    "h200/main-wide-w1": "K&K, wording 1, 8 M parameters",
    "cpu/frozenlake": "FrozenLake",
    "h200/smollm2-sums": "SmolLM2, sums",
    "cpu/sums-w16": "sums, 16 words",
    "cpu/sums-w0": "sums, no words",
}
PAIRS = [(arm, "grpo") for arm in ("grpo(passes=2)", "lopti", "ar", "tr-grpo", "nthr")] + [("lopti", "grpo(passes=2)")]


def differences(arm: str, control: str) -> dict[str, np.ndarray]:
    """By regime: an arm's accuracy less that of another, in points, over the seeds that both have."""
    found = {}
    for file in REGIMES:
        arms = {each["name"]: each["results"] for each in json.loads((RESULTS / f"{file}.json").read_text())["arms"]}
        if arm in arms and control in arms:
            seeds = [seed for seed in arms[control] if seed in arms[arm]]
            found[file] = np.array([100 * (arms[arm][seed] - arms[control][seed]) for seed in seeds])
    return found


def together(found: dict[str, np.ndarray]) -> dict[str, Any]:
    """The mean over regimes, its standard error, interval and p; their median, and random effects over regimes."""
    variances = np.array([values.var(ddof=1) / len(values) for values in found.values()]) / len(found) ** 2
    freedom = variances.sum() ** 2 / sum(v**2 / (len(d) - 1) for v, d in zip(variances, found.values(), strict=True))
    mean, error = float(np.mean([values.mean() for values in found.values()])), float(variances.sum() ** 0.5)
    reach = float(stats.t.ppf(0.975, freedom)) * error
    weighted = np.concatenate([values / len(values) for values in found.values()])  # so that their sum is that mean
    regimes = [float(values.mean()) for values in found.values()]
    return {
        "mean": mean, "error": error, "interval": [mean - reach, mean + reach], "p": p_value(weighted.tolist()),
        "median": float(np.median(regimes)), "random": random_effects([values.tolist() for values in found.values()]),
    }  # fmt: skip


def draw(path: Path) -> None:
    """Every method's differences by regime, with intervals, and their mean."""
    figure, axes = plt.subplots(figsize=(9, 6.2), layout="constrained")
    names = []
    for row, (arm, control) in enumerate(PAIRS):
        found = differences(arm, control)
        names.append(arm if control == "grpo" else f"{arm},\nagainst {control}")
        for place, (file, label) in enumerate(REGIMES.items()):
            if file in found:
                colour, marker = plt.get_cmap("tab10")(place), STYLES[place][1]
                height = row + 0.08 * (place - 4.5)
                axes.plot(interval(found[file].tolist()), [height] * 2, color=colour, linewidth=1.5)
                style = {"color": colour, "ms": 5, "label": label if row == 0 else None}
                axes.plot([found[file].mean()], [height], marker, **style)
        whole = together(found)
        style = {"color": "black", "linewidth": 3, "label": "mean over regimes" if row == 0 else None}
        axes.plot(whole["interval"], [row + 0.37] * 2, **style)
        axes.plot([whole["mean"]], [row + 0.37], "D", color="black", ms=6)
    axes.axvline(0, color="0.2", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.55)
    axes.axhline(len(names) - 1.45, color="0.6", linewidth=1, linestyle=":")
    axes.set_xlabel("held-out accuracy against GRPO, points (below the dotted line: against two plain passes)")
    axes.set_xlim(right=12.5)  # room for the legend
    axes.grid(alpha=0.25, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", loc="center right")
    figure.savefig(path, dpi=150)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for arm, control in PAIRS:
        found = differences(arm, control)
        whole = together(found)
        ends = " to ".join(f"{end:+.1f}" for end in whole["interval"])
        print(f"{arm} against {control}: {whole['mean']:+.2f} ± {whole['error']:.2f} ({ends}), p = {whole['p']:.2g}")
        print("  by regime: " + ", ".join(f"{values.mean():+.1f}" for values in found.values()))
        effects = whole["random"]
        mean, ahead = (" to ".join(f"{end:+.1f}" for end in ends) for ends in (effects.interval, effects.prediction))
        print(f"  median {whole['median']:+.1f}; with regimes as the sample {effects.mean:+.1f} ({mean})")
        print(f"  one more regime: {ahead}; I² {100 * effects.heterogeneity:.0f} %")
    draw(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
