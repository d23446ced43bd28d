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
        f"(their part in its direction); alone, their gradient is {_times(base['norm'][0], base['full'])} as "
        f"long as that of all tokens."
    )
    sentences.append(
        f"Tokens with p in {high} are {_percent(mean['token_share'][-1])} of the tokens and "
        f"{_percent(base['share'][-1], base_error['share'][-1])} of the gradient."
    )
    if base["per_token"][-1]:
        sentences.append(
            f"Per token, the gradient of {low} is {_times(base['per_token'][0], base['per_token'][-1])} "
            f"as long as that of {high}."
        )
    sentences += _influence(base, base_error, low, high)
    if (cosine := base["split_cosine"][0]) is not None:
        sentences.append(f"The gradient of {low} and that of all other tokens have a cosine of {cosine:.2f}.")
    for name in methods[1:]:
        sentences += _against(name, mean["regulators"][name], methods[0], base, low)
    sentences += _displacement(mean, methods)
    return sentences


def _influence(base: dict[str, Any], error: dict[str, Any], low: str, high: str) -> list[str]:
    rows = [row["moved"] for row in base["influence"]]
    if None in (rows[0][0], rows[0][-1], rows[-2][0], rows[-2][-1]) or not rows[-2][-1] or not rows[0][0]:
        return []
    onto_high, onto_low = rows[0][-1] / rows[-2][-1], rows[-2][0] / rows[0][0]
    errors = [row["moved"] for row in error["influence"]]
    used = [(rows[i][j], errors[i][j]) for i in (0, -2) for j in (0, -1)]
    used += [(base["share"][i], error["share"][i]) for i in (0, -1)]
    if any(off is not None and off >= abs(value) > 0 for value, off in used):
        conclusion = (
            "but an error here is as large as its value, so nothing follows: measure more (--batches, prompts=)"
        )
    elif onto_high > 1 > onto_low:
        conclusion = "here the unlikely tokens dominate, as the paper says"
    elif onto_low > 1 > onto_high:
        conclusion = "here the likely tokens dominate, unlike in the paper"
    else:
        conclusion = "by this measure, neither side drowns out the other"
    return [
        f"A step with {low} alone moves the tokens of {high} {_times(rows[0][-1], rows[-2][-1])} as far as their "
        f"own step does; a step with {high} alone moves those of {low} {_times(rows[-2][0], rows[0][0])} as far "
        f"as their own does: {conclusion}."
    ]


def _against(name: str, own: dict[str, Any], first: str, base: dict[str, Any], low: str) -> list[str]:
    if own["share"][0] is None:
        return [f"{name} leaves no gradient at all."]
    moved, was = (each["influence"][-1]["moved"][0] for each in (own, base))
    effect = f"; its update moves those tokens {_times(moved, was)} as far as {first}'s" if moved and was else ""
    if own["share"] == base["share"]:
        return [f"{name} has the same total gradient as {first}, in other steps{effect}."]
    return [
        f"{name} changes the part of {low} to {_percent(own['share'][0])} and the length of the whole gradient to "
        f"{_times(own['full'], base['full'])} {first}'s{effect}."
    ]


def _displacement(mean: dict[str, Any], methods: Sequence[str]) -> list[str]:
    found = {name: mean["regulators"][name]["displacement"] for name in methods}
    if any(each is None for each in found.values()):
        return ["No response was correct, so there is no likelihood displacement to measure."]
    listed = "; ".join(
        f"{name} {_minus(format(each['lld/change'], '+.3f'))}, {_percent(each['lld/fallen_share'])} fell"
        for name, each in found.items()
    )
    return [f"Mean change of the correct responses' log-likelihood after one update: {listed}."]


def _percent(value: float, error: float | None = None) -> str:
    if error is None:
        return _minus(f"{100 * value:.0f} %")
    if 100 * error >= 1:
        return _minus(f"{100 * value:.0f} ± {100 * error:.0f} %")
    small = f"{100 * error:.1f}" if 100 * error >= 0.05 else "less than 0.1"  # "± 0" would claim too much
    return _minus(f"{100 * value:.1f} ± {small} %")


def _times(value: float, of: float) -> str:
    """How many times one is the other, to be read before "as far as": "1.8 times", or "about"."""
    if not of:
        return "? times"
    shown = f"{value / of:,.0f}" if value / of >= 10 else f"{value / of:.2g}"
    return "about" if shown == "1" else f"{shown} times"


def _minus(number: str) -> str:
    return "0" + number[2:] if number.startswith("-0 ") else number.replace("-", "−")
