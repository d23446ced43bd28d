"""The results of a comparison in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from poise.comparison.statistics import seeds_needed

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
DEARER = 1.1  # a cost so many times the baseline's is named
MUCH = 0.3  # a share of the spread that is worth more held-out problems


def verdict(document: Mapping[str, Any]) -> list[str]:
    """Sentences on the results of ``analyse``: first what could be found at all, then each arm, then the cautions."""
    arms = {arm["name"]: arm for arm in document["arms"]}
    base = arms.pop(document["baseline"])
    sentences = [_power(document, len(arms))] if arms else []
    for arm in arms.values():
        sentences.append(against(arm, document["baseline"], document["level"]))
        sentences += _cautions(arm)
        sentences += _costs(arm, base)
    return [*sentences, *_cautions(base), *_unfinished([*arms.values(), base]), *_problems(document)]


def _unfinished(arms: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One sentence on the runs that are missing, whichever arms they are of."""
    counts = {arm["name"]: (len(arm["missing"]), len(arm["missing"]) + len(arm["seeds"])) for arm in arms}
    found = {name: f"{_number(missing)} of {_number(runs)}" for name, (missing, runs) in counts.items() if missing}
    if len(found) == 1:
        ((name, share),) = found.items()
        yield f"{name}: {share} runs {_is(counts[name][0])} not finished yet."
    elif len(found) == len(arms) and len(set(found.values())) == 1:
        yield f"Of every arm, {next(iter(found.values()))} runs {_is(next(iter(counts.values()))[0])} not finished yet."
    elif found:
        yield f"Runs that are not finished yet: {listed([f'{share} of {name}' for name, share in found.items()])}."


def _power(document: Mapping[str, Any], comparisons: int) -> str:
    compared = [arm["difference"] for arm in document["arms"] if arm["difference"]]
    seeds = max((len(each["seeds"]) for each in compared if each["spread"] is not None), default=0)
    if not seeds:
        return "No arm has two seeds in common with the baseline yet: there is nothing to compare."
    among = "one comparison" if comparisons == 1 else f"{_number(comparisons)} comparisons"
    needed = seeds_needed(comparisons, document["level"])
    if seeds < needed:
        return (
            f"{_number(seeds).capitalize()} seeds cannot make any difference significant: {among} at the level "
            f"{1 - document['level']:.2g} with Holm's correction {'needs' if comparisons == 1 else 'need'} "
            f"{_number(needed)}."
        )
    return (
        f"The smallest difference that {_number(seeds)} seeds would find with a chance of "
        f"{100 * document['power']:.0f} % is {points(document['detectable'])} points ({among}, Holm's correction, "
        f"a spread of {points(document['spread'])} points over seeds)."
    )


def against(arm: Mapping[str, Any], baseline: str, level: float = 0.95) -> str:
    """One sentence on an arm: its difference to the baseline, the interval, and what that shows."""
    found = arm["difference"]
    name, n = arm["name"], len(found["seeds"])
    if not n:
        return f"{name}: no seed is complete yet."
    if n < 3:  # then there is no interval
        seen = "one seed" if n == 1 else f"{_number(n)} seeds"
        return f"{name}: {signed(found['mean'])} points against {baseline} in {seen}, which says nothing about others."
    low, high = found["interval"]
    shown = f"{name}: {signed(found['mean'])} points [{signed(low)}, {signed(high)}] against {baseline}"
    if found["p_adjusted"] <= 1 - level + 1e-12:
        which = "better" if found["mean"] > 0 else "worse"
        return f"{shown}, {which} (p {_p(found['p_adjusted'])} after Holm's correction, {_number(n)} seeds)."
    largest = f"no difference larger than {points(found['largest'])} points is compatible with {_number(n)} seeds"
    if found["method"] == "student":
        return f"{shown}; if differences are normal, {largest}, which are too few for an exact interval."
    if found["p"] <= 1 - level + 1e-12:
        return (
            f"{shown}; alone this would be significant (p {_p(found['p'])}), but not after Holm's correction "
            f"(p {_p(found['p_adjusted'])}); {largest}."
        )
    return f"{shown}, {largest} (p {_p(found['p_adjusted'])} after Holm's correction)."


def _cautions(arm: Mapping[str, Any]) -> Iterator[str]:
    name, done = arm["name"], len(arm["seeds"])
    if diverged := len(arm["diverged"]):
        yield f"{name}: {_number(diverged)} of {_number(done)} runs diverged{_counted(arm)}."
    if collapsed := arm["stability"]["collapsed"]:
        yield f"{name}: {_number(collapsed)} of {_number(done)} runs ended far below {_its(collapsed)} own best."


def _counted(arm: Mapping[str, Any]) -> str:
    """With what the diverged runs of an arm count."""
    diverged, zero = len(arm["diverged"]), len(arm["counted_as_zero"])
    if not zero:
        return f" and {_count(diverged)} with the accuracy last measured during training"
    if zero == diverged:
        return f" before any evaluation during training (evaluation.every) and {_count(zero)} as 0"
    return (
        f"; {_number(zero)} of them, before any evaluation during training (evaluation.every), {_count(zero)} as 0, "
        f"the {'other' if diverged - zero == 1 else 'others'} with the accuracy last measured"
    )


def _costs(arm: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    names = {"tokens": "sampled tokens", "optimizer_steps": "optimizer steps", "flop": "FLOP (estimated)"}
    ratios = {
        words: arm["cost"][key] / base["cost"][key]
        for key, words in names.items()
        if arm["cost"][key] is not None and base["cost"][key]
    }
    if dearer := [f"{ratio:.2g} times the {words}" for words, ratio in ratios.items() if ratio >= DEARER]:
        yield f"{arm['name']} takes {listed(dearer)} of {base['name']}."


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    found = [arm["difference"]["sources"] for arm in document["arms"] if arm["difference"]]
    shares = [each["share"] for each in found if each]
    if shares and (share := sum(shares) / len(shares)) >= MUCH:
        yield (
            f"{100 * share:.0f} % of the spread over seeds comes from the {document['problems']:,} held-out problems "
            "and their samples: more of them would narrow the intervals."
        )


def points(value: float) -> str:
    """A fraction in points of a hundred, with one decimal."""
    return f"{100 * value:.1f}"


def signed(value: float) -> str:
    """``points`` with a sign: +1.2, −0.8."""
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 0.001 else "< 0.001"


def _number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _count(count: int) -> str:
    return "counts" if count == 1 else "count"


def _its(count: int) -> str:
    return "its" if count == 1 else "their"


def listed(texts: Sequence[str]) -> str:
    """Texts in a sentence: a, b and c."""
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1]
