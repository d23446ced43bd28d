"""From arms with their runs to the results of a comparison: the contents of ``comparison.json``, with a verdict in
short sentences.

Scores are fractions, such as 0.575; only words and pictures show points. Secondary scores have intervals but no
corrected p: the test is that of the main score.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from statistics import fmean, median
from typing import Any

import numpy as np

from poise.comparison.results import ACCURACY, Arm, Cost, Point, RunResult
from poise.comparison.sign_flip import holm
from poise.comparison.statistics import LEVEL, POWER, Difference, detectable, difference, seeds_needed, student_interval
from poise.training.accuracy import LOST, much

Document = dict[str, Any]
CHANGE = 0.02  # a smaller change since before training is not explained
DROP = 0.1  # a final accuracy so far below the run's own best is a collapse, or below half of a best under 0.2
DEARER = 1.1  # a cost so many times the baseline's is named
COSTS = {"tokens": "sampled tokens", "optimizer_steps": "optimizer steps", "flop": "FLOP (estimated)"}


def analyse(
    arms: Sequence[Arm],
    baseline: str,
    seeds: Iterable[int] = (),
    *,
    looks: Iterable[int] = (),
    score: str = ACCURACY,
    level: float = LEVEL,
) -> Document:
    """Compare all arms with the one named ``baseline``. ``seeds`` are those planned: runs may be missing so far.

    ``looks`` are the numbers of seeds with which this comparison was analysed before.
    """
    base = next((arm for arm in arms if arm.name == baseline), None)
    if base is None:
        raise ValueError(f"the baseline {baseline!r} is none of the arms: {', '.join(arm.name for arm in arms)}")
    planned = sorted({*seeds, *(seed for arm in arms for seed in arm.runs)})
    against = {
        arm.name: difference(arm.results(score), base.results(score), planned, level) for arm in arms if arm is not base
    }
    adjusted = dict(zip(against, holm([found.p for found in against.values()]), strict=True))
    rows = [_arm(arm, base, planned, score, level) for arm in arms]
    for row in rows:
        row["difference"] = None
        if found := against.get(row["name"]):
            row["difference"] = {
                **_difference(found),
                **_power([found], len(against), level),
                "p_adjusted": adjusted[row["name"]],
            }
    document: Document = {
        "baseline": baseline,
        "score": score,
        "level": level,
        "power": POWER,
        "seeds": planned,
        "looks": _looks(looks, against.values(), level),
        **_power(list(against.values()), len(against), level),
        "arms": rows,
    }
    document["verdict"] = verdict(document)
    return document


def _arm(arm: Arm, base: Arm, planned: Sequence[int], score: str, level: float) -> Document:
    results = arm.results(score)
    done = {seed: arm.runs[seed] for seed in results}
    names = dict.fromkeys(name for run in done.values() for name in run.scores)
    secondary = {name: (arm.results(name), base.results(name)) for name in names if name != score}
    return {
        "name": arm.name,
        "settings": dict(arm.settings),
        "seeds": list(results),
        "missing": [seed for seed in planned if seed not in results],
        "diverged": {str(seed): run.why for seed, run in done.items() if run.state == "diverged"},
        "counted_as_zero": [seed for seed, run in done.items() if run.counts_as_zero],
        "accuracy": fmean(results.values()) if results else None,
        "interval": _ends(student_interval(list(results.values()), level)),
        "results": {str(seed): value for seed, value in results.items()},
        "before": _before(done.values(), score),
        "scores": {
            name: {"before": _before(done.values(), name), **_summary(own, other, arm is base, level)}
            for name, (own, other) in secondary.items()
        },
        "steps": sorted({run.steps for run in done.values() if run.state == "finished"}),
        "problems": sorted({run.problems for run in done.values()} - {""}),
        "unsealed": sum(not run.sealed for run in done.values()),
        "stability": _stability(done.values()),
        "cost": _cost(done.values()),
        "curve": _band(list(done.values()), score, level),
    }


def _before(runs: Iterable[RunResult], score: str) -> float | None:
    return _mean(run.curve[0].scores.get(score) for run in runs)


def _summary(own: Mapping[int, float], other: Mapping[int, float], alone: bool, level: float) -> Document:
    """A secondary score: its mean, and unless the arm is the baseline its difference."""
    found = None if alone else difference(own, other, level=level)
    return {
        "mean": _mean(own.values()),
        "interval": _ends(student_interval(list(own.values()), level)),
        "difference": found and {"mean": found.mean, "interval": _ends(found.interval), "seeds": len(found.seeds)},
    }


def _difference(found: Difference) -> Document:
    return {
        "mean": found.mean,
        "interval": _ends(found.interval),
        "method": "sign-flip" if found.exact else "student" if found.student else None,
        "student": _ends(found.student),
        "largest": found.largest,
        "p": found.p,
        "seeds": list(found.seeds),
        "incomplete": list(found.incomplete),
        "values": list(found.values),
    }


def _power(found: Sequence[Difference], comparisons: int, level: float) -> Document:
    """The smallest detectable difference with the most seeds that an arm has, and the median spread of such arms.

    ``detectable`` is None if so many seeds cannot make any difference significant, or if there are fewer than two.
    """
    most = max((len(each.seeds) for each in found), default=0)
    spreads = [each.spread for each in found if len(each.seeds) == most and each.spread]  # 0: the runs were the same
    if not spreads:
        return {"detectable": None, "spread": None}
    effect = detectable(most, median(spreads), comparisons, level)
    return {"detectable": effect if isfinite(effect) else None, "spread": median(spreads)}


def _looks(earlier: Iterable[int], found: Collection[Difference], level: float) -> list[int]:
    """The numbers of seeds of all analyses so far that could call a difference significant, this one included."""
    now = max((len(each.seeds) for each in found), default=0)
    least = seeds_needed(max(1, len(found)), level)
    return sorted({seeds for seeds in (*earlier, now) if least <= seeds <= now})


def _stability(runs: Collection[RunResult]) -> Document:
    tenths = [max(1, len(run.entropy) // 10) for run in runs]
    return {
        "collapsed": sum(_collapsed(run) for run in runs),
        "entropy_start": _mean(_mean(run.entropy[:n]) for run, n in zip(runs, tenths, strict=True)),
        "entropy_end": _mean(_mean(run.entropy[-n:]) for run, n in zip(runs, tenths, strict=True)),
    }


def _collapsed(run: RunResult) -> bool:
    """Whether the final accuracy is far below the run's own best."""
    scores = [point.scores[ACCURACY] for point in run.curve if ACCURACY in point.scores]
    best = max(scores, default=0.0)
    return bool(scores) and best - scores[-1] > max(DROP / 2, min(DROP, best / 2))


def _cost(runs: Collection[RunResult]) -> Document:
    """Means over the runs; None where one of them does not know."""
    columns = {each.name: [getattr(run.cost, each.name) for run in runs] for each in fields(Cost)}
    return {name: None if None in values else _mean(values) for name, values in columns.items()}


def _band(runs: Sequence[RunResult], score: str, level: float) -> Document:
    """The mean curve over seeds with its interval at every step that one of them evaluated, and the mean cost there.

    A run that ended early keeps its last score and cost.
    """
    measured = [[point for point in run.curve if score in point.scores] for run in runs]
    measured = [points for points in measured if points]
    steps = sorted({point.step for points in measured for point in points})

    def at(step: int, value: Callable[[Point], float]) -> list[float]:
        return [
            float(np.interp(step, [point.step for point in points], [value(point) for point in points]))
            for points in measured
        ]

    scores = [at(step, lambda point: point.scores[score]) for step in steps]
    ends = [_ends(student_interval(values, level)) for values in scores]
    return {
        "steps": steps,
        "tokens": [fmean(at(step, lambda point: point.cost.tokens)) for step in steps],
        "seconds": [fmean(at(step, lambda point: point.cost.seconds)) for step in steps],
        "mean": [fmean(values) for values in scores],
        "low": [pair[0] if pair else None for pair in ends],
        "high": [pair[1] if pair else None for pair in ends],
    }


def _ends(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return fmean(known) if known else None


def verdict(document: Mapping[str, Any]) -> list[str]:
    """Sentences on the results of ``analyse``: first what could be found at all, then each arm, then the cautions."""
    arms = document["arms"]
    (base,) = (arm for arm in arms if arm["name"] == document["baseline"])
    others = [arm for arm in arms if arm is not base]
    seeds = max((len(arm["difference"]["seeds"]) for arm in others), default=0)
    scores = {value for arm in arms for value in arm["results"].values()}
    if seeds < 2:
        said = ["No arm has two seeds in common with the baseline yet: there is nothing to compare."]
    elif all(_idle(arm) for arm in arms):
        return ["Nothing was compared: no run took an optimizer step.", *_all_cautions(arms)]
    elif len(scores) == 1:
        return [f"All runs ended with the same score, {points(scores.pop())} points.", *_all_cautions(arms)]
    elif document["spread"] is None:
        said = []
    else:
        said = [power(seeds, len(others), document["detectable"], document["spread"], document["level"])]
    said += _looked(document["looks"], document["level"])
    for arm in others:
        said += [
            against(arm, base["name"], document["level"]),
            *_costs(arm, base),
            *_unlike(arm, base, document["level"]),
        ]
    said += [f"{arm['name']}: no run took an optimizer step." for arm in arms if _idle(arm)]
    if len({name for arm in arms for name in arm["problems"]}) > 1:
        said.append("Not all runs were measured on the same held-out problems: differences may be those of problems.")
    return [*said, *_all_cautions(arms)]


def _idle(arm: Mapping[str, Any]) -> bool:
    """Whether an arm's runs sampled, and took no optimizer step."""
    return bool(arm["cost"]["tokens"]) and not arm["cost"]["optimizer_steps"]


def _looked(looks: Sequence[int], level: float) -> list[str]:
    """If each of k tests is wrong in 5 % of comparisons, one of them is wrong in at most k times as many."""
    if len(looks) < 2:
        return []
    before, bound = ", ".join(map(str, looks[:-1])), 100 * min(1.0, len(looks) * (1 - level))
    return [
        f"Results were seen with {before} seeds before these {looks[-1]}: a difference is called significant by chance "
        f"in more than {100 * (1 - level):.0f} % of such comparisons, and in at most {bound:.0f} %."
    ]


def _all_cautions(arms: Iterable[Mapping[str, Any]]) -> list[str]:
    return [caution for arm in arms for caution in _cautions(arm)]


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
    if not any(found["values"]):
        return f"{arm['name']}: the same score as {baseline} with every seed (seeds: {seeds})."
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


def _unlike(arm: Mapping[str, Any], base: Mapping[str, Any], level: float) -> Iterator[str]:
    """Whether the arm was measured after other steps, and how much of a significant difference is readability."""
    if arm["steps"] and base["steps"] and arm["steps"] != base["steps"]:
        yield f"{arm['name']} was measured after {_span(arm)} steps, {base['name']} after {_span(base)}."
    lost = _lost(base, "mean"), _lost(arm, "mean")
    significant = arm["difference"]["p_adjusted"] <= 1 - level + 1e-12
    if significant and (part := much(base["accuracy"], arm["accuracy"], *lost)):
        yield f"{arm['name']}: of the difference to {base['name']}, {part}."


def _span(arm: Mapping[str, Any]) -> str:
    return " to ".join(str(end) for end in dict.fromkeys((arm["steps"][0], arm["steps"][-1])))


def _lost(arm: Mapping[str, Any], when: str) -> float:
    """The share of samples that were cut off or unreadable, on average (``mean``) or ``before`` training."""
    return sum(arm["scores"][name][when] or 0.0 for name in LOST if name in arm["scores"])


def _cautions(arm: Mapping[str, Any]) -> Iterator[str]:
    name, done, missing = arm["name"], len(arm["seeds"]), len(arm["missing"])
    changed = done and arm["before"] is not None and abs(arm["accuracy"] - arm["before"]) >= CHANGE
    if changed and (part := much(arm["before"], arm["accuracy"], _lost(arm, "before"), _lost(arm, "mean"))):
        yield f"{name}: of the change since before training, {part}."
    if arm["unsealed"]:
        yield f"{name}: {arm['unsealed']} of {done} results have no checksum, so that a changed number would not show."
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
