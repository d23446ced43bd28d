"""Combines the figures of several batches, and says in words what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

CONCATENATED = "questions"  # one value per question; batches have different questions, so no mean exists


def combine(found: Sequence[Any]) -> tuple[Any, Any]:
    """Means over batches of the same structure, and their standard errors (None with a single batch).

    Per-question values are concatenated instead.
    """
    found = [each for each in found if each is not None]  # a batch without a correct response has no displacement
    if not found:
        return None, None
    if isinstance(found[0], dict):
        pairs = {key: combine([each.get(key) for each in found]) for key in found[0] if key != CONCATENATED}
        if CONCATENATED in found[0]:
            pairs[CONCATENATED] = [value for each in found for value in each[CONCATENATED]], None
        return {k: mean for k, (mean, _) in pairs.items()}, {k: error for k, (_, error) in pairs.items()}
    if isinstance(found[0], list):
        columns = [combine(column) for column in zip(*found, strict=True)]
        return [mean for mean, _ in columns], [error for _, error in columns]
    return fmean(found), stdev(found) / sqrt(len(found)) if len(found) > 1 else None


def verdict(mean: dict[str, Any], error: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Sentences that compare the lowest interval with the highest, with the numbers, and the methods with the first."""
    if not mean["with_gradient"]:
        return [
            "No token had an advantage: in every group all responses got the same score, so there is nothing to learn."
        ]
    methods = list(mean["regulators"])
    base, base_error = mean["regulators"][methods[0]], error["regulators"][methods[0]]
    low, high = names[0], names[-1]
    sentences = []
    if base["share"][0] is None:
        return [f"{methods[0]} leaves no gradient at all: name a method first that learns from these tokens."]
    if not (mean["tokens"][0] and mean["tokens"][-1]):
        return [f"No token was sampled with a probability in {low} or in {high}: choose other intervals."]
    sentences.append(
        f"Tokens with p in {low} are {_percent(mean['token_share'][0])} of the tokens and "
        f"{_percent(base['share'][0], base_error['share'][0])} of the gradient of {methods[0]} "
        f"(their part in its direction); alone, their gradient is {_ratio(base['norm'][0], base['full'])} times as "
        f"long as that of all tokens."
    )
    sentences.append(
        f"Tokens with p in {high} are {_percent(mean['token_share'][-1])} of the tokens and "
        f"{_percent(base['share'][-1], base_error['share'][-1])} of the gradient."
    )
    if base["per_token"][-1]:
        sentences.append(
            f"Per token, the gradient of {low} is {_ratio(base['per_token'][0], base['per_token'][-1])} times "
            f"as long as that of {high}."
        )
    sentences += _influence(base, low, high)
    if (cosine := base["split_cosine"][0]) is not None:
        sentences.append(f"The gradient of {low} and that of all other tokens have a cosine of {cosine:.2f}.")
    for name in methods[1:]:
        sentences += _against(name, mean["regulators"][name], methods[0], base, low)
    sentences += _displacement(mean, methods)
    return sentences


def _influence(base: dict[str, Any], low: str, high: str) -> list[str]:
    rows = [row["moved"] for row in base["influence"]]
    if None in (rows[0][0], rows[0][-1], rows[-2][0], rows[-2][-1]) or not rows[-2][-1] or not rows[0][0]:
        return []
    onto_high, onto_low = rows[0][-1] / rows[-2][-1], rows[-2][0] / rows[0][0]
    if onto_high > 1 > onto_low:
        conclusion = "here the unlikely tokens dominate, as the paper says"
    elif onto_low > 1 > onto_high:
        conclusion = "here the likely tokens dominate, unlike in the paper"
    else:
        conclusion = "by this measure, neither side drowns out the other"
    return [
        f"A step with {low} alone moves the tokens of {high} {_ratio(rows[0][-1], rows[-2][-1])} times as far as their "
        f"own step does; a step with {high} alone moves those of {low} {_ratio(rows[-2][0], rows[0][0])} times as far "
        f"as their own does: {conclusion}."
    ]


def _against(name: str, own: dict[str, Any], first: str, base: dict[str, Any], low: str) -> list[str]:
    if own["share"][0] is None:
        return [f"{name} leaves no gradient at all."]
    moved, was = (each["influence"][-1]["moved"][0] for each in (own, base))
    effect = f"; its update moves those tokens {_ratio(moved, was)} times as far as {first}'s" if moved and was else ""
    if own["share"] == base["share"]:
        return [f"{name} has the same total gradient as {first}, in other steps{effect}."]
    return [
        f"{name} changes the part of {low} to {_percent(own['share'][0])} and the length of the whole gradient to "
        f"{_ratio(own['full'], base['full'])} times {first}'s{effect}."
    ]


def _displacement(mean: dict[str, Any], methods: Sequence[str]) -> list[str]:
    found = {name: mean["regulators"][name]["displacement"] for name in methods}
    if any(each is None for each in found.values()):
        return ["No response was correct, so there is no likelihood displacement to measure."]
    listed = "; ".join(
        f"{name} {each['lld/change']:+.3f}, {_percent(each['lld/fallen_share'])} fell" for name, each in found.items()
    )
    return [f"Mean change of the correct responses' log-likelihood after one update: {listed}."]


def _percent(value: float, error: float | None = None) -> str:
    return f"{100 * value:.0f} ± {100 * error:.0f} %" if error is not None else f"{100 * value:.0f} %"


def _ratio(value: float, of: float) -> str:
    if not of:
        return "?"
    return f"{value / of:,.0f}" if value / of >= 10 else f"{value / of:.2g}"
