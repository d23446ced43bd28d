"""The tables of docs/results/rltr.md and erl.md are those of the figures that are beside them."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import numpy as np

from poise.comparison.sign_flip import interval
from poise.comparison.statistics import student_interval
from support.results import figures, row, words_of


def page(name: str) -> tuple[str, dict[str, Any]]:
    """A page, with plain minus signs and in one line, and its figures."""
    return words_of(name), figures(name)


def mean(values: dict[str, float]) -> str:
    ends = student_interval(list(values.values()))
    assert ends is not None
    return f"{fmean(values.values()):.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def gain(arm: dict[str, float], baseline: dict[str, float]) -> str:
    found = [value - baseline[seed] for seed, value in arm.items()]
    low, high = interval(found)
    return f"{fmean(found):+.3f} [{low:+.3f}, {high:+.3f}]"


def at(curve: list[tuple[float, float]], tokens: float) -> float:
    return float(np.interp(tokens, [x for x, _ in curve], [y for _, y in curve]))


def test_rltr() -> None:
    text, found = page("rltr")
    names = ["GRPO (`transfer=0`)", "`transfer=0.5`", "`transfer=3.5`", "`transfer=3.5`, strong"]
    runs = [{s: run for s, run in arm.items() if run["steps"] == 80} for arm in found["runs"].values()]
    ends: dict[str, float] = {}
    base: dict[str, dict[str, float]] = {}
    for name, arm in zip(names, runs, strict=True):
        scores = {
            score: {s: r["curve"][-1][3][score] for s, r in arm.items()} for score in ("accuracy", "maj@16", "greedy")
        }
        first = not base
        base = base or scores
        against = {score: "" if first else gain(scores[score], base[score]) for score in scores}
        cells = [name, mean(scores["accuracy"]), f"{median(scores['accuracy'].values()):.3f}", against["accuracy"]]
        cells += [mean(scores["maj@16"]), against["maj@16"], mean(scores["greedy"]), against["greedy"]]
        assert row(cells) in text
        curves = {s: [(p[1] - first * received(r, p[0]), p[3]["accuracy"]) for p in r["curve"]] for s, r in arm.items()}
        ends = ends or {s: curve[-1][0] for s, curve in curves.items()}
        equal = {s: at(curve, ends[s]) for s, curve in curves.items()}
        middle = "" if first else f"{median(equal[s] - base['accuracy'][s] for s in equal):+.3f}"
        cells = [name, f"{fmean(c[-1][0] for c in curves.values()):,.0f}", f"{fmean(equal.values()):.3f}"]
        cells += ["" if first else gain(equal, base["accuracy"]), middle, "" if first else "0, 7 of 7"]
        assert row(cells) in text
    kinds = {
        "all responses": "mean", "after right responses": "after_right", "after wrong responses": "after_wrong",
        "first quarter of the reasoning": "cut/0.25", "second quarter": "cut/0.5", "third quarter": "cut/0.75",
        "fourth quarter": "cut/1", "without a prefix": "uncut",
    }  # fmt: skip
    for words, kind in kinds.items():
        steps = [[run["metrics"][f"transfer/{kind}"] for run in arm.values()] for arm in runs]
        shown = [(over(each, slice(10)), over(each, slice(-20, None))) for each in steps]
        assert row([words, *(f"{first:.3f} → {last:.3f}" for first, last in shown)]) in text


def received(run: dict[str, Any], steps: int) -> float:
    return float(sum(run["metrics"]["tokens/receiver"][:steps]))


def over(runs: list[list[float | None]], steps: slice) -> float:
    """The mean over runs of the mean over their steps."""
    return fmean(fmean(value for value in run[steps] if value is not None) for run in runs)


def test_erl() -> None:
    text, found = page("erl")
    arms: dict[str, dict[str, Any]] = found["arms"]
    names = dict(zip(arms, ["GRPO", "ERL", "ERL, no consolidation", "ERL, memory"], strict=True))
    curves = {arm: {s: run["held_out"] for s, run in runs.items()} for arm, runs in arms.items()}
    end = min(curve[-1][0] for runs in curves.values() for curve in runs.values())
    assert f"At {end:,.0f} tokens" in text
    base = {s: at(curve, end) for s, curve in curves["grpo"].items()}
    for arm, runs in arms.items():
        scores = {s: at(curve, end) for s, curve in curves[arm].items()}
        differences = [scores[s] - base[s] for s in scores]
        against = gain(scores, base) if arm == "erl" else f"{fmean(differences):+.3f}" if arm != "grpo" else ""
        cells = [names[arm], str(len(runs)), mean(scores), f"{median(scores.values()):.3f}", against]
        cells.append(mean({s: run["after"]["greedy"] for s, run in runs.items()}))
        assert row([*cells, f"{fmean(len(run['curve']) for run in runs.values()):.0f}"]) in text
        if arm == "grpo":
            continue
        shown = [names[arm]]
        for name, form in (
            ("reflection/readable", ".3f"), ("reflection/length", ".1f"), ("first/success", ".3f"),
            ("second/success", ".3f"),
        ):  # fmt: skip
            steps = [[step.get(name) for step in run["curve"]] for run in runs.values()]
            shown.append(f"{over(steps, slice(10)):{form}} → {over(steps, slice(-20, None)):{form}}")
        assert row(shown) in text
    for tokens in range(40_000, 240_000, 40_000):
        grpo, erl = ({s: at(curve, tokens) for s, curve in curves[arm].items()} for arm in ("grpo", "erl"))
        cells = [f"{tokens:,}", f"{fmean(grpo.values()):.3f}", f"{fmean(erl.values()):.3f}", gain(erl, grpo)]
        assert row(cells) in text
