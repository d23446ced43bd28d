"""Expressions: exact values, and no text that is slow, deep or run as code."""

import re
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.tasks.rewards.arithmetic import ExpressionError, evaluate, number_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1+2)*3", 9),
        ("8 / 4 / 2", 1),
        ("10 - 4 - 3", 3),
        ("1/3*3", 1),
        ("2 * -3", -6),
        ("-(2 + 3)", -5),
        ("-2 - -3", 1),
        ("((((5))))", 5),
        ("1.5 × 4 − 2 ÷ 1", 4),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("-2 * 3 + 1", -5),
    ],
)
def test_values_are_exact(text, value):
    assert evaluate(text)[0] == value


def test_random_expressions_have_the_value_of_pythons_own_arithmetic():
    rng = Random(0)

    def expression(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randint(1, 99))
        minus = "-" if rng.random() < 0.1 else ""
        return f"{minus}({expression(depth - 1)} {rng.choice('+-*/')} {expression(depth - 1)})"

    for _ in range(200):
        text = expression(3)
        numbers = re.findall(r"\d+", text)
        try:
            expected = eval(re.sub(r"(\d+)", r"F(\1)", text), {"F": Fraction})
        except ZeroDivisionError:
            with pytest.raises(ExpressionError, match="division by zero"):
                evaluate(text)
            continue
        assert evaluate(text) == (expected, [Fraction(n) for n in numbers])


@pytest.mark.parametrize(
    "text",
    ["", "()", "1 2", "1 +", "+ 1", "(1", "1)", "2 ** 3", "1e5", "a", "__import__('os')", "1 / 0", "1..2", "1.2.3",
     "(" * 10**6, "-" * 10**6, "9" * 10**6, "(" * 150 + "1", "1 = 1", "٣ + 1", "9" * 13],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ExpressionError):
        evaluate(text)


@given(st.text(alphabet="0123456789+-*/(). ", max_size=60))
def test_any_text_has_a_value_or_an_error(text):
    try:
        value, numbers = evaluate(text)
    except ExpressionError:
        return
    assert isinstance(value, Fraction)
    assert numbers


def test_numbers_as_people_write_them():
    assert number_text(Fraction(7)) == "7"
    assert number_text(Fraction(-1, 2)) == "-0.5"
    assert number_text(Fraction(1, 3)) == "0.333333"
