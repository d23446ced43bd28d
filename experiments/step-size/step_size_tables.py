"""Tables and figure of the study: python experiments/step-size/step_size_tables.py [FOLDER …] writes them.

They come from raw.json, to which the runs in folders of step_size.py (tune, test, explore) are added first. An arm is a
control and the learning rate it starts from. Its speed factor with a seed is that of ``poise compare``: the batches
after which the baseline has the arm's greedy accuracy at the cut, over the cut. At equal FLOP it is divided by the
arm's FLOP a batch in units of the baseline's. The baseline is GRPO at the tuned rate; in the transfer at the best of
the planned rates.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from poise.referee.compare.sign_flip import interval
from poise.referee.compare.speed import Curve, rising, speed_factor

HERE = Path(__file__).parent
CUT = 32
RATE = 2.5e-5  # of the tuning
REGIMES = {"sums": "sums, tuned here", "lora": "LoRA, rank 8", "words": "4 words, smaller model"}
Arm = tuple[str, float]  # its name and starting rate
Runs = dict[Arm, dict[int, dict[str, Any]]]  # by seed


def collect(folders: list[str]) -> None:
    """Add the finished runs in these folders to raw.json."""
    place = HERE / "raw.json"
    raw = json.loads(place.read_text()) if place.exists() else {}
    for file in sorted(file for folder in folders for file in Path(folder).glob("*.json")):
        if text := file.read_text():
            raw[file.stem] = json.loads(text) | {"part": file.parent.name}
    place.write_text(json.dumps(raw, sort_keys=True).replace('}, "', '},\n"') + "\n")


def runs(regime: str) -> Runs:
    """The runs of the test, with the seeds that all arms of the regime have."""
    found: Runs = defaultdict(dict)
    for run in json.loads((HERE / "raw.json").read_text()).values():
        if run["regime"] == regime and run["part"] != "tune":
            found[run["arm"], run["lr"]][run["seed"]] = run
    seeds = set.intersection(*(set(each) for each in found.values())) if found else set()
    return {arm: {seed: found[arm][seed] for seed in sorted(seeds)} for arm in sorted(found)}


def curve(run: dict[str, Any]) -> Curve:
    """A run's greedy accuracy, made monotone."""
    return rising((int(step), value) for step, value in run["greedy"].items())


def at_cut(seeds: dict[int, dict[str, Any]]) -> list[float]:
    """The greedy accuracy of each run at the cut, in points, made monotone."""
    return [100 * curve(run).at(CUT) for run in seeds.values()]


def baseline(regime: str, arms: Runs) -> Arm:
    """GRPO at the tuned rate, or in the transfer at the rate with the highest greedy accuracy at the cut."""
    if regime == "sums":
        return "grpo", RATE
    return max(
        (arm for arm in arms if arm[0] == "grpo" and not exploratory(arms[arm])),
        key=lambda arm: float(np.mean(at_cut(arms[arm]))),
    )


def exploratory(seeds: dict[int, dict[str, Any]]) -> bool:
    """Whether an arm was added after a look."""
    return any(run["part"] == "explore" for run in seeds.values())


def flop(run: dict[str, Any]) -> float:
    """FLOP a batch, per parameter."""
    return float(run["flop"]) / len(run["rate"])


def speeds(arm: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> tuple[list[float], list[float], bool]:
    """Speed factors at equal samples and at equal FLOP, by seed; whether any is only a lower bound."""
    samples, equal_flop, bound = [], [], False
    for seed, run in arm.items():
        reached, reference = curve(run).at(CUT), curve(base[seed])
        samples.append(speed_factor(reached, CUT, reference))
        equal_flop.append(samples[-1] * flop(base[seed]) / flop(run))
        bound |= reached > reference.scores[-1]
    return samples, equal_flop, bound


def text(factors: list[float], bound: bool) -> str:
    """The geometric mean of factors, with its 95 % interval; an end that is only a bound is open."""
    logs = [log(factor) for factor in factors]
    low, high = (f"{exp(end):.2f}" for end in interval(logs))
    return f"{'≥ ' if bound else ''}{exp(float(np.mean(logs))):.2f} [{low}, {'–' if bound else high}]"


def middle(seeds: dict[int, dict[str, Any]], name: str) -> float:
    """The geometric mean of what the steps from 9 to the cut measured, over seeds."""
    return exp(float(np.mean([log(value) for run in seeds.values() for value in run[name][8:CUT]])))


def table(regime: str) -> str:
    """The table of one regime, in Markdown."""
    arms = runs(regime)
    base = baseline(regime, arms)
    lines = [
        f"| {REGIMES[regime]} | starting rate | greedy | speed factor | at equal FLOP | rate, steps 9–32 | drift |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, seeds in arms.items():
        samples, equal_flop, bound = speeds(seeds, arms[base])
        speed = ["1", "1"] if arm == base else [text(samples, bound), text(equal_flop, bound)]
        about = [f"{middle(seeds, name):.2g}" for name in ("rate", "drift_response")]
        lines.append(
            "| "
            + " | ".join(
                [arm[0] + " †" * exploratory(seeds), f"{arm[1]:.3g}", f"{np.mean(at_cut(seeds)):.1f} %", *speed, *about]
            )
            + " |"
        )
    return "\n".join(lines)


def tables() -> str:
    """All tables of the page."""
    return "\n\n".join(table(regime) for regime in REGIMES if runs(regime))


def written(page: str) -> str:
    """The page with these tables."""
    between = r"(?s)(<!-- tables[^\n]*\n).*?(<!-- end -->)"
    return re.sub(between, lambda found: f"{found[1]}{tables()}\n{found[2]}", page)


def picture(path: Path) -> None:
    """Greedy accuracy at the cut over the starting rate, for each regime."""
    shown = [regime for regime in REGIMES if runs(regime)]
    figure = Figure(figsize=(4 * len(shown), 3.8), layout="constrained")
    styles = {
        "grpo": ("o-", "black"),
        "rate": ("s--", "tab:blue"),
        "rescale": ("D", "tab:orange"),
        "passes": ("^", "tab:green"),
    }
    for axes, regime in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        arms = runs(regime)
        for name, (style, colour) in styles.items():
            points = [(rate, at_cut(seeds)) for (each, rate), seeds in arms.items() if each == name]
            if points:
                rates, values = zip(*points, strict=True)
                axes.plot(rates, np.mean(values, 1), style, color=colour, label=name)
                for rate, each in points:
                    axes.plot([rate] * 2, interval(each), "-", color=colour, linewidth=1)
        axes.axhline(np.mean(at_cut(arms[baseline(regime, arms)])), color="0.6", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        ticks = sorted({rate for _, rate in arms})
        axes.set_xticks(ticks, [f"{rate:.2g}" for rate in ticks])
        axes.minorticks_off()
        axes.set_xlabel("starting rate")
        axes.set_title(REGIMES[regime], fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"greedy accuracy after {CUT} batches, %")
    figure.axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:]:
        collect(sys.argv[1:])
    readme = HERE / "README.md"
    readme.write_text(written(readme.read_text()))
    print(tables())
    picture(HERE / "step-size.png")
