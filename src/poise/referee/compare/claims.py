"""Claims about an arm, apart from its accuracy: its speed, and whether a control explains its gain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import exp, log

from poise.referee.compare.results import Arm
from poise.referee.compare.sign_flip import Interval, holm
from poise.referee.compare.speed import speeds
from poise.referee.compare.statistics import Difference, difference
from poise.training.config.documents import Document


def speed_claims(
    arms: Mapping[str, Arm],
    base: Arm,
    differences: Mapping[str, Difference],
    score: str,
    cut: int,
) -> dict[str, Document]:
    """Measure the speed of every arm except the baseline. ``base`` ends at the cut; ``arms`` have complete runs.

    The interval comes from the mean logarithm. ``p`` is the larger of two p-values: one tests the logarithms, the other
    the difference in accuracy at the cut. On a flat curve, noise that is symmetric in accuracy is skewed in steps, so
    the first test alone would find too many differences. ``end`` is the difference from the baseline's final score, if
    the baseline runs longer.
    """
    found: dict[str, Document] = {}
    whole = arms[base.name]
    longer = whole.results(score) if any(run.steps > cut for run in whole.runs.values()) else {}
    for name, higher in differences.items():
        factors, beyond = speeds(arms[name], whole, score, cut)
        logs = _logs(factors)
        result = difference(logs, dict.fromkeys(logs, 0.0))
        end = difference(arms[name].until(cut).results(score), longer)
        found[name] = {
            **paired(result, exp),
            "p": max(result.p, higher.p),
            "seeds": list(factors),
            "values": list(factors.values()),
            "beyond": list(beyond),
            "end": paired(end) if longer else None,
        }
    claims = [name for name in found if not arms[name].control]
    adjusted = dict(zip(claims, holm([found[name]["p"] for name in claims]), strict=True))
    return {name: {**own, "p_adjusted": adjusted.get(name), "text": _speed_text(own)} for name, own in found.items()}


def _speed_text(speed: Document) -> str:
    """Format a speed factor with its interval; a lower bound if the baseline never reaches an arm's accuracy."""
    if speed["mean"] is None:
        return "–"
    mean, interval = f"{speed['mean']:.2f}", speed["interval"]
    if not speed["beyond"]:
        return mean + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
    if len(speed["beyond"]) == len(speed["seeds"]):
        return f"> {mean}"
    return f"≥ {mean}" + (f" [{interval[0]:.2f}, …]" if interval else "")


def against_controls(
    name: str,
    controls: Collection[str],
    arms: Sequence[Arm],
    faster: Mapping[str, Document],
    score: str,
) -> dict[str, list[Document]]:
    """Compare an arm with its controls: "better" by the difference in accuracy, "faster" by the ratio of speeds.

    A control explains a gain unless the interval shows that the arm beats the control: the whole interval must lie
    above 0 (or above a factor of 1). Equal results have no interval; then the control explains the gain too.
    """
    scores = {arm.name: arm.results(score) for arm in arms}
    logs = {arm: _logs(dict(zip(own["seeds"], own["values"], strict=True))) for arm, own in faster.items()}

    def compared(values: Mapping[str, Mapping[int, float]], scale: Callable[[float], float]) -> list[Document]:
        known = {each: difference(values[name], values[each]) for each in controls if each in values}
        return [
            {
                "name": each,
                **paired(result, scale),
                "explains": bool(result.seeds) and (not result.interval or result.interval[0] <= 0),
            }
            for each, result in known.items()
        ]

    return {"better": compared(scores, float), "faster": compared(logs, exp)}


def _logs(factors: Mapping[int, float]) -> dict[int, float]:
    return {seed: log(factor) for seed, factor in factors.items()}


def paired(result: Difference, scale: Callable[[float], float] = float) -> Document:
    """The mean and interval of paired differences; ``scale`` is ``exp`` for differences of logarithms."""
    return {
        "mean": None if result.mean is None else scale(result.mean),
        "interval": ends(result.interval, scale),
        "method": "sign-flip" if result.exact else "student" if result.student else None,
        "seeds": len(result.seeds),
    }


def ends(interval: Interval | None, scale: Callable[[float], float] = float) -> list[float] | None:
    """The ends of an interval, as a list for JSON."""
    return None if interval is None else [scale(end) for end in interval]
