r"""Whether an answer is the right one, as far as that can be told without computer algebra.

Decided here, on purpose:

- Where the right answer is a plain number, the answer must be one too: ``2^{10}`` is no answer to "how much is 2^10".
- Numbers are compared exactly: 0.333 is not 1/3. ``10%`` is 10, and not 0.1. Units are not compared.
- Brackets count: ``(1,2)``, ``[1,2]`` and ``\{1,2\}`` are three things. A list without brackets is a set, in any order.
- ``x = 5`` is 5 where the right answer names no variable, and 5 is ``x = 5`` where it does.
- ``32_5`` is a number with its base: the same digits and the same base, or wrong. f' is not f.
- Words are compared without regard to case.
"""

from __future__ import annotations

import re
from fractions import Fraction

from poise.rewards.formulas import LONGEST, canonical, clean, number

_OR = re.compile(r"\\(?:text|mathrm)\s?\{\s*(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|;")
_WORDS = re.compile(r"[A-Za-z]{4,}(?:[ '-][A-Za-z]+)*")  # shorter ones may be products: abc
_SHORT_WORDS = frozenset({"no", "yes", "odd", "all", "one", "two", "six", "ten", "red", "sun", "mon"})
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w{1,3}\}?)?(?:\s?\(\s?\w{1,3}\s?\))?|\\[a-z]{2,8}")  # x, x_1, f(2), \theta
_ENDLESS = re.compile(r"\^[{(\s]*-?\d{5}|\d[})\s]*\^[{(\s]*\d+[})\s]*\^|\d{4}\s*!|!\s*!")  # 9^{99999}, 9^{9^9}, 9999!
_NOT_EQUAL = re.compile(r"[<>!:/\\]$|\\not\s?$")  # before an equals sign: no equation
_BASED = re.compile(r"(?:(?<![\dA-Za-z}])\((?=\w+\)_))?(\d[\dA-Fa-f]*)\)?_\{?(\d{1,2})\}?")  # (32)_5 is 32_{5}
_BASE = re.compile(r"\d\s?[)}]?\s?_")  # 32_5: math-verify drops the base
_DEEPEST = 30  # brackets in brackets
_OPENING, _CLOSING = "([{", ")]}"


def equal(answer: str, gold: str) -> bool | None:
    """Whether the two are the same; None where it takes computer algebra to tell."""
    if len(answer) > LONGEST or len(gold) > LONGEST:
        return bool(answer.split()) and answer.split() == gold.split()
    answer, gold = clean(answer), clean(gold)
    if _squeezed(answer) == _squeezed(gold):
        return bool(answer)
    if not answer or _primes(answer, gold):
        return False
    verdict = _compare(answer, gold)
    return False if verdict is None and (_BASE.search(answer) or _BASE.search(gold)) else verdict


def _primes(answer: str, gold: str) -> bool:
    """Whether one has more primes than the other, as f' and f. An answer may name what it gives: f'(x) = 2x."""
    if (_equals(answer) is None) != (_equals(gold) is None):
        answer, gold = right_side(answer), right_side(gold)
    return answer.count("'") != gold.count("'")


def worth_checking(answer: str, gold: str) -> bool:
    """Whether computer algebra has a chance: not where the answer nests too deep, or asks for numbers without end."""
    if bool(_ENDLESS.search(answer)) and not _ENDLESS.search(gold):
        return False
    depth = deepest = 0
    for char in answer:
        depth += (char in _OPENING) - (char in _CLOSING)
        deepest = max(deepest, depth)
    return deepest <= _DEEPEST


def spelling(answer: str) -> str:
    """The answer in a form in which equal answers are, as a rule, equal texts."""
    if len(answer) > LONGEST:
        return " ".join(answer[: 4 * LONGEST].split())
    answer = clean(answer)
    opening, items, closing = _collection(answer)
    values = _values(items)
    if values is None:
        return answer.casefold() if _WORDS.fullmatch(answer) else _squeezed(answer)
    if opening not in ("", r"\{"):
        return opening + ",".join(canonical(value) for _, value in values) + closing
    if len({name for name, _ in values}) > 1:
        return ",".join(f"{name}={canonical(value)}" for name, value in sorted(values))
    return ",".join(canonical(value) for value in sorted({value for _, value in values}))


def _compare(answer: str, gold: str) -> bool | None:
    value = number(gold)
    if value is not None:
        return number(right_side(answer)) == value
    if _WORDS.fullmatch(gold):
        return answer.casefold() == gold.casefold()
    if gold.isalpha() and len(gold) > 1 and answer.casefold() == gold.casefold():
        return gold.casefold() in _SHORT_WORDS  # ab is not AB
    if len(gold.strip("() ")) == 1 and _squeezed(answer).strip("()") == gold.strip("() "):
        return True  # (B) is B
    (opening, items, closing), right = _collection(answer), _collection(gold)
    if len(items) > 1 or len(right[1]) > 1:
        return _compare_items((opening, items, closing), right)
    if _equals(gold) is None:
        answer = right_side(answer)
    elif _equals(answer) is None and _VARIABLE.fullmatch(gold[: _equals(gold)].strip()):
        gold = right_side(gold)
    else:
        return None
    value = number(gold)
    return number(answer) == value if value is not None else (_squeezed(answer) == _squeezed(gold) or None)


def _compare_items(answer: tuple[str, list[str], str], gold: tuple[str, list[str], str]) -> bool | None:
    brackets = [(opening.strip("\\{"), closing.strip("\\}")) for opening, _, closing in (answer, gold)]
    if brackets[0] != brackets[1]:
        return False if len(answer[1]) > 1 and len(gold[1]) > 1 else None
    said, right = _values(answer[1]), _values(gold[1])
    if said is not None and right is not None:
        return _compare_values(said, right, ordered=brackets[0] != ("", ""))
    if len(answer[1]) != len(gold[1]):
        return False if brackets[0] != ("", "") else None
    if brackets[0] == ("", ""):
        same = sorted(map(_squeezed, answer[1])) == sorted(map(_squeezed, gold[1]))
        return True if same else None
    verdicts = [_squeezed(a) == _squeezed(g) or _compare(a, g) for a, g in zip(answer[1], gold[1], strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def _values(items: list[str]) -> list[tuple[str, Fraction]] | None:
    """Variable ("" without one) and value of each item; None if one has no plain value. ``x=1, 2`` is x twice."""
    name, found = "", []
    for item in items:
        sign, value = _equals(item), number(clean(right_side(item)))
        if value is None:
            return None
        name = name if sign is None else _squeezed(item[:sign])
        found.append((name, value))
    return found


def _compare_values(said: list[tuple[str, Fraction]], right: list[tuple[str, Fraction]], ordered: bool) -> bool | None:
    names = [{name for name, _ in side if name} for side in (said, right)]
    values = [[value for _, value in side] for side in (said, right)]
    if max(map(len, names)) > 1 and names[0] and names[1]:  # x=1, y=2
        return sorted(said) == sorted(right)
    if ordered or max(map(len, names)) > 1:
        return values[0] == values[1]
    if names[0] and names[1] and names[0] != names[1]:
        return None
    return set(values[0]) == set(values[1])


def _collection(text: str) -> tuple[str, list[str], str]:
    """Its brackets and its items: one item, if it is no collection. Commas in 1,234 separate nothing."""
    text = _OR.sub(",", text).strip()
    if number(text) is not None:
        return "", [text], ""
    for start, ends in ((r"\{", (r"\}",)), ("(", (")", "]")), ("[", ("]", ")"))):
        for end in ends:
            inside = text[len(start) : len(text) - len(end)]
            if text.startswith(start) and text.endswith(end) and len(_split(inside)) > 1 and _balanced(inside):
                return start, _split(inside), end
    return "", _split(text), ""


def _split(text: str) -> list[str]:
    """Cut at the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in _OPENING) - (char in _CLOSING)
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part] or [text]


def _balanced(text: str) -> bool:
    """Whether no bracket is closed that was opened outside."""
    depth = 0
    for char in text:
        depth += (char in _OPENING) - (char in _CLOSING)
        if depth < 0:
            return False
    return True


def right_side(text: str) -> str:
    """What follows the last equals sign; of a list (x=1, y=2) all of it."""
    sign = _equals(text)
    return text if sign is None or len(_split(_OR.sub(",", text[:sign]))) > 1 else clean(text[sign + 1 :])


def _equals(text: str) -> int | None:
    """Where its last equals sign is that stands outside brackets."""
    depth, last = 0, None
    for i, char in enumerate(text):
        depth += (char in _OPENING) - (char in _CLOSING)
        if char == "=" and depth == 0 and not _NOT_EQUAL.search(text[max(i - 6, 0) : i]) and text[i + 1 : i + 2] != "/":
            last = i
    return last


def _squeezed(text: str) -> str:
    text = text.replace(" ", "")
    return _BASED.sub(r"\1_{\2}", text) if "_" in text else text
