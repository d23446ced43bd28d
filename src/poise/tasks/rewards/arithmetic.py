"""Exact values of expressions with + - * / and parentheses. Nothing is evaluated as code.

The text is untrusted: its length and the size of its numbers are limited, and a loop with two stacks replaces
recursion, so no text is slow or exhausts the stack.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 400  # characters
_TOKEN = re.compile(r"\s*(?:(\d{1,12}(?:\.\d{1,12})?)(?![\d.])|([-+*/()]))", re.ASCII)
_SAME = str.maketrans("×·÷−–", "**/--")
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "minus": 3}


class ExpressionError(ValueError):
    """The text is not an expression, or the expression has no value."""


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """The value of an expression, and the numbers in it.

    >>> evaluate("(1 + 2) / 4")
    (Fraction(3, 4), [Fraction(1, 1), Fraction(2, 1), Fraction(4, 1)])
    """
    values: list[Fraction] = []
    pending: list[str] = []  # operators and parentheses whose right side is not read yet
    numbers: list[Fraction] = []
    operand = True  # whether a number may come next
    for number, sign in _tokens(text):
        if number:
            _expect(operand, f"an operator before {number}")
            numbers.append(Fraction(number))
            values.append(numbers[-1])
            operand = False
        elif sign == "(":
            _expect(operand, "an operator before (")
            pending.append(sign)
        elif sign == ")":
            _expect(not operand and "(" in pending, "an expression before )")
            while pending[-1] != "(":
                _apply(pending.pop(), values)
            pending.pop()
        elif operand:
            _expect(sign == "-", f"a number before {sign}")
            pending.append("minus")
        else:
            while pending and pending[-1] != "(" and _RANK[pending[-1]] >= _RANK[sign]:
                _apply(pending.pop(), values)
            pending.append(sign)
            operand = True
    _expect(not operand and "(" not in pending, "a number or ) at the end")
    while pending:
        _apply(pending.pop(), values)
    return values[0], numbers


def number_text(value: Fraction) -> str:
    """A number as people write it: whole, or with up to six decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0")


def _tokens(text: str) -> list[tuple[str, str]]:
    text = text.translate(_SAME).strip()
    if len(text) > LONGEST:
        raise ExpressionError(f"the expression is longer than {LONGEST} characters")
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"cannot read {text[at : at + 20].strip()!r}: write numbers, + - * / and parentheses")
        tokens.append((match[1] or "", match[2] or ""))
        at = match.end()
    return tokens


def _expect(fine: bool, what: str) -> None:
    if not fine:
        raise ExpressionError(f"expected {what}")


def _apply(sign: str, values: list[Fraction]) -> None:
    right = values.pop()
    if sign == "minus":
        values.append(-right)
        return
    if sign == "/" and right == 0:
        raise ExpressionError("division by zero")
    values.append(_APPLY[sign](values.pop(), right))
