"""The tables of docs/results/comparison.md are those of the figures that are beside it."""

from __future__ import annotations

import importlib
from itertools import pairwise
from statistics import fmean
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from poise.comparison.arms import shown_rate
from poise.comparison.sign_flip import interval, p_value
from poise.comparison.statistics import student_interval
from support.pages import ROOT
from support.results import figures, row, words_of


def test_signal_of_the_comparison() -> None:
    text = words_of("comparison")
    found, sided = (
        [figures(f"signal-{kind}-{name}") for name in names]
        for kind, names in (("kk", ("w0", "w05", "w1")), ("sided", ("w0", "w1")))
    )
    kinds: list[dict[str, dict[str, float]]] = [each["kinds"] for each in found]
    low = [[each["p 0.00-0.05"], each["p 0.05-0.25"]] for each in kinds]
    tokens = [sum(part["tokens"] for part in parts) for parts in low]
    shares = [(sum(p["signal"] for p in parts), np.hypot(*(p["error"] for p in parts))) for parts in low]
    whole = [f"{100 * each['signal']:.1f} % ± {100 * each['error']:.1f}" for each in found]
    assert row(["signal, share of ‖g‖²", *whole]) in text
    assert row(["p < 0.25: share of tokens", *(f"{100 * share:.1f} %" for share in tokens)]) in text
    assert row(["p < 0.25: share of signal", *(f"{100 * s:.0f} % ± {100 * e:.0f}" for s, e in shares)]) in text
    for side in ("wrong", "right"):
        parts = [each[f"p 0.00-0.05, {side}"] for each in kinds]
        cells = [f"{100 * p['size']:.0f} %, {100 * p['signal']:.0f} % ± {100 * p['error']:.0f}" for p in parts]
        assert row([f"p < 0.05 in {side} responses: size, signal", *cells]) in text
    for name, words in (
        ("ar", "`ar` (α = 0.2)"), ("ar(alpha=1.0)", "`ar(alpha=1.0)`"), ("tr-grpo", "`tr-grpo`"), ("nthr", "`nthr`"),
        ("amplify", "`amplify`"),
    ):  # fmt: skip
        assert row([f"gain of {words}", *(f"{efficient(each, name):.2f}" for each in found)]) in text
    blame = [f"{efficient(each, 'oracles.sided(right=False)'):.1f}" for each in sided]
    assert row(["gain of `blame`", blame[0], "", blame[1]]) in text
    for way, words in (
        ("probability", "fitted weights by probability: gain"), ("word", "… by what the word is for"),
        ("probability and sign", "… by probability and sign"),
    ):  # fmt: skip
        best = [each["best"][way] for each in found]
        cells = [f"{each['gain']:.1f} ({', '.join(f'{half:.1f}' for half in each['halves'])})" for each in best]
        assert row([words, *cells]) in text


def efficient(found: dict[str, Any], method: str) -> float:
    """The efficiency of a method's update, divided by GRPO's."""
    return float(found["methods"][method]["efficiency"] / found["methods"]["grpo"]["efficiency"])


def test_screening() -> None:
    """Accuracies of the screening, and differences with Student's interval."""
    text = words_of("comparison")
    for corner in ("w0", "w1"):
        arms = {arm["name"]: arm["results"] for arm in figures(f"screening-{corner}")["arms"]}
        for results in arms.values():
            found = [value - arms["grpo"][seed] for seed, value in results.items()]
            if len(found) > 2 and results is not arms["grpo"]:
                ends = student_interval(found)
                assert ends is not None
                assert f"{fmean(results.values()):.3f}, {fmean(found):+.3f} [{ends[0]:+.3f}, {ends[1]:+.3f}]" in text


def points(value: float) -> str:
    """In points, as the tables show it."""
    shown = f"{100 * value:+.1f}"
    return "0.0" if shown in ("+0.0", "-0.0") else shown


def against(difference: dict[str, Any]) -> str:
    low, high = difference["interval"]
    return f"{points(difference['mean'])} [{points(low)}, {points(high)}]"


def rates(found: list[dict[str, Any]]) -> dict[str, str]:
    """The learning rate of each arm, as it is typed."""
    return {arm["name"]: shown_rate(arm["settings"]["optim.lr"]) for arm in found}


REGIMES = ["steps4-w1", "main-w05", "main-w0", "main-wide-w1", "frozenlake", "smollm2-sums", "sums-w16", "sums-w0"]
SHOWN = {  # names that a table cannot hold
    "ar(alpha=0.3) | lopti(threshold=0.5)": "`ar` and `lopti`",
    "benchmarks.oracles.digits(model='runs/models/sums-w16')": "oracle: digits alone",
}


@pytest.mark.parametrize("regime", REGIMES)
def test_a_regime(regime: str) -> None:
    text, arms = words_of("comparison"), figures(regime)["arms"]
    for arm in arms:
        difference, scores, cost = arm["difference"], arm["scores"], arm["cost"]
        seeds = [str(len(arm["seeds"]))] if regime == "smollm2-sums" else []  # where arms have not all of them
        shown = SHOWN.get(arm["name"], f"`{arm['name']}`")
        cells = [shown, rates(arms)[arm["name"]], *seeds, f"{100 * arm['accuracy']:.1f}"]
        cells += [against(difference), f"{difference['p_adjusted']:.2g}"] if difference else ["", ""]
        cells += [f"{100 * scores[name]['mean']:.1f}" for name in ("pass@4", "greedy")]
        cells += [f"{cost['optimizer_steps']:.0f}", f"{cost['flop']:.1e}".replace("e+", "e")]
        assert row(cells) in text
    pair, *others = figures(regime)["matched"]
    assert all(against(other) in text for other in others)
    digits = 2 if pair["p"] > 0.1 else 3
    assert f"{against(pair).replace(' [', ' points [')}, p = {pair['p']:.{digits}f}" in text


def test_displacement() -> None:
    text, found, arms = words_of("comparison"), figures("displacement-steps4-w1"), figures("steps4-w1")["arms"]
    for name in found["right"]:
        cells = [f"`{name}`", rates(arms)[name]]
        for kind in ("right", "wrong"):
            change, fell = (found[kind][name][what]["mean"] for what in ("change", "fell"))
            cells += [f"{change:.1f}", f"{100 * fell:.0f} %"]
        assert row(cells) in text


def test_gains_with_errors() -> None:
    words = words_of("comparison")
    every = [figures(f"signal-kk-{wording}-errors")["methods"] for wording in ("w0", "w1")]
    for method in ("ar", "ar(alpha=1.0)", "tr-grpo", "nthr", "blame"):
        gains = [found[method]["efficiency"] / found["grpo"]["efficiency"] for found in every]
        errors = [found[method]["gain_error"] for found in every]
        cells = [f"{gain:.2f} ± {error:.2f}" for gain, error in zip(gains, errors, strict=True)]
        assert row(["`ar` (α = 0.2)" if method == "ar" else f"`{method}`", *cells]) in words


def test_deciding_shares() -> None:
    words = words_of("comparison")
    every = [figures(f"deciding-kk-{wording}")["methods"] for wording in ("w0", "w05", "w1")]
    for method in every[0]:
        name = "`ar` (α = 0.2)" if method == "ar" else f"`{method}`"
        cells = [f"{found[method]['share']:.1%} ({found[method]['ratio']:.3f})" for found in every]
        if method == "grpo":
            cells = [cell.split(" ")[0] for cell in cells]
        assert row([name, *cells]).replace("%", " %") in words
    assert max(found[method]["ratio_error"] for found in every for method in found) <= 0.0075
    published = [found[method]["ratio"] for found in every for method in ("ar", "tr-grpo", "nthr")]
    assert max(abs(ratio - 1) for ratio in published) < 0.03


def test_words_and_digits() -> None:
    """Shares of the gradient on sums: of the tokens' sizes, and of what is left after the batch is summed."""
    words, shares = words_of("comparison"), figures("deciding-sums")
    methods = shares["methods"]
    digits = methods["grpo"]["share"]
    tokens = shares["tokens"]
    assert row(["share of tokens", f"{1 - tokens:.0%}", f"{tokens:.0%}"]).replace("%", " %") in words
    cells = [f"{1 - digits:.1%}", f"{digits:.1%}"]
    assert row(["sum of the sizes of their gradients, at the logits", *cells]).replace("%", " %") in words
    assert (
        f"from {digits:.1%} to {methods['ar(alpha=1.0)']['share']:.1%}".replace("%", "", 1).replace("%", " %") in words
    )
    assert f"TR-GRPO raises it to {methods['tr-grpo']['share']:.1%}".replace("%", " %") in words
    sizes = figures("signal-sums")["methods"]
    oracle = "oracles.digits(model='runs/models/sums-w16'"
    alone, without = sizes[f"{oracle})"], sizes[f"{oracle}, rest=1.0, digit=0.0)"]
    cells = [f"{without['norm']:.2f}", f"{alone['norm']:.2f}"]
    assert row(["size of their summed gradient, beside that of all tokens", *cells]) in words
    assert f"points only {alone['efficiency'] / sizes['grpo']['efficiency']:.2f} times as well" in words


def test_update_sizes() -> None:
    words = words_of("comparison")
    compared = 0
    for found in figures("update-size-steps4-w1")["rows"]:
        if found["arm"] not in {"ar", "tr-grpo", "nthr"}:
            continue
        rate = shown_rate(found["rate"])
        sizes = found["beside"]["grad_norm"], found["beside"]["drift"]
        ends = [
            f" [{size['interval'][0]:.2f}, {size['interval'][1]:.2f}]" if size["interval"] else "" for size in sizes
        ]
        ratios = [f"{size['mean']:.2f}{end}" for size, end in zip(sizes, ends, strict=True)]
        assert row([f"`{found['arm']}`", rate, str(len(sizes[0]["seeds"])), *ratios]) in words
        compared += 1
    assert compared == 9


@pytest.fixture
def regimes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("regimes")


def test_regimes(regimes: ModuleType) -> None:
    """The table of all regimes; its first row is as printed (see the page)."""
    text = words_of("comparison")
    for name, words in (
        ("steps4-w1", "the same, four steps a batch | 10"), ("main-w05", "`wording` ½ | 10"),
        ("main-w0", "`wording` 0 | 10"), ("main-wide-w1", "`wording` 1, 8 M parameters | 10"),
        ("frozenlake", "FrozenLake | 8"), ("smollm2-sums", "SmolLM2 on sums | 7–8"),
        ("sums-w16", "sums, 16 words | 10"), ("sums-w0", "sums, no words | 10"),
    ):  # fmt: skip
        arms = {arm["name"]: arm for arm in figures(name)["arms"]}
        shown = [f"{100 * arms['grpo']['before']:.1f} → {100 * arms['grpo']['accuracy']:.1f}"]
        for arm, control in regimes.PAIRS:
            if control == "grpo":
                shown.append(against(arms[arm]["difference"]) if arm in arms else "not run")
        assert f"{words} {row(shown)}" in text
    found = [regimes.together(regimes.differences(*pair)) for pair in regimes.PAIRS]
    means = [against({"mean": each["mean"] / 100, "interval": np.array(each["interval"]) / 100}) for each in found]
    assert row(["**mean over regimes**", "", "", *means[:-1]]) in text
    last, first = found[-1], found[0]
    assert max(last["p"], first["p"]) < 0.001
    low, high = (points(end / 100) for end in last["interval"])
    assert f"{-last['mean']:.1f} points below two plain ones ([{low}, {high}], p < 0.001)" in text
    low, high = (points(end / 100) for end in first["interval"])
    assert f"end {first['mean']:.1f} points above GRPO ([{low}, {high}], p < 0.001)" in text
    over = ["[{:+.2f}, {:+.2f}]".format(*each["over_regimes"]) for each in (first, last)]
    assert f"the intervals are {over[0]} for the second pass, and {over[1]} for `lopti` against it" in text
    assert f"with regimes as the sample the interval is {over[0]}" in text
    gains = [values.mean() for values in regimes.differences(*regimes.PAIRS[0]).values()]
    assert (sum(gain < 1.05 for gain in gains), sum(gain < 0 for gain in gains), len(gains)) == (5, 2, 9)
    assert "five of nine gain 1.0 points or less, two of them less than 0" in text
    recipes = {"ar": 2, "lopti": 1, "tr-grpo": 3, "nthr": 4}
    for name, place in recipes.items():
        words = " ".join((ROOT / f"recipes/{name}.yaml").read_text().replace("#", " ").split())
        mean, ends = means[place].split(" ", 1)
        assert f"{mean} points {ends} against GRPO" in words


def test_a_mean_over_regimes(regimes: ModuleType) -> None:
    """Each regime counts once, whatever its number of seeds."""
    found = regimes.together({"a": np.array([1.0, 2.0, 3.0]), "b": np.array([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0])})
    assert found["mean"] == pytest.approx(1.0)
    variances = [1.0 / 3, 0.4 / 6]
    assert found["error"] == pytest.approx(sum(variances) ** 0.5 / 2)
    assert sum(found["interval"]) == pytest.approx(2.0)


def test_effective_rates() -> None:
    """Factors at the two lower rates; a star where an arm is slower or faster than GRPO at any rate."""
    text = words_of("comparison")
    runs = [figures(f"effective-{name}") for name in ("w0", "w05", "smollm2")]
    for arm in ("grpo(passes=2)", "lopti", "ar", "tr-grpo", "nthr"):
        cells = [f"`{arm}`"]
        for found in runs:
            plain = [each["score"] for each in found["rows"] if each["arm"] == "grpo"]
            rows = {each["rate"]: each for each in found["rows"] if each["arm"] == arm}
            for rate in sorted(found["rates"])[:2]:
                inside = min(plain) <= rows[rate]["score"] <= max(plain)
                cells.append(f"{rows[rate]['factor']:.2f}" + "*" * (not inside))
        assert row(cells) in text


def test_two_steps_or_one() -> None:
    """Mean accuracies in training on sums, and differences that the page names, paired by seed."""
    text, found = words_of("comparison"), figures("effective-sums")
    assert len(found["seeds"]) == 6
    rows = {(each["arm"], each["rate"]): each for each in found["rows"]}
    imitation = "grpo, betas=(0.81, 0.998)"
    shown = {imitation: "`grpo`, β = (0.81, 0.998)"}
    for (arm, rate), each in rows.items():
        assert row([shown.get(arm, f"`{arm}`"), shown_rate(rate), f"{100 * each['score']:.1f}"]) in text

    def ahead(arm: str, rate: float, other: str, its: float) -> tuple[str, str]:
        pairs = zip(rows[arm, rate]["scores"], rows[other, its]["scores"], strict=True)
        differences = [own - beside for own, beside in pairs]
        low, high = interval(differences)
        return f"{100 * fmean(differences):.1f}", f"[{points(low)}, {points(high)}]"

    two = "grpo(passes=2)"
    for mean, ends, words in (
        (*ahead("lopti", 2.5e-5, "grpo", 3.5e-5), "it is {} points ahead {}"),
        (*ahead("random-split", 2.5e-5, "grpo", 3.5e-5), "a split at random {} {}"),
        (*ahead(two, 2.5e-5, "grpo", 5e-5), "`grpo(passes=2)` is {} points {} ahead of `grpo` at twice the rate"),
        (*ahead("lopti", 2.5e-5, "random-split", 2.5e-5), "`lopti` against `random-split`: {} points {}"),
        (*ahead(imitation, 5e-5, "grpo", 5e-5), "at 5e-5 is {} points {} ahead of GRPO at that rate"),
        (*ahead(two, 2.5e-5, imitation, 5e-5), "{} {} behind `grpo(passes=2)` at 2.5e-5"),
        (*ahead(two, 5e-5, imitation, 1e-4), "`grpo(passes=2)` is {} points {} ahead of the one step"),
    ):
        assert words.format(mean, ends) in text
    predicted = figures("steps-sums")["methods"]
    assert f"{predicted['lopti']['factor']:.2f} for Lopti and {predicted['random-split']['factor']:.2f} for" in text


def test_settings_of_the_methods() -> None:
    """Accuracies and differences with Student's intervals, over the four seeds that all arms have."""
    text = words_of("comparison")
    arms = {arm["name"]: arm["results"] for arm in figures("sums-settings")["arms"]}
    seeds = sorted(set.intersection(*map(set, arms.values())))
    assert seeds == ["0", "1", "2", "3"]

    def beside(arm: str, other: str) -> str:
        found = [arms[arm][seed] - arms[other][seed] for seed in seeds]
        return against({"mean": fmean(found), "interval": student_interval(found)})

    steep = "tr-grpo(alpha=4, mu=0.5, low=0, high=1.52)"
    for arm in arms:
        shown = "`tr-grpo` from 0 to 1.52 (α = 4, μ = 0.5)" if arm == steep else f"`{arm}`"
        default, _, more = arm.partition("(")
        cells = [shown, f"{100 * fmean(arms[arm][seed] for seed in seeds):.1f}"]
        cells += [beside(arm, "grpo") if arm != "grpo" else "", beside(arm, default) if more else ""]
        assert row(cells) in text


def test_more_batches() -> None:
    """GRPO over more batches beside two passes over fewer, with as many FLOP, paired by seed."""
    text = words_of("comparison")
    few, many = ({arm["name"]: arm for arm in figures(name)["arms"]} for name in ("sums-w0", "sums-w0-longer"))
    for batches, arms in ((60, few), (104, many)):
        for name in ("grpo", "grpo(passes=2)"):
            cost, greedy = arms[name]["cost"], arms[name]["scores"]["greedy"]["mean"]
            cells = [f"`{name}`", str(batches), f"{100 * arms[name]['accuracy']:.1f}", f"{100 * greedy:.1f}"]
            cells += [f"{cost['optimizer_steps']:.0f}", f"{cost['flop']:.1e}".replace("e+", "e")]
            assert row(cells) in text

    def ahead(arm: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
        found = [value - other["results"][seed] for seed, value in arm["results"].items()]
        shown = against({"mean": fmean(found), "interval": interval(found)}).removeprefix("+")
        return shown.replace(" [", " points [", 1), f"(p = {p_value(found):.3f})"

    gain, p = ahead(many["grpo"], few["grpo(passes=2)"])
    assert f"ends {gain} above two passes over 60 {p[:-1]}, nine seeds of ten)" in text
    assert f"spent on more batches gained {gain.split()[0]} points more" in text
    gain, p = ahead(many["grpo(passes=2)"], many["grpo"])
    assert f"{gain} higher over 104 batches {p[:-1]}, not planned)" in text
    greedily = many["grpo"]["scores"]["greedy"]["mean"] - few["grpo(passes=2)"]["scores"]["greedy"]["mean"]
    assert f"{100 * greedily:.1f} points above them greedily" in text


def test_lopti_in_tuning() -> None:
    """At equal rates, with the tuning seeds: Lopti against GRPO, and against two plain steps."""
    text = words_of("comparison")
    ahead, behind = [], []
    for name in ("main-w1", *REGIMES):
        arms = {arm["arm"]: [rate["mean"] for rate in arm["rates"]] for arm in figures(name)["tuning"]}
        ahead.append([own > plain for own, plain in zip(arms["lopti"], arms["grpo"], strict=True)])
        behind += [own < two for own, two in zip(arms["lopti"], arms["grpo(passes=2)"], strict=True)]
    assert all(first for first, *_ in ahead)
    assert "at the lowest rate Lopti was ahead of GRPO in all nine regimes" in text
    others = [each for _, *rest in ahead for each in rest]
    assert (sum(others), len(others)) == (10, 18)
    assert "at higher ones in ten cases of eighteen" in text
    assert f"`lopti` was lower in {sum(behind)} of {len(behind)} cases" in text


def regulated(name: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The curves of RLTR or ERL by arm and seed, up to the last step that all runs have; the start is the same."""
    arms = figures("regulated")["systems"][name]["arms"]
    ends = min(run["curve"][-1]["step"] for runs in arms.values() for run in runs.values())
    curves = {
        arm: {seed: [point for point in run["curve"] if point["step"] <= ends] for seed, run in runs.items()}
        for arm, runs in arms.items()
    }
    assert len({curve[0]["accuracy"] for runs in curves.values() for curve in runs.values()}) == 1
    return curves


def height(curve: list[dict[str, Any]]) -> float:
    """The mean accuracy over the steps of a curve."""
    parts = [(b["step"] - a["step"]) * (a["accuracy"] + b["accuracy"]) / 2 for a, b in pairwise(curve)]
    return sum(parts) / curve[-1]["step"]


@pytest.mark.parametrize("name", ["RLTR", "ERL"])
def test_rltr_and_erl_with_regulators(name: str) -> None:
    text = words_of("comparison")
    for arm, runs in regulated(name).items():
        ends = [curve[-1] for curve in runs.values()]
        greedy = [100 * fmean(curve[end]["greedy"] for curve in runs.values()) for end in (0, -1)]
        cells = [name, f"`{arm}`", f"{ends[0]['step']}", f"{100 * runs['0'][0]['accuracy']:.1f}"]
        cells += [f"{100 * fmean(end['accuracy'] for end in ends):.1f}"]
        cells += [", ".join(f"{100 * end['accuracy']:.1f}" for end in ends)]
        cells += [f"{100 * fmean(map(height, runs.values())):.1f}", " → ".join(f"{score:.1f}" for score in greedy)]
        cells += [f"{fmean(end['tokens'] for end in ends):,.0f}"]
        assert row([*cells, f"{fmean(end['optimizer_steps'] for end in ends):.0f}"]) in text


def test_regulators_of_rltr() -> None:
    """What the page says of RLTR's curves."""
    text, arms = words_of("comparison"), regulated("RLTR")
    above = [
        [mine["accuracy"] - own["accuracy"] for mine, own in zip(curve, arms[other][seed], strict=True)][1:]
        for other in ("grpo", "ar") for seed, curve in arms["lopti"].items()
    ]  # fmt: skip
    assert all(difference > 0 for differences in above for difference in differences)
    ends = [100 * differences[-1] for differences in above[:3]]
    assert f"by {min(ends):.1f} to {max(ends):.1f} points over `grpo` at the end" in text
    shown = {
        arm: f"{fmean(curve[-1]['metrics']['rollout/entropy'] for curve in runs.values()):.3f}"
        for arm, runs in arms.items()
    }
    assert shown["grpo"] == shown["ar"]
    surer = f"{shown['lopti']} with `lopti`, {shown['grpo(passes=2)']} with `grpo(passes=2)`"
    assert f"{shown['grpo']} nats with `grpo` and `ar`, {surer}" in text
    control = [
        [100 * (plain["accuracy"] - mine["accuracy"]) for plain, mine in zip(curve, arms["lopti"][seed], strict=True)]
        for seed, curve in arms["grpo(passes=2)"].items()
    ]
    early = [difference for differences in control for difference in differences[1:-1]]
    assert f"by {min(early):.1f} to {max(early):.1f} points; after 30" in text
    below, first, second = sorted(differences[-1] for differences in control)
    assert f"with two seeds ({first:+.1f} and {second:+.1f}) and below with one ({below:+.1f})" in text


def test_regulators_of_erl() -> None:
    """What the page says of ERL's curves: differences to `grpo` with the same seed, FLOP, readable reflections."""
    text, arms = words_of("comparison"), regulated("ERL")
    above = {
        arm: [[curve[at]["accuracy"] - arms["grpo"][seed][at]["accuracy"] for seed, curve in arms[arm].items()]
              for at in (1, 2)] for arm in ("ar", "lopti")
    }  # fmt: skip
    for arm, (_, ends) in above.items():
        first, second, third = map(points, ends)
        assert f"{first}, {second} and {third} points for `{arm}`" in text
    assert f"ten steps before it was {points(min(above['lopti'][0]))} to {points(max(above['lopti'][0]))}" in text
    rltr, erl = (
        fmean(curve[-1]["flop"] for curve in each["lopti"].values())
        / fmean(curve[-1]["flop"] for curve in each["grpo"].values())
        for each in (regulated("RLTR"), arms)
    )
    assert f"{rltr:.1f} or {erl:.1f} times the FLOP" in text
    readable = [
        point["metrics"]["reflection/readable"]
        for runs in arms.values() for curve in runs.values() for point in curve[1:]
    ]  # fmt: skip
    assert f"At least {int(100 * min(readable))} % of ERL's reflections" in text
