r"""Compare an answer with the gold answer, where possible without computer algebra.

These rules differ from the rules of math-verify, or return the same result faster:

- If the gold answer is a number, the answer must be a number too: ``2^{10}`` does not answer "how much is 2^10".
- Numbers are compared exactly: 0.333 is not 1/3. ``10%`` is 10, not 0.1. Units are not compared.
- ``x = 5`` and ``2 + 3 = 5`` are 5. ``0 = 5``, ``2x = 5`` and ``not x = 5`` are not.
- For tuples, lists and sets of numbers, the brackets must agree. A list without brackets is a set, in any order.
- ``32_5`` has digits and a base; both must be equal. f' is not f.
- Words are compared case-insensitively, variables case-sensitively: ``ab`` is not ``AB``.
"""

from __future__ import annotations

import re
from fractions import Fraction

from poise.tasks.rewards.arithmetic import ExpressionError, evaluate
from poise.tasks.rewards.formulas import LONGEST, changes_value, clean, number, number_in

_OR = re.compile(r"\\(?:text|mathrm)\s?\{\s*(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|;")
_WORD = re.compile(r"[A-Za-z]{4,}(?:[ '-][A-Za-z]+)*|(?i:no|yes|odd|all|one|two|six|ten|red|sun|mon)")  # abc is a·b·c
_EQUALS = re.compile(r"(?<![<>!:/\\=])(?<!\\not)(?<!\\not )=(?![=/])")
_VARIABLE = re.compile(
    r"[A-Za-z]'{0,3}(?:_\{?\w{1,3}\}?)?(?:\s?\(\s?\w{1,3}\s?\))?|\\[a-z]{2,8}"
)  # x, x_1, f(2), \theta
_UNKNOWN = re.compile(
    r"(?:\\(?:d?frac|sqrt|cdot|times)(?![A-Za-z])|[-+*/^(){}\s\d.|!])*"
)  # the rest of 2x + 1 without x
_TIMES = re.compile(r"\\(?:cdot|times)(?![A-Za-z])")
_POWER = re.compile(r"(?<![\d.)}^])(\d{1,4})\s?\^\s?\{?\s?(\d{1,2})(?![\d.])\s?\}?(?!\s?[\^!])")
_ARITHMETIC = re.compile(r"\\(?:frac|binom|cdot|times|div|sum|prod|[lr](?:floor|ceil))(?![A-Za-z])")
_MARKS = re.compile(r"'|\^\s?\{?\s?(?:T(?![A-Za-z])|\\top)")  # f' is not f, and A^T is not A
_ENDLESS = re.compile(r"\^[{(\s]*-?\d{5}|\d[})\s]*\^[{(\s]*\d+[})\s]*\^|\d{4}\s*!|!\s*!")  # 9^{99999}, 9^{9^9}, 9999!
_BASED = re.compile(r"(?:(?<![\dA-Za-z}])\((?=\w+\)_))?(\d[\dA-Fa-f]*)\)?_\{?(\d{1,2})\}?")  # (32)_5 is 32_{5}
_BASE = re.compile(r"\d\s?[)}]?\s?_")  # 32_5: math-verify drops the base
_BRACKETS = re.compile(r"(\\\{|[(\[]|)(.*?)(\\\}|[)\]]|)", re.DOTALL)
_DEEPEST = 30  # nested brackets


def equal(answer: str, gold: str) -> bool | None:
    """Whether answer and gold are equal; None if only computer algebra can tell."""
    if len(answer) > LONGEST or len(gold) > LONGEST:
        return bool(answer.split()) and answer.split() == gold.split()
    answer, gold = clean(answer), clean(gold)
    if _without_blanks(answer) == _without_blanks(gold):
        return bool(answer)
    if not _EQUALS.search(answer) and _VARIABLE.fullmatch(_EQUALS.split(gold)[0].strip()):
        gold = _right_side(gold)
    if (value := number_in(gold)) is not None:
        return answer_number(answer) == value
    if not _EQUALS.search(gold):
        if any(_is_number(part.strip()) for part in _EQUALS.split(answer)[:-1]):
            return False  # 0 = \pi and 1 = 2x state no formula
        answer = _right_side(answer)  # f'(x) = 2x gives 2x
    if _without_blanks(answer) == _without_blanks(gold):
        return bool(answer)
    if not answer or len(_MARKS.findall(answer)) != len(_MARKS.findall(gold)):
        return False
    if _BASE.search(answer) or _BASE.search(gold):
        return sorted(_without_blanks(answer).split(",")) == sorted(_without_blanks(gold).split(","))
    if answer.casefold() == gold.casefold() or _WORD.fullmatch(gold):
        return answer.casefold() == gold.casefold() and bool(_WORD.fullmatch(gold))
    if len(gold.strip("() ")) == 1 and _without_blanks(answer).strip("()") == gold.strip("() "):
        return True  # (B) is B
    return _compare_numbers(answer, gold)


def answer_number(text: str) -> Fraction | None:
    """Return the number in a clean answer: alone, among words, or on the right side of an equation that can be true."""
    *left, last = _EQUALS.split(text)
    value = number_in(last.strip())
    return None if value is None or not all(_may_be(part.strip(), value) for part in left) else value


def _may_be(text: str, value: Fraction) -> bool:
    """Whether the text before an equals sign can equal the number after it and is not a list."""
    try:
        powers = _POWER.sub(lambda match: str(int(match[1]) ** int(match[2])), _TIMES.sub("*", text))
        return evaluate(powers)[0] == value
    except ExpressionError:
        known = number_in(text)
    if known is not None:
        return known == value
    letter = re.search("[A-Za-z]", _ARITHMETIC.sub("", text))  # 5!/12 = 11 has no letter, and poise does not compute 5!
    return bool(letter) and not (changes_value(text) or _of_one_unknown(text) or "," in _OR.sub(",", text))


def _is_number(text: str) -> bool:
    """Whether a text is a number or an arithmetic expression of numbers."""
    try:
        evaluate(_TIMES.sub("*", text))
    except ExpressionError:
        return number(text) is not None
    return True


def _of_one_unknown(text: str) -> bool:
    """Whether a text is a formula in one variable.

    ``x + 1 = 5`` does not state x, but ``a + b = 5`` may be an answer.
    """
    letters = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", text))
    if _VARIABLE.fullmatch(text) or len(letters) != 1:
        return False
    return _UNKNOWN.fullmatch(text.replace(letters.pop(), "")) is not None


def _compare_numbers(answer: str, gold: str) -> bool | None:
    """Compare tuples, intervals, lists and sets of plain numbers; None for any other content."""
    ours, theirs = _numbers(answer), _numbers(gold)
    if ours is None or theirs is None or len(ours[1]) + len(theirs[1]) < 3:
        return None
    (brackets, values, names), (gold_brackets, golds, variables) = ours, theirs
    if brackets != gold_brackets:
        return False if len(values) > 1 and len(golds) > 1 else None
    if max(len({*names}), len({*variables})) > 1 and any(names) and any(variables):  # x=1, y=2
        return sorted(zip(names, values, strict=True)) == sorted(zip(variables, golds, strict=True))
    ordered = any(brackets) or max(len({*names}), len({*variables})) > 1
    return values == golds if ordered else set(values) == set(golds)


def _numbers(text: str) -> tuple[tuple[str, str], list[Fraction], list[str]] | None:
    """Parse a list into brackets, numbers, and the name before each number (by default the previous name, or "")."""
    match = _BRACKETS.fullmatch(text)
    assert match is not None
    items = [text] if number(text) is not None else _OR.sub(",", match[2]).split(",")
    values, names = [], [""]
    for item in filter(None, map(str.strip, items)):
        *name, last = _EQUALS.split(item)
        value = number_in(clean(last.strip()))
        if value is None:
            return None
        values.append(value)
        names.append(_without_blanks(name[0]) if name else names[-1])
    return (match[1].strip("\\{"), match[3].strip("\\}")), values, names[1:]


def worth_checking(pair: tuple[str, str, bool]) -> bool:
    """Whether to try computer algebra: False if the answer is too long, too deeply nested, or has huge numbers."""
    gold, answer, _ = pair
    if len(answer) > 4 * LONGEST or (_ENDLESS.search(answer) and not _ENDLESS.search(gold)):
        return False
    depth = deepest = 0
    for char in answer:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest <= _DEEPEST


def spelling(answer: str) -> str:
    """Return a normal form of the answer: equal answers usually have equal texts."""
    if len(answer) > LONGEST:
        return " ".join(answer[: 4 * LONGEST].split())
    answer = clean(answer)
    value = answer_number(answer)
    if value is not None:
        return str(value)  # one text per value: 5, -1/3
    return answer.casefold() if _WORD.fullmatch(answer) else _without_blanks(answer)


def _right_side(text: str) -> str:
    """Return the text after the last equals sign; return a list (x=1, y=2) unchanged."""
    *left, last = _EQUALS.split(text)
    return text if "," in _OR.sub(",", "".join(left)) or changes_value("".join(left)) else clean(last.strip())


def _without_blanks(text: str) -> str:
    text = text.replace(" ", "")
    return _BASED.sub(r"\1_{\2}", text) if "_" in text else text
