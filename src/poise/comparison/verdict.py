"""The results of a comparison in short sentences; the tables say the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from poise.comparison.statistics import LEVEL, POWER, seeds_needed

DEARER = 1.1  # a cost so many times the baseline's is named
COSTS = {"tokens": "sampled tokens", "optimizer_steps": "optimizer steps", "flop": "FLOP (estimated)"}


def verdict(document: Mapping[str, Any]) -> list[str]:
    """Sentences on the results of ``analyse``: first what could be found at all, then each arm, then the cautions."""
    arms = document["arms"]
    (base,) = (arm for arm in arms if arm["name"] == document["baseline"])
    others = [arm for arm in arms if arm is not base]
    compared = [arm["difference"] for arm in others if arm["difference"]["spread"] is not None]
    if compared:
        seeds = max(len(found["seeds"]) for found in compared)
        said = [power(seeds, len(others), document["detectable"], document["spread"], document["level"])]
    else:
        said = ["No arm has two seeds in common with the baseline yet: there is nothing to compare."]
    for arm in others:
        said += [against(arm, base["name"], document["level"]), *_costs(arm, base)]
    return [*said, *(caution for arm in arms for caution in _cautions(arm))]


def power(seeds: int, comparisons: int, effect: float | None, spread: float, level: float = LEVEL) -> str:
    """The smallest difference that so many seeds can find."""
    if effect is None or not isfinite(effect):
        needed = seeds_needed(comparisons, level)
        return f"{seeds} seeds cannot make a difference significant: {needed} can (comparisons: {comparisons})."
    return (
        f"Smallest difference that {seeds} seeds find with a chance of {100 * POWER:.0f} %: {points(effect)} points, "
        f"at a spread of {points(spread)} points over seeds (comparisons: {comparisons}, Holm's correction)."
    )


def against(arm: Mapping[str, Any], baseline: str, level: float = LEVEL) -> str:
    """One sentence on an arm: its difference to the baseline, the interval, and what that shows."""
    found, seeds = arm["difference"], len(arm["difference"]["seeds"])
    if not seeds:
        return f"{arm['name']}: no seed is complete yet."
    shown = f"{arm['name']}: {signed(found['mean'])} points"
    if not found["interval"]:
        return f"{shown} against {baseline} (seeds: {seeds}, too few to tell)."
    low, high = found["interval"]
    shown += f" [{signed(low)}, {signed(high)}] against {baseline}"
    p, alpha = found["p_adjusted"], 1 - level + 1e-12
    if p <= alpha:
        return f"{shown}: {'better' if found['mean'] > 0 else 'worse'} (p {_p(p)})."
    why = f"p {_p(p)}"
    if found["p"] <= alpha:
        why += f"; {_p(found['p'])} before Holm's correction"
    if found["method"] == "student":
        why += "; Student's interval, too few seeds for an exact one"
    return f"{shown}: no significant difference, and none above {points(found['largest'])} points ({why})."


def _costs(arm: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    known = {key: words for key, words in COSTS.items() if arm["cost"][key] is not None and base["cost"][key]}
    ratios = {words: arm["cost"][key] / base["cost"][key] for key, words in known.items()}
    if dearer := [f"{ratio:.2g} × {words}" for words, ratio in ratios.items() if ratio >= DEARER]:
        yield f"{arm['name']} costs {', '.join(dearer)} of {base['name']}."


def _cautions(arm: Mapping[str, Any]) -> Iterator[str]:
    name, done, missing = arm["name"], len(arm["seeds"]), len(arm["missing"])
    if diverged := len(arm["diverged"]):
        zero = f"; {len(arm['counted_as_zero'])} before any evaluation, as 0" if arm["counted_as_zero"] else ""
        yield f"{name}: {diverged} of {done} runs diverged, and count with the accuracy last measured{zero}."
    if collapsed := arm["stability"]["collapsed"]:
        yield f"{name}: {collapsed} of {done} runs ended far below their best."
    if missing:
        yield f"{name}: {missing} of {done + missing} runs are not finished yet."


def points(value: float) -> str:
    """A fraction in points of a hundred, with one decimal."""
    return f"{100 * value:.1f}"


def signed(value: float) -> str:
    """``points`` with a sign: +1.2, −0.8."""
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 0.001 else "< 0.001"
