"""Compute avg@k, pass@k and maj@k from samples, each with a confidence interval, without tensors.

The sampling unit is the *problem*. Samples of one problem share its difficulty: counting them as independent would make
intervals too narrow, and more samples of the same problems say nothing about other problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import comb, fsum, sqrt
from statistics import fmean
from typing import Any, TypeGuard

Interval = tuple[float, float]
LOST = ("cut_off", "unreadable")  # the summary's counts of samples that were cut off or unreadable
MUCH = 1 / 3  # ``much`` reports lost answers if they explain at least this share of a change in accuracy
BY_DIFFICULTY = ", difficulty "  # separates measure and difficulty in the row names of a summary


@dataclass(frozen=True)
class ProblemResult:
    """The samples of one problem, in sampling order."""

    difficulty: str
    correct: tuple[bool, ...]
    answers: tuple[Hashable | None, ...] = ()  # in canonical form, None if unreadable; empty if the task has none


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, without bias, the chance that at least one of k samples is correct, if c of n ≥ k samples are correct.

    ``1 − C(n − c, k) / C(n, k)`` is the share of the k-subsets that contain a correct sample (arXiv 2107.03374). The
    plug-in estimate ``1 − (1 − c/n)^k`` is biased downwards.
    """
    return 1 - comb(n - c, k) / comb(n, k)


def mean_interval(per_problem_means: Sequence[float], level: float = 0.95) -> Interval:
    """The confidence interval of a mean over problems, with one value in [0, 1] per problem.

    This is the exact interval at the effective number of problems (Korn and Graubard, 1998). A value in [0, 1] with
    mean m has at most the variance m·(1 − m) of a binary value. Averaging over samples reduces the variance by a factor
    φ ≤ 1, so that n problems count like n/φ binary values. For binary values φ = 1, and the interval is Clopper and
    Pearson's.

    Few problems determine φ poorly, so its estimate adds four problems of the largest variance; test_accuracy.py shows
    the coverage of this interval and of narrower ones. The interval is too narrow if the mean depends on rare problems
    and the sample contains none of them.
    """
    values = [float(value) for value in per_problem_means]
    mean = fmean(values)
    most = mean * (1 - mean)
    spread = fsum((value - mean) ** 2 for value in values)
    phi = min(1.0, (spread / most + 4) / (len(values) + 3)) if most > 0 else 1.0
    return exact_interval(mean, len(values) / phi, level)


def paired_interval(differences: Sequence[float]) -> Interval:
    """The 95 % confidence interval of the mean change over problems. Each change, after minus before, is in [−1, 1].

    This is Student's interval with two extra problems: one changed up, one down, by the largest observed change. With
    changes of ±1 it excludes 0 where the exact sign test does; the plain interval excludes 0 too often
    (test_accuracy.py). If no problem changed, the bounds come from the exact interval for a share of 0.
    """
    from scipy.stats import t

    n, mean = len(differences), fmean(differences)
    if not any(differences):
        _, most = exact_interval(0.0, n)
        return -most, most
    if n < 2:
        return -1.0, 1.0
    extra = 2 * max(abs(value) for value in differences) ** 2
    spread = fsum((value - mean) ** 2 for value in differences) + extra
    margin = float(t.ppf(0.975, n - 1)) * sqrt(spread / (n - 1) / n)
    return max(-1.0, mean - margin), min(1.0, mean + margin)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The mean changes of avg@k, greedy accuracy and pass@k, from two models' ``Evaluation.by_problem``.

    The result is empty if the two models were evaluated on different problems or with a different k.
    """
    k = after["samples"]
    if before["samples"] != k or before["problems"] != after["problems"]:
        return {}

    def measures(side: Mapping[str, Any]) -> dict[str, list[float]]:
        right = side["correct"]
        return {
            f"avg@{k}": [n / k for n in right],
            "greedy": side["greedy"],
            f"pass@{k}": [float(n > 0) for n in right],
        }

    intervals, ends = {}, measures(after)
    for name, old in measures(before).items():
        differences = [new - was for was, new in zip(old, ends[name], strict=True)]
        low, high = paired_interval(differences)
        intervals[name] = {"value": fmean(differences), "low": low, "high": high}
    return intervals


def much(old: float, new: float, lost_old: float, lost_new: float) -> str:
    """Describe how much of a change in accuracy comes from cut-off or unreadable answers; empty below ``MUCH``.

    Accuracy is the share of complete, readable answers times the accuracy among these answers. ``lost_old`` and
    ``lost_new`` are the shares of answers that were cut off or unreadable.
    """
    sides = ((old, lost_old), (new, lost_new))
    right = [min(1.0, value / (1 - share)) for value, share in sides if share < 1]
    part = (lost_old - lost_new) * fmean(right) if right else 0.0
    if old == new or part / (new - old) < MUCH:
        return ""
    which = "fewer" if part > 0 else "more"
    return (
        f"{100 * part:+.1f} of {100 * (new - old):+.1f} points comes from {which} answers that are cut off or "
        f"unreadable ({100 * lost_old:.1f} → {100 * lost_new:.1f} %)"
    )


def majority(answers: Sequence[Hashable | None]) -> Hashable | None:
    """The most frequent answer; in a tie, the one that occurs first. None (unreadable) casts no vote."""
    votes = Counter(answer for answer in answers if answer is not None).most_common(1)
    return votes[0][0] if votes else None


def summarise(results: Sequence[ProblemResult], k: int) -> dict[str, Any]:
    """Compute avg@k, pass@k and maj@k with their 95 % intervals, over all problems and by difficulty.

    Returns ``{"overall": summary, "difficulty": {"3": summary, …}}``, where a summary is ``{"problems": n, "avg@4":
    {"value": …, "low": …, "high": …}, "pass@4": …, "maj@4": …}``. Difficulties are sorted, integers by value.

    Every problem needs at least k samples. avg@k and pass@k use all of them, maj@k the first k. maj@k is missing if a
    problem has no answers or a correct sample has none, because then votes cannot be counted.
    """

    def order(result: ProblemResult) -> tuple[bool, int, str]:
        number = result.difficulty.isdecimal()
        return not number, int(result.difficulty) if number else 0, result.difficulty

    return {
        "overall": _summary(results, k),
        "difficulty": {
            difficulty: _summary(list(group), k)
            for difficulty, group in groupby(sorted(results, key=order), key=lambda result: result.difficulty)
        },
    }


def _summary(results: Sequence[ProblemResult], k: int) -> dict[str, Any]:
    values = {
        f"avg@{k}": [sum(r.correct) / len(r.correct) for r in results],
        f"pass@{k}": [pass_at_k(len(r.correct), sum(r.correct), k) for r in results],
    }
    answers = [[*zip(r.answers, r.correct, strict=False)] for r in results]
    if all(answers) and not any(right and answer is None for pairs in answers for answer, right in pairs):
        winners = [majority(r.answers[:k]) for r in results]
        values[f"maj@{k}"] = [
            float(winner is not None and (winner, True) in pairs[:k])
            for winner, pairs in zip(winners, answers, strict=True)
        ]
    summary: dict[str, Any] = {"problems": len(results)}
    for name, per_problem in values.items():
        low, high = mean_interval(per_problem)
        summary[name] = {"value": fmean(per_problem), "low": low, "high": high}
    return summary


def exact_interval(mean: float, n: float, level: float = 0.95) -> Interval:
    """Clopper and Pearson's interval for a proportion. Its coverage is at least ``level`` for every n."""
    from scipy.special import betaincinv  # the quantile of the Beta distribution

    tail, successes = (1 - level) / 2, mean * n
    low = 0.0 if mean == 0 else float(betaincinv(successes, n - successes + 1, tail))
    high = 1.0 if mean == 1 else 1 - float(betaincinv(n - successes, successes + 1, tail))
    return min(low, mean), max(high, mean)  # rounding must not exclude the mean


def lost_shares(summary: Mapping[str, Any]) -> dict[str, float]:
    """The share of samples that were cut off, and the share without a readable answer. Unknown shares are omitted."""
    count = summary["n"] * summary["samples"]
    return {name: summary[name] / count for name in LOST if type(summary.get(name)) is int and count}


def without_repeats(table: dict[str, Any], temperature: float | None = None) -> dict[str, Any]:
    """Drop the rows pass@1 and maj@1, which repeat avg@1, and the difficulty rows if there is only one difficulty.

    At temperature 0, avg@1 repeats greedy accuracy and is dropped too.
    """
    same = {"pass@1", "maj@1"} | ({"avg@1"} if temperature == 0 and "greedy" in table else set())
    parts = {name: name.partition(BY_DIFFICULTY) for name in table}
    single = len({difficulty for *_, difficulty in parts.values()} - {""}) < 2
    repeats = {name for name, part in parts.items() if part[0] in same or (single and part[2])}
    return {name: row for name, row in table.items() if name not in repeats}


def is_summary(data: Any) -> TypeGuard[dict[str, Any]]:
    """Whether ``data``, read from a file, has the fields of ``Evaluation.summary`` that poise reads."""
    if not isinstance(data, dict) or not isinstance(data.get("table"), dict):
        return False
    rows = [row if isinstance(row, dict) else {} for row in data["table"].values()]
    numbers = [*(row.get(key) for row in rows for key in ("value", "low", "high")), data.get("accuracy")]
    counts = [data.get(key) for key in ("n", "samples")]
    return all(type(count) is int for count in counts) and all(type(number) in (int, float) for number in numbers)
