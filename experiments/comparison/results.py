"""docs/results.md, written from raw data: python experiments/comparison/results.py.

The words are here, the figures are computed from raw.json of the miniature and from the comparisons of regimes.py. A
*share* is an arm's difference to GRPO in percent of what GRPO gained; its interval takes GRPO's gain as given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "miniature")]

import analyse  # noqa: E402
import regimes  # noqa: E402

from poise.referee.compare.random_effects import random_effects  # noqa: E402
from poise.referee.compare.sign_flip import holm, interval, p_value  # noqa: E402

OUT = HERE.parents[1] / "docs/results.md"
ARMS = {"grpo(passes=2)": "two passes", "lopti": "lopti", "ar": "ar", "tr-grpo": "", "nthr": ""}  # in the miniature
KNIGHTS = [file for file, name in regimes.REGIMES.items() if name.startswith("K&K")]
PUBLISHED = {  # 2505.12929, tables: the model before training, GRPO, and the arms
    "3B": {"before": 0.06, "grpo": 0.39, "lopti": 0.54, "ar": 0.53, "both": 0.57},
}

PAGE = """# Which method helps?

<!-- Written by experiments/comparison/results.py: change the words there. -->

**Question.** AR, Lopti, TR-GRPO and NTHR weight tokens in GRPO. Do they train better models from the same samples, or
only take more and larger optimizer steps?

**Answer, for the small models that we could train.**

- **We found no better method.** With tuned learning rates, in nine regimes (most with ten seeds), AR, TR-GRPO and NTHR
  end level with GRPO: {ar_points}, {tr_points} and {nthr_points} points on average.
  Lopti ends at {lopti_points} points. But it takes two optimizer steps where GRPO takes one, and against
  `grpo(passes=2)` it ends at {lopti_against}.
- **At one untuned rate Lopti is faster, but so are its controls.** While the curve is steep, Lopti learns
  {lopti_speed} times as fast as GRPO, AR with Lopti {both_speed}. But a random split of the same share reaches
  {random_speed}, two plain passes {passes_speed}, GRPO at 1.5 and 2 times the rate
  {faster_speed} and {twice_speed}.
- **AR gains little; we cannot explain its published gain.** AR takes no more steps than GRPO. It learns
  {ar_speed} times as fast as GRPO (p = {ar_p}), and {ar_pair} times as fast as a constant weight of the
  same mean (p = {ar_pair_p}, for three pairs {ar_pair_holm}). Its authors report a gain as large as Lopti's (3B) or
  larger (7B).

![Greedy accuracy over batches: GRPO, AR, Lopti, both, and controls](../experiments/miniature/miniature.png)

This is a *miniature* of the authors' regime: SmolLM2-135M-Instruct adds numbers up to 60, with two mini-batches per
batch, temperature 0.7, KL 0.001 and greedy evaluation. We committed the [plan](../experiments/miniature/README.md)
beforehand: nine arms, ten seeds. [Ten of the 90 runs](../experiments/miniature/README.md#result-of-the-first-part)
had to be repeated with the plan's settings. The part with tuned rates has only [two seeds per
rate](../experiments/miniature/README.md#the-second-part-so-far) so far.

## What to do

1. **Tune the learning rate first.** In the miniature, doubling the rate gains more than any method.
2. **If sampling is the bottleneck, try two passes** (`regulator="grpo(passes=2)"`) at a tuned rate. At an untuned rate
   they [ended below GRPO](../experiments/comparison/comparison.md#the-screening-before-it). Otherwise sample more
   batches: at equal FLOP these gained {longer} points more in the [one regime that we
   tried](../experiments/comparison/comparison.md#a-second-pass-or-more-batches).
3. **Test a method on your task with its controls**: `poise compare … controls=auto measure=speed`
   ([compare.md](compare.md)) names controls that may explain a gain ([how often it is
   wrong](../experiments/instrument/README.md)).
4. **Report whole curves.** The size of a lead depends on where you stop.

## Every regime

Cells show how much more than GRPO an arm gained, in percent of GRPO's gain (95 % interval over seeds,
uncorrected). × is the speed relative to GRPO.

{table}

- [The nine regimes](../experiments/comparison/comparison.md): avg@4 on at least 1,000 held-out problems. Each arm has
  the best of three rates, chosen by two seeds, often at an end of the range.
- The mean is a random-effects estimate; five regimes share a task. For two passes in a new regime it predicts
  {passes_ahead} %.
- The published runs ([2505.12929](https://arxiv.org/abs/2505.12929)) have one seed per arm, and test puzzles among the
  training puzzles; AR with Lopti gained {published_both} %.
- In four of five regimes of Knights & Knaves (K&K) our intervals end at {ar_four} % (AR) and {lopti_four} % (Lopti) at
  most; in the fifth, where one run of GRPO lost accuracy, {ar_most} and {lopti_most} %.

## Why

- **With Adam a smaller gradient does not make a smaller step.** AR, TR-GRPO and NTHR learn about as fast as [GRPO at
  the same rate](../experiments/comparison/comparison.md#which-learning-rate-is-a-method-worth).
- **Two steps are more than one.** Lopti's two phases act like GRPO at a higher rate. On sums it did not matter [which
  tokens are in which phase](../experiments/comparison/comparison.md#two-steps-or-one-of-twice-the-length).
- **Improbable tokens need not dominate.** In the one system that we measured, they have most of the gradient
  if each token is measured alone, but [largely
  cancel](../experiments/comparison/comparison.md#why-words-do-not-drown-the-digits) within a batch.

## Each method

- **Lopti** is clearly ahead of GRPO on sums with words, clearly behind with four steps per batch. At the lowest rate
  (two seeds each) it leads in {lopti_lowest} of 9 regimes, and two passes lead in {passes_lowest}.
- **AR** costs nothing, and is not clearly worse than GRPO anywhere after Holm's correction.
- **TR-GRPO** has our constants and our [place in the loss](papers.md#tr-grpo).
- **NTHR** is meant to keep right answers likely. We measured accuracy, and the probability of old right answers over
  [one training run](../experiments/comparison/comparison.md#what-becomes-of-right-answers), but not single updates.

## Limits

- We trained models of 0.9 to 8 M parameters, made for the task, and one pretrained model of 135 M, with answers of at
  most 256 tokens and 40 to 128 batches. The results say nothing about large models and long answers.
- Only the miniature resembles the published runs; TR-GRPO and NTHR are not in it.
- "Level" means that we found no difference. The regimes detect a difference of {detectable} points with 80 % power.
- Intervals exclude the uncertainty from choosing rates.
- We wrote the methods and the referee. No author has reviewed them or [our decisions](papers.md).

[Related work](papers.md#conflicting-evidence)

```bash
python experiments/comparison/results.py
```
"""


def signed(value: float, digits: int = 0) -> str:
    """A number with its sign; a rounded 0 has none."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def with_ends(mean: float, ends: tuple[float, float] | list[float], digits: int = 0) -> str:
    return f"{signed(mean, digits)} [{signed(ends[0], digits)}, {signed(ends[1], digits)}]"


def gains() -> dict[str, float]:
    """What GRPO gained in each regime, in points."""
    found = {}
    for file in regimes.REGIMES:
        arms = {arm["name"]: arm for arm in json.loads((HERE / f"{file}.json").read_text())["arms"]}
        found[file] = 100 * (float(np.mean([*arms["grpo"]["results"].values()])) - arms["grpo"]["before"])
    return found


def shares(arm: str, control: str = "grpo") -> dict[str, np.ndarray]:
    """By regime and seed: an arm's difference to another in percent of what GRPO gained."""
    gained = gains()
    return {file: 100 * points / gained[file] for file, points in regimes.differences(arm, control).items()}


def table() -> str:
    """The regimes, with the published runs and the miniature."""
    gained, by_arm = gains(), {arm: shares(arm) for arm in ARMS}
    rows = [
        ["regime", "GRPO gains", *(f"`{arm}`" for arm in ARMS)],
        ["---"] * (2 + len(ARMS)),
        *(
            [name, f"{gained[file]:.1f}", *(_cell(by_arm[arm].get(file)) for arm in ARMS)]
            for file, name in regimes.REGIMES.items()
        ),
        ["**mean over regimes**", "", *(_mean(by_arm[arm]) for arm in ARMS)],
        _miniature_row(),
        _published_row(),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---")


def _cell(values: np.ndarray | None) -> str:
    return "not run" if values is None else with_ends(float(values.mean()), interval(values.tolist()))


def _mean(by_regime: dict[str, np.ndarray]) -> str:
    effects = random_effects([values.tolist() for values in by_regime.values()])
    return with_ends(effects.mean, effects.interval)


def miniature(arm: str) -> np.ndarray:
    """By seed: an arm's accuracy at the cut less GRPO's, as a share of what GRPO gained until then."""
    runs = analyse.runs()
    base = {seed: analyse.curve(run) for seed, run in runs["grpo"].items()}
    gained = float(np.mean([each.at(analyse.CUT) - each.scores[0] for each in base.values()]))
    ahead = [analyse.curve(run).at(analyse.CUT) - base[seed].at(analyse.CUT) for seed, run in runs[arm].items()]
    return np.array(ahead) / gained


def _miniature_row() -> list[str]:
    runs = analyse.runs()
    fast = {name: analyse.factors(each) for name, each in analyse.speeds(runs).items()}
    curves = [analyse.curve(run) for run in runs["grpo"].values()]
    gained = float(np.mean([100 * (each.at(analyse.CUT) - each.scores[0]) for each in curves]))
    cells = [
        f"{_cell(100 * miniature(name))}, {fast[name].bound} {fast[name].mean:.2f} ×".replace(",  ", ", ")
        if name
        else "not run"
        for name in ARMS.values()
    ]
    return ["miniature, one rate", f"{gained:.1f}", *cells]


def _published_row() -> list[str]:
    cells = [_published("3B", arm) if arm in PUBLISHED["3B"] else "" for arm in ARMS]
    return [
        "published, K&K, 3B, one rate",
        f"{100 * (PUBLISHED['3B']['grpo'] - PUBLISHED['3B']['before']):.0f}",
        *cells,
    ]


def _published(model: str, arm: str) -> str:
    scores = PUBLISHED[model]
    return signed(100 * (scores[arm] - scores["grpo"]) / (scores["grpo"] - scores["before"]))


def figures() -> dict[str, Any]:
    """Every figure of the page, by the name that it has there."""
    points = {pair: regimes.together(regimes.differences(*pair)) for pair in regimes.PAIRS}
    texts = {pair: with_ends(found["mean"], found["interval"], 1) for pair, found in points.items()}
    speeds = analyse.speeds(analyse.runs())
    fast = {name: analyse.factors(each).text for name, each in speeds.items()}
    pairs = {one: analyse.ratios(speeds[one], speeds[other]) for one, other in analyse.PAIRS}
    arm_p = dict(zip(speeds, holm([p_value(analyse.factors(each).logs) for each in speeds.values()]), strict=True))
    pair_p = dict(zip(pairs, holm([p_value(each.logs) for each in pairs.values()]), strict=True))
    ahead = random_effects([values.tolist() for values in shares("grpo(passes=2)").values()]).prediction
    assert ahead is not None
    ends = {arm: sorted(interval(shares(arm)[file].tolist())[1] for file in KNIGHTS) for arm in ("ar", "lopti")}
    found = [json.loads((HERE / f"{file}.json").read_text()) for file in regimes.REGIMES]
    detected = sorted(100 * each["detectable"] for each in found)
    files = (("cpu/sums-w0-longer", "grpo"), ("cpu/sums-w0", "grpo(passes=2)"))
    longer, passes = (
        next(arm["results"] for arm in json.loads((HERE / f"{file}.json").read_text())["arms"] if arm["name"] == name)
        for file, name in files
    )
    more = [100 * (longer[seed] - passes[seed]) for seed in passes]
    return {
        "ar_points": texts["ar", "grpo"],
        "tr_points": texts["tr-grpo", "grpo"],
        "nthr_points": texts["nthr", "grpo"],
        "lopti_points": texts["lopti", "grpo"],
        "lopti_against": texts["lopti", "grpo(passes=2)"],
        "lopti_speed": fast["lopti"],
        "both_speed": fast["ar + lopti"],
        "random_speed": fast["random split like lopti"],
        "faster_speed": fast["grpo, 1.5 × rate"],
        "passes_speed": fast["two passes"],
        "twice_speed": fast["grpo, 2 × rate"],
        "ar_speed": fast["ar"],
        "ar_p": f"{arm_p['ar']:.3f}",
        "ar_pair": pairs["ar"].text,
        "ar_pair_p": f"{p_value(pairs['ar'].logs):.3f}",
        "ar_pair_holm": f"{pair_p['ar']:.3f}",
        "passes_ahead": f"{signed(ahead[0])} to {signed(ahead[1])}",
        "published_both": _published("3B", "both"),
        "ar_four": signed(ends["ar"][-2]),
        "ar_most": signed(ends["ar"][-1]),
        "lopti_four": signed(ends["lopti"][-2]),
        "lopti_most": signed(ends["lopti"][-1]),
        "lopti_lowest": sum(_lowest(each, "lopti") > _lowest(each, "grpo") for each in found),
        "passes_lowest": sum(_lowest(each, "grpo(passes=2)") > _lowest(each, "grpo") for each in found),
        "detectable": f"{detected[0]:.1f} to {detected[-1]:.1f}",
        "longer": with_ends(float(np.mean(more)), interval(more), 1),
        "table": table(),
    }


def _lowest(comparison: dict[str, Any], arm: str) -> float:
    """An arm's mean accuracy at the lowest rate of its tuning."""
    (tuning,) = (each for each in comparison["tuning"] if each["arm"] == arm)
    return float(min(tuning["rates"], key=lambda each: each["rate"])["mean"])


def page() -> str:
    return PAGE.format(**figures())


if __name__ == "__main__":
    OUT.write_text(page())
    print(f"{OUT}: {len([word for word in page().split() if any(map(str.isalnum, word))])} words")
