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
    """What follows from the figures of the first method: the lowest interval against the highest."""
    if not mean["with_gradient"]:
        return ["No token had an advantage: all responses of a group got the same score, so there is nothing to learn."]
    method, low, high = next(iter(mean["regulators"])), names[0], names[-1]
    base, off = mean["regulators"][method], error["regulators"][method]
    if base["share"][0] is None:
        return [f"{method} leaves no gradient at all: name a method first that learns from these tokens."]
    if not (mean["tokens"][0] and mean["tokens"][-1]):
        return [f"No token was sampled with a probability in {low} or in {high}: choose other intervals."]
    parts = [
        f"p in {name}: {_percent(mean['token_share'][i])} of the tokens, "
        f"{_percent(base['share'][i], off['share'][i])} of the gradient of {method}"
        for name, i in ((low, 0), (high, -1))
    ]
    return [*parts, *_influence(base, off, low, high)]


def table(mean: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each method: its gradient, how far its update moves tokens, and what becomes of correct responses."""
    rows = []
    for name, found in mean["regulators"].items():
        part, moved, displacement = found["share"][0], found["influence"][-1]["moved"], found["displacement"] or {}
        change, fallen = displacement.get("lld/change"), displacement.get("lld/fallen_share")
        rows.append({
            "method": name, f"part of {names[0]}": None if part is None else _percent(part),
            "gradient norm": found["full"], f"moves {names[0]}": moved[0], f"moves {names[-1]}": moved[-1],
            "correct: Δ log p": None if change is None else f"{change:+.3f}",
            "of them fell": None if fallen is None else _percent(fallen),
        })  # fmt: skip
    return rows


def _influence(base: dict[str, Any], error: dict[str, Any], low: str, high: str) -> list[str]:
    """Whether a step with one interval alone moves the other one farther than its own step does."""
    rows, errors = ([row["moved"] for row in each["influence"]] for each in (base, error))
    corners = [(i, j) for i in (0, -2) for j in (0, -1)]  # the last row is the update on all tokens
    if not all(rows[i][j] for i, j in corners):
        return []
    onto_high, onto_low = rows[0][-1] / rows[-2][-1], rows[-2][0] / rows[0][0]
    used = [(rows[i][j], errors[i][j]) for i, j in corners]
    used += [(base["share"][i], error["share"][i]) for i in (0, -1)]
    if any(off is not None and off >= abs(value) > 0 for value, off in used):
        follows = "an error here is as large as its value, so nothing follows: measure more (--batches, prompts=)"
    elif onto_high > 1 > onto_low:
        follows = "the unlikely tokens dominate, as the paper says"
    elif onto_low > 1 > onto_high:
        follows = "the likely tokens dominate, unlike in the paper"
    else:
        follows = "neither side drowns out the other"
    return [
        f"compared with their own step, {low} alone moves {high} {onto_high:.2g} times as far, "
        f"{high} alone moves {low} {onto_low:.2g} times as far: {follows}"
    ]


def _percent(value: float, error: float | None = None) -> str:
    return f"{100 * value:.3g} %" if error is None else f"{100 * value:.3g} ± {100 * error:.2g} %"
