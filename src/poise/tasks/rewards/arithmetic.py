"""Compute exact values of expressions with + - * / and parentheses, without evaluating code.

The text is untrusted. The lengths of the text and of its numbers are limited, and a loop with two stacks replaces
recursion, so no text is slow to evaluate or overflows the call stack.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 400  # characters
_TOKEN = re.compile(r"\s*(?:(\d{1,12}(?:\.\d{1,12})?)(?![\d.])|(.))", re.ASCII | re.DOTALL)  # a number or a sign
_SAME = str.maketrans("×·÷−–", "**/--")
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_RANK = {"(": 0, ")": 1, "+": 2, "-": 2, "*": 3, "/": 3, "minus": 4}


class ExpressionError(ValueError):
    """The text is not an expression, or the expression has no value."""


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """Return the value of an expression, and the numbers in the expression.

    >>> evaluate("(1 + 2) / 4")
    (Fraction(3, 4), [Fraction(1, 1), Fraction(2, 1), Fraction(4, 1)])
    """
    text = text.translate(_SAME).strip()
    if len(text) > LONGEST:
        raise ExpressionError(f"the expression is longer than {LONGEST} characters")
    values: list[Fraction] = []
    numbers: list[Fraction] = []
    pending = ["("]  # operators and parentheses whose right side has not been read
    operand = True  # whether a number or an opening parenthesis must come next
    for number, sign in _TOKEN.findall(f"{text})"):
        sign = "minus" if sign == "-" and operand else sign
        opens = sign in ("(", "minus")
        if operand != bool(number or opens) or not (number or (pending and sign in _RANK)):
            raise ExpressionError(f"cannot read {text!r}: write numbers, + - * / and parentheses")
        if number:
            numbers.append(Fraction(number))
            values.append(numbers[-1])
        else:
            while not opens and _RANK[pending[-1]] >= _RANK[sign]:
                _apply(pending.pop(), values)
            if sign == ")":
                pending.pop()
            else:
                pending.append(sign)
        operand = not number and sign != ")"
    if pending:
        raise ExpressionError("a parenthesis is not closed")
    return values[0], numbers


def number_text(value: Fraction) -> str:
    """Format a number as an integer, or with up to six decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0")


def _apply(sign: str, values: list[Fraction]) -> None:
    right = values.pop()
    if sign == "minus":
        values.append(-right)
    elif sign == "/" and right == 0:
        raise ExpressionError("division by zero")
    else:
        values.append(_APPLY[sign](values.pop(), right))
