"""Tables and figure of the miniature, from raw.json: python experiments/miniature/analyse.py writes them.

The speed factor of an arm with a seed: the batch at which GRPO with the same seed reaches the accuracy that the arm has
at the cut, divided by the cut. Both curves are made monotone first; between evaluations they are straight lines.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from poise.referee.compare.sign_flip import holm, interval, p_value
from poise.referee.compare.speed import Curve, rising, speed_factor

HERE = Path(__file__).parent
CUT = 64
PLANNED = 10  # seeds
TUNING_SEEDS = 10_000  # the first of them
LAST = slice(CUT - 8, CUT)  # the batches whose sampled answers the tables describe
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
LABELS = {  # where the figure writes an arm's name: batch, accuracy; and its line
    BASELINE: (88, 60, "black", "-"),
    "grpo, 1.5 × rate": (71, 75, "tab:orange", "--"),
    "grpo, 2 × rate": (71, 91, "tab:red", "--"),
    "two passes": (71, 95, "tab:brown", "--"),
    "lopti": (71, 83, "tab:blue", "-"),
    "random split like lopti": (71, 79, "tab:cyan", "--"),
    "ar": (71, 43, "tab:green", "-"),
    "constant like ar": (71, 39, "yellowgreen", "--"),
    "ar + lopti": (71, 87, "tab:purple", "-"),
}
Runs = dict[str, dict[int, dict[str, Any]]]  # by arm and seed


class Factors(NamedTuple):
    """Speed factors, or ratios of them, over seeds."""

    values: list[float]
    bound: str = ""  # "≥" or "≤" if some are only bounds: GRPO never reaches the accuracy of an arm

    @property
    def logs(self) -> list[float]:
        """Their logarithms, which are averaged and tested."""
        return [log(value) for value in self.values]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return exp(float(np.mean(self.logs)))

    @property
    def text(self) -> str:
        """Mean and 95 % interval; an end that is only a bound is open."""
        low, high = (f"{exp(end):.2f}" for end in interval(self.logs))
        ends = {"": f"[{low}, {high}]", "≥": f"[{low}, –]", "≤": f"[–, {high}]"}[self.bound]
        return f"{self.bound} {self.mean:.2f} {ends}".strip()


def curve(run: dict[str, Any]) -> Curve:
    """A run's greedy accuracy, made monotone."""
    return rising((int(step), value) for step, value in run["greedy"].items())


def runs() -> Runs:
    """The runs of each arm with the seeds that GRPO and at least one other arm have."""
    found: Runs = defaultdict(dict)
    for run in json.loads((HERE / "raw.json").read_text()).values():
        if name := ARMS.get((run["regulator"], run["lr"])):
            found[name][run["seed"]] = run
    seeds = found[BASELINE].keys() & {seed for name, each in found.items() if name != BASELINE for seed in each}
    return {name: {seed: found[name][seed] for seed in sorted(seeds & found[name].keys())} for name in ARMS.values()}


def speeds(arms: Runs) -> dict[str, dict[int, tuple[float, bool]]]:
    """The speed factors of each arm, by seed, each with whether it is a lower bound."""
    base = {seed: curve(run) for seed, run in arms[BASELINE].items()}
    found: dict[str, dict[int, tuple[float, bool]]] = defaultdict(dict)
    for name, seeds in arms.items():
        for seed, run in seeds.items() if name != BASELINE else ():
            reached = curve(run).at(CUT)
            found[name][seed] = speed_factor(reached, CUT, base[seed]), reached > base[seed].scores[-1]
    return found


def factors(of: dict[int, tuple[float, bool]]) -> Factors:
    """An arm's speed factors."""
    return Factors([value for value, _ in of.values()], "≥" if any(beyond for _, beyond in of.values()) else "")


def ratios(one: dict[int, tuple[float, bool]], other: dict[int, tuple[float, bool]]) -> Factors:
    """The speed of one arm in units of another one's, by seed."""
    both = sorted(one.keys() & other.keys())
    assert not any(one[seed][1] for seed in both)  # a ratio of two bounds says nothing
    return Factors([one[seed][0] / other[seed][0] for seed in both], "≤" if any(other[s][1] for s in both) else "")


def tables() -> str:
    """The tables of the page, in Markdown."""
    arms = runs()
    fast = speeds(arms)
    assert all(len(seeds) == PLANNED for seeds in arms.values()), "the plan's tests need all planned seeds"
    tested = dict(zip(fast, holm([p_value(factors(each).logs) for each in fast.values()]), strict=True))
    lines = [
        f"| arm | seeds | greedy at batch {CUT} | speed factor | p (Holm) | sampled answers cut off | their length |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seeds in arms.items():
        at_cut = np.mean([100 * curve(run).at(CUT) for run in seeds.values()])
        cut_off = 100 - np.mean([100 * np.mean(run["steps"]["rollout/finished"][LAST]) for run in seeds.values()])
        length = np.mean([np.mean(run["steps"]["rollout/length"][LAST]) for run in seeds.values()])
        factor = "1" if name == BASELINE else factors(fast[name]).text
        p = f"{tested[name]:.3f} " if name in tested else ""
        lines.append(f"| {name} | {len(seeds)} | {at_cut:.1f} % | {factor} | {p}| {cut_off:.1f} % | {length:.0f} |")
    lines += ["", "| pair | seeds | ratio of speeds | p |", "|---|---|---|---|"]
    for one, other in PAIRS:
        pair = ratios(fast[one], fast[other])
        lines.append(f"| {one} / {other} | {len(pair.values)} | {pair.text} | {p_value(pair.logs):.3f} |")
    return "\n".join(lines)


def tuning() -> str:
    """The table of the second part's tuning runs, in Markdown."""
    found: dict[tuple[str, float], list[float]] = defaultdict(list)
    for run in json.loads((HERE / "tuned.json").read_text()).values():
        if run["seed"] >= TUNING_SEEDS:
            found[run["regulator"], run["lr"]].append(run["greedy"][str(CUT)])
    rates = sorted({rate for _, rate in found})
    lines = ["| arm | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---|" + "---|" * len(rates)]
    for regulator in ("grpo", "grpo(passes=2)", "lopti(threshold=0.4)", "ar(alpha=0.2)"):
        means = [100 * float(np.mean(found[regulator, rate])) for rate in rates]
        cells = [f"**{mean:.1f} %**" if mean == max(means) else f"{mean:.1f} %" for mean in means]
        lines.append(f"| {ARMS[regulator, 1.5e-6]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with these tables."""
    for name, table in (("tables", tables()), ("tuning", tuning())):
        between = rf"(?s)(<!-- {name}:[^\n]*\n).*?(<!-- end -->)"
        plain = table.replace("\\", r"\\")  # no escapes of a replacement
        page = re.sub(between, rf"\g<1>{plain}\n\g<2>", page)
    return page


def picture(path: Path) -> None:
    """The mean curve of every arm, with its accuracy and speed at the cut."""
    arms = runs()
    fast = speeds(arms)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, each in arms.items():
        x, y, colour, line = LABELS[name]
        curves = [curve(run) for run in each.values()]
        steps, scores = curves[0].steps, 100 * np.mean([one.scores for one in curves], 0)
        axes.plot(steps, scores, line, color=colour, linewidth=2.2 if line == "-" else 1.5)
        at_cut = scores[steps == CUT][0]
        speed = " at the cut"
        if name in fast:
            speed = f", {factors(fast[name]).bound} {factors(fast[name]).mean:.2f} × as fast".replace(",  ", ", ")
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkB": 1, "relpos": (0, 0.5)}
        axes.annotate(
            f"{name}: {at_cut:.0f} %{speed}",
            (CUT, at_cut),
            (x, y),
            color=colour,
            va="center",
            arrowprops=arrow if name in fast else None,
        )
    axes.axvline(CUT, color="0.4", linestyle=":", linewidth=1)
    axes.text(CUT - 1, 97, f"cut: batch {CUT}", color="0.3", ha="right", va="center")
    axes.text(1, 91, "solid: GRPO and methods\ndashed: controls", color="0.3", va="top")
    axes.set_xlim(0, 130)
    axes.set_ylim(15, 99)
    axes.set_xlabel("batches of 32 × 8 answers; only GRPO runs beyond the cut")
    axes.set_ylabel("greedy accuracy on 1,000 held-out sums, %")
    axes.set_title(f"SmolLM2-135M-Instruct, one rate that nobody tuned, means over {PLANNED} seeds", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    readme = HERE / "README.md"
    readme.write_text(written(readme.read_text()))
    print(tables())
    picture(HERE / "miniature.png")
