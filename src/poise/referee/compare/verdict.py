"""Describes the results of a comparison in short sentences: what the seeds can detect, each arm, and cautions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from poise.referee.compare.statistics import LEVEL, POWER, seeds_needed
from poise.training.accuracy import LOST, much

CHANGE = 0.02  # smaller changes since the start of training are not explained
COSTLY = 1.1  # the verdict names costs of at least this many times the baseline's
COSTS = {"tokens": "sampled tokens", "optimizer_steps": "optimizer steps", "flop": "FLOP (estimated)"}


def verdict(document: Mapping[str, Any]) -> list[str]:
    """Sentences about the results of ``analyse``: what the seeds can detect, then each arm, then cautions."""
    arms = document["arms"]
    (base,) = (arm for arm in arms if arm["name"] == document["baseline"])
    others = [arm for arm in arms if arm is not base and not arm["control"]]
    seeds = max((len(arm["difference"]["seeds"]) for arm in others), default=0)
    scores = {value for arm in arms for value in arm["results"].values()}
    if seeds < 2:
        sentences = ["No arm has two seeds in common with the baseline yet: there is nothing to compare."]
    elif all(_idle(arm) for arm in arms):
        return ["Nothing was compared: no run took an optimizer step.", *_all_cautions(arms)]
    elif len(scores) == 1:
        return [f"All runs ended with the same score, {points(scores.pop())} points.", *_all_cautions(arms)]
    elif document["spread"] is None:
        sentences = []
    else:
        sentences = [power_sentence(seeds, len(others), document["detectable"], document["spread"])]
    sentences += _look_caution(document["looks"])
    for arm in others:
        sentences += [
            arm_sentence(arm, base_words(document)),
            *speed_sentences(arm, document),
            *_explanations(arm),
            *_costs(arm, base),
            *_condition_cautions(arm, base),
        ]
    sentences += [f"{arm['name']}: no run took an optimizer step." for arm in arms if _idle(arm)]
    if document["flat"]:
        sentences.append(
            f"{base['name']} hardly rises after step {document['cut']}: on such a flat curve speed factors are rough, "
            "and their intervals too narrow."
        )
    if len({name for arm in arms for name in arm["problems"]}) > 1:
        sentences.append(
            "Not all runs were measured on the same held-out problems: differences may come from the problems."
        )
    return [*sentences, *_all_cautions(arms)]


def _idle(arm: Mapping[str, Any]) -> bool:
    """Whether an arm's runs sampled but took no optimizer step."""
    return bool(arm["cost"]["tokens"]) and not arm["cost"]["optimizer_steps"]


def _look_caution(looks: Sequence[int]) -> list[str]:
    """A caution if results were seen before: if each of k tests errs in 5 %, at least one errs in at most k · 5 %."""
    if len(looks) < 2:
        return []
    before, bound = ", ".join(map(str, looks[:-1])), 100 * min(1.0, len(looks) * (1 - LEVEL))
    return [
        f"Results were seen with {before} seeds before these {looks[-1]}: a difference is called significant by chance "
        f"in more than {100 * (1 - LEVEL):.0f} % of such comparisons, and in at most {bound:.0f} %."
    ]


def _all_cautions(arms: Iterable[Mapping[str, Any]]) -> list[str]:
    return [caution for arm in arms for caution in _cautions(arm)]


def power_sentence(seeds: int, comparisons: int, effect: float | None, spread: float) -> str:
    """A sentence: the smallest difference that this number of seeds can detect."""
    if effect is None or not isfinite(effect):
        needed = seeds_needed(comparisons)
        return f"{seeds} seeds cannot show a significant difference; {needed} can (comparisons: {comparisons})."
    return (
        f"Smallest difference that {seeds} seeds find with a chance of {100 * POWER:.0f} %: {points(effect)} points, "
        f"at a spread of {points(spread)} points over seeds (comparisons: {comparisons}, Holm's correction)."
    )


def arm_sentence(arm: Mapping[str, Any], baseline: str) -> str:
    """One sentence about an arm: its difference from the baseline, the interval, and the conclusion."""
    result, seeds = arm["difference"], len(arm["difference"]["seeds"])
    if not seeds:
        return f"{arm['name']}: no seed is complete yet."
    sentence = f"{arm['name']}: {signed(result['mean'])} points"
    if not any(result["values"]):
        return f"{arm['name']}: the same score as {baseline} with every seed (seeds: {seeds})."
    if not result["interval"]:
        return f"{sentence} against {baseline} (seeds: {seeds}, too few to tell)."
    low, high = result["interval"]
    sentence += f" [{signed(low)}, {signed(high)}] against {baseline}"
    p, alpha = result["p_adjusted"], 1 - LEVEL + 1e-12
    if _significant(result):
        return f"{sentence}: {'better' if result['mean'] > 0 else 'worse'} (p {_p(p)})."
    why = f"p {_p(p)}"
    if result["p"] <= alpha:
        why += f"; {_p(result['p'])} before Holm's correction"
    if result["method"] == "student":
        why += "; Student's interval, too few seeds for an exact one"
    return f"{sentence}: no significant difference, and none above {points(result['largest'])} points ({why})."


def base_words(document: Mapping[str, Any]) -> str:
    """The baseline, with the number of steps if it is known."""
    return f"{document['baseline']} after {document['cut']} steps" if document["cut"] else f"{document['baseline']}"


def speed_sentences(arm: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about an arm's speed and, if the arm is faster, whether it ends above the longer baseline run."""
    speed, base = arm["speed"], document["baseline"]
    if speed is None or not speed["seeds"]:
        return
    sentence, seeds = f"{arm['name']}: {speed['text']} × the speed of {base}", len(speed["seeds"])
    if not speed["interval"] and set(speed["values"]) != {1.0}:
        yield f"{sentence} (seeds: {seeds}, too few to tell)."
        return
    significant = _significant(speed)
    word = ("faster" if speed["mean"] > 1 else "slower") if significant else "no significant difference"
    yield f"{sentence}: {word}{_within(speed, document['margin'])} (p {_p(speed['p_adjusted'])})."
    if significant and speed["mean"] > 1 and speed["end"] and speed["end"]["interval"]:
        outcome = "it ends higher" if speed["end"]["interval"][0] > 0 else "it is not shown to end higher"
        ahead = _difference_text(speed["end"])
        yield f"{arm['name']}: {ahead} against {base} after {document['end']} steps: {outcome}."


def _within(speed: Mapping[str, Any], margin: float | None) -> str:
    """Words for a sentence: whether the interval lies within the margin of equal speed; may be empty."""
    if margin is None or not speed["interval"]:
        return ""
    low, high = speed["interval"]
    if 1 - margin <= low and high <= 1 + margin and not speed["beyond"]:
        return f", and within ± {100 * margin:g} % of equal speed"
    return "" if low > 1 or high < 1 else f", but not shown to be within ± {100 * margin:g} % of equal speed"


def _explanations(arm: Mapping[str, Any]) -> Iterator[str]:
    """Sentences: which controls explain each claimed gain."""
    name, gains = arm["name"], {"better": (arm["difference"], 0.0), "faster": (arm["speed"], 1.0)}
    for claim, controls in arm["controls"].items():
        result, none = gains[claim]
        if not controls or result is None or not _significant(result) or result["mean"] <= none:
            continue
        text = _difference_text if claim == "better" else _ratio_text
        if found := [f"{each['name']} ({text(each)})" for each in controls if each["explains"]]:
            yield f"{name}: {claim}, but a control explains it; {name} against {', '.join(found)}."
        else:
            missing = sum(not each["seeds"] for each in controls)
            done = (
                f"the {len(controls) - missing} finished of its {len(controls)}" if missing else f"its {len(controls)}"
            )
            yield f"{name}: {claim}, and none of {done} controls explains it."


def _difference_text(result: Mapping[str, Any]) -> str:
    low, high = result["interval"] or (result["mean"], result["mean"])
    return f"{signed(result['mean'])} points [{signed(low)}, {signed(high)}]"


def _ratio_text(result: Mapping[str, Any]) -> str:
    low, high = result["interval"] or (result["mean"], result["mean"])
    return f"{result['mean']:.2f} × as fast [{low:.2f}, {high:.2f}]"


def _significant(result: Mapping[str, Any]) -> bool:
    return bool(result["p_adjusted"] <= 1 - LEVEL + 1e-12)


def _costs(arm: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    known = {key: words for key, words in COSTS.items() if arm["cost"][key] is not None and base["cost"][key]}
    ratios = {words: arm["cost"][key] / base["cost"][key] for key, words in known.items()}
    if higher := [f"{ratio:.2g} × {words}" for words, ratio in ratios.items() if ratio >= COSTLY]:
        yield f"{arm['name']} costs {', '.join(higher)} of {base['name']}."


def _condition_cautions(arm: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    """Cautions: different numbers of steps, and a significant difference due to cut-off or unreadable answers."""
    if arm["steps"] and base["steps"] and arm["steps"] != base["steps"]:
        own, other = span(arm["steps"]), span(base["steps"])
        yield f"{arm['name']} was measured after {own} steps, {base['name']} after {other}."
    lost = _lost(base, "mean"), _lost(arm, "mean")
    if _significant(arm["difference"]) and (part := much(base["accuracy"], arm["accuracy"], *lost)):
        yield f"{arm['name']}, compared with {base['name']}: {part}."


def span(values: Sequence[int]) -> str:
    """The first and the last number as text, or the only number."""
    return " to ".join(str(end) for end in dict.fromkeys((values[0], values[-1])))


def _lost(arm: Mapping[str, Any], when: str) -> float:
    """The share of samples that were cut off or unreadable, on average (``mean``) or ``before`` training."""
    return sum(arm["scores"][name][when] or 0.0 for name in LOST if name in arm["scores"])


def _cautions(arm: Mapping[str, Any]) -> Iterator[str]:
    name, done, missing = arm["name"], len(arm["seeds"]), len(arm["missing"])
    changed = done and arm["before"] is not None and abs(arm["accuracy"] - arm["before"]) >= CHANGE
    if changed and (part := much(arm["before"], arm["accuracy"], _lost(arm, "before"), _lost(arm, "mean"))):
        yield f"{name}, compared with before training: {part}."
    if arm["unsealed"]:
        yield f"{name}: {arm['unsealed']} of {done} results have no checksum, so an edited number would go unnoticed."
    if diverged := len(arm["diverged"]):
        zero = f" (0 for {len(arm['counted_as_zero'])} without a measurement)" if arm["counted_as_zero"] else ""
        yield f"{name}: {diverged} of {done} runs diverged: their last accuracy in training counts{zero}."
    if collapsed := arm["stability"]["collapsed"]:
        yield f"{name}: {collapsed} of {done} runs ended far below their best."
    if missing:
        yield f"{name}: {missing} of {done + missing} runs are not finished yet."


def points(value: float) -> str:
    """A fraction as percentage points, with one decimal."""
    return f"{100 * value:.1f}"


def signed(value: float) -> str:
    """``points`` with a sign: +1.2, −0.8."""
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 0.001 else "< 0.001"
