r"""Right and wrong answers by the thousand: do the rewards ``number`` and ``math`` accept a wrong one?

python experiments/tasks/answer_fuzz.py 30000 0    # answers for each reward, and a seed; writes answer_fuzz.json

The rule is independent of the rewards: every answer is written from a template whose value is computed here, with
fractions, while it is written. An answer is right if that value is the gold one. What has no single value ("5 or 6",
``x^5``, "not 5") is right for no number.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from math import factorial
from pathlib import Path
from random import Random
from typing import Any

from poise import rewards

Answer = tuple[str, Any]  # a text, and its value: equal values are equal answers; None: it has none
Maker = Callable[[Random], tuple[str, Any, Answer]]  # a gold text, its value, and an answer
WRAPS = (
    r"So it is \boxed{%s}.", "<answer>%s</answer>", "Hm.\n#### %s", r"<think>It is 7.</think>$\boxed{%s}$",
    r"\[ \boxed{%s} \]", "<think>x = 3</think><answer> %s </answer>",
)  # fmt: skip
WORDS = ("apples", "dollars", "cm", "miles per hour", "people", "a day", "red balls", "square feet")


def numeral(value: Fraction, rng: Random) -> str:
    """One of the ways to write a number."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    whole, above, below = size.numerator // size.denominator, size.numerator, size.denominator
    ways = [f"{sign}\\frac{{{above}}}{{{below}}}", f"{sign}{above}/{below}", f"{sign}\\dfrac{{{above}}}{{{below}}}"]
    if below == 1:
        ways = [f"{sign}{whole}", f"{sign}{whole:,}", f"{sign}{whole}.0", f"{sign}{whole:,}".replace(",", "{,}")]
        ways += [f"{sign}{whole:,}".replace(",", " "), f"{sign}{whole}."]
    elif whole:
        ways += [f"{sign}{whole}\\frac{{{above % below}}}{{{below}}}", f"{sign}{whole} {above % below}/{below}"]
    if 10**6 % below == 0:
        decimal = f"{float(size):.6f}".rstrip("0").rstrip(".")
        ways += [sign + decimal, f"{sign}{float(size):.6f}"]
        ways += [rf"{sign}{decimal} \times 10^0", f"{sign}{decimal}e0"]
    return rng.choice(ways)


def other(value: Fraction, rng: Random) -> Fraction:
    """A value near by, in size or in writing."""
    near = (value + 1, -value, value * 10, value / 10, value + Fraction(1, 1000), value * 100, value / 100, 2 * value)
    far = (1 / value if value else Fraction(3), value - rng.randint(1, 99), Fraction(rng.randint(-999, 999), 7))
    return rng.choice(near + far)


def spelled(value: Fraction, rng: Random) -> Answer:
    """A number as answers have it: alone, with a unit, in a sentence, behind an equals sign."""
    text, a = numeral(value, rng), rng.randint(1, 50)
    ways = [
        text,
        text,
        f"{text} {rng.choice(WORDS)}",
        rf"{text}\text{{ {rng.choice(WORDS)}}}",
        f"${text}$",
        f"({text})",
    ]
    ways += [f"x = {text}", f"n={text}", rf"\text{{Total}} = {text}", f"{text}^\\circ", rf"{text}\%", f"**{text}**"]
    ways += [f"{value - a} + {a} = {text}"] if value.denominator == 1 else []
    return rng.choice(ways), value


def equation(value: Fraction, rng: Random) -> Answer:
    """A sum or product on the left, mostly another one than the number on the right."""
    text, a = numeral(value, rng), rng.randint(1, 50)
    left = [(f"{value + a}", value + a), (f"{value} + {a}", value + a), (f"{value + 2 * a} - {a}", value + a)]
    left += [(f"{a}^2", Fraction(a * a)), (f"2^{{{a}}}", Fraction(2**a)), (f"\\frac{{{3 * a}}}{{3}}", Fraction(a))]
    left += [(f"{a}*{value} + {a}", a * value + a), ("0 + -1", Fraction(-1)), (f"{value - a} + {a}", value)]
    said, found = rng.choice(left)
    return f"{said} = {text}", value if found == value else None


def formula(value: Fraction, rng: Random) -> Answer:
    """The digits of a number inside something that has another value, or none."""
    text = numeral(value, rng)
    n = value if value.denominator == 1 and 0 <= value <= 12 else None
    a = rng.choice([other for other in range(2, 10) if other != value])
    valued: list[Answer] = [
        (f"-({text})", -value), (f"−[{text}]", -value), (f'-"{text}"', -value), (f"- ({text})", -value),
        (f"-(-{abs(value)})", abs(value)), (f"{a} - ({text})", a - value), (f"({text})^2", value**2),
        (f"{a}({text})", a * value), (rf"{a} \cdot {text}", a * value), (f"{text} + {a}", value + a),
        (f"{text} million", value * 10**6), (f"{text} dozen", value * 12), (f"half of {text}", value / 2),
        (f"{text}k", None), (f"{text}e{a}", None if value else value), (f"{text} hundredths", value / 100),
        (f"twice {text}", 2 * value),
        (f"minus {text}", -value), (f"negative {text}", -value), (f"{text} squared", value**2),
        (f"－({text})", -value), (f"—({text})", -value), (f"‐({text})", -value), (f"-\\left({text}\\right)", -value),
        (f"-{{({text})}}", -value), (f"-\\$({text})", -value), (f"- - {abs(value)}", abs(value)),
        (f"-+{abs(value)}", -abs(value)),
        (f"1/({text})", 1 / value if value else None), (f"{text} + x", None),
        (f"{text} \\times 10^{{{a}}}", None if value else value), (f"{text} (not {a})", value),
        (f"{text} x 10^2", value * 100), (f"{text} - {a}", value - a),
    ]  # fmt: skip
    valued += [(f"{n}!", Fraction(factorial(int(n)))), (f"{n}^{a}", n**a)] if n is not None else []
    bare = [
        f"x^{{{text}}}", f"x^{abs(value)}", f"{text}x", f"{text}\\pi", rf"\sqrt{{{text}}}", rf"\log {text}", f"{text}'",
        f"{text}_7", f"x_{{{text}}}", f"x \\ne {text}", f"x != {text}", f"x > {text}", rf"x \le {text}", f"±{text}",
        rf"\pm {text}", f"|x| = {text}, {a}", f"{text} \\pmod {{7}}", f"{text} or {text}1",
        f"{text}, {other(value, rng)}",
        f"not {text}", f"it is not {text}", f"not x = {text}", f"more than {text}", f"{text} or more",
        f"less than {text}",
        f"at least {text}", f"{text} pm", f"{text}:30", f"{text} i", f"{text}i", f"a/{text}", f"{text}/a",
        f"2x = {text}",
        f"-x = {text}", f"x^2 = {text}", f"x + 1 = {text}", f"between {text} and {a}", f"{text} thirds",
        f"{text} mod 7",
        f"{text} choose 2", f"{text}\\overline{{3}}", f"f({text})", f"{text.rstrip('.')} {text}", f"{text}²",
        f"{text}½",
        f"\\frac{{{text}}}{{x}}", f"isn't {text}", f"anything but {text}", f"{text} ?? no, {a}", f"[{text}, {a}]",
        f"\\{{{text}, {a}\\}}", f"{text} < x", f"no. {text} is wrong", f"{a}.{text}.{a}", f"{text}\\infty",
        f"{text} to {a}", f"{text}-{a}", f"{text}–{a}", f"{text} out of {a}", f"{text} and a half", f"{text} plus x",
        f"0x{text}", f"{text} per {a}", f"{text}′", f"{text}″", f"{text}^{{\\prime}}", f"not: {text}",
        f"never {text}", f"{text} is not right", f"x \\approx {text} \\pm 1", f"\\text{{not }}{text}",
        f"\\lnot({text})",
        f"y = x + {text}", f"y = {text}x", f"x/2 = {text}", f"\\sqrt{{x}} = {text}", f"x! = {text}", f"3 - x = {text}",
        f"{a} = {a + 1} = {text}", f"x = {a}, y = {text}", f"x = {a} = {text}", f"x \\neq {text}", f"x =/= {text}",
        f"{text} = {a} \\text{{ is false}}", f"\\frac{{d}}{{dx}} {text}", f"\\bar{{{text}}}", f"{text}^{{-1}}",
        f"\\overline{{{text}}}", f"\\binom{{{text}}}{{2}}", f"\\log_2 {text}",
        f"{text}\\sqrt{{2}}",
        f"x_{text}", f"x_{abs(value)}", f"a_{abs(value)} = {a}", f"2^{a} + 2000000001 = {text}",
        f"{a}! + {10**9 + 7} = {text}",
        f"\\binom{{3}}{{2}} + {10**9 + 7} = {text}", f"\\sqrt{{{10**9 + 7}}} = {text}", f"x^{{{a}}} = {text}",
        f"n!/2 = {text}",
        f"sin {text}", f"\\lfloor x \\rfloor + {text}", f"{text}^x", f"{text}!!", f"\\neg {text}", f"¬{text}",
    ]  # fmt: skip
    return rng.choice([*valued, *((each, None) for each in bare * 2)])


def numeric(rng: Random) -> tuple[str, Any, Answer]:
    """A gold number, its value, and an answer to it."""
    kinds = [
        Fraction(rng.randint(-30, 99)),
        Fraction(rng.randint(-(10**6), 10**7)),
        Fraction(rng.randint(-999, 9999), 100),
    ]
    value = rng.choice([*kinds, Fraction(rng.randint(-40, 40), rng.randint(2, 12))])
    make = rng.choice([spelled, lambda v, r: spelled(other(v, r), r), formula, formula, equation])
    gold = numeral(value, rng)
    return rng.choice([gold, gold, f"2 + 2 = <<2+2=4>>4\n#### {gold}"]), value, make(value, rng)


def polynomial(rng: Random) -> tuple[str, Any, Answer]:
    """A gold a·x² + b·x + c; answers with other coefficients, letters, signs and primes. The value is all of these."""
    a, b, c = (rng.choice([n for n in range(-9, 10) if n]) for _ in range(3))
    value = ("x", a, b, c)
    changed = rng.choice([
        value, value, ("y", a, b, c), ("x", -a, b, c), ("x", a, b, c + 1), ("x", b, a, c), ("x", a, b, -c),
        ("x", a, b + 1, c)
    ])  # fmt: skip
    text = written(changed, rng)
    if rng.random() < 0.3:  # something else altogether
        others = [
            f"{text}'",
            f"({text})'",
            f"-({text})",
            f"{text} = 0",
            f"({text})^2",
            f"\\frac{{1}}{{{text}}}",
            f"{text} + C",
        ]
        return written(value, Random(0)), value, (rng.choice(others), None)
    return written(value, Random(0)), value, (text, changed)


def written(value: tuple[str, int, int, int], rng: Random) -> str:
    letter, *numbers = value
    terms = [f"{n:+d}{power}" for n, power in zip(numbers, (f"{letter}^2", letter, ""), strict=True)]
    rng.shuffle(terms)
    return "".join(terms).removeprefix("+")


def listing(rng: Random) -> tuple[str, Any, Answer]:
    """A gold tuple, interval or set; answers with another order, other brackets or other numbers."""
    numbers = rng.sample(range(-20, 40), rng.randint(2, 3))
    kinds: dict[str, Callable[[list[int]], Any]] = {"()": tuple, "[]": tuple, r"\{\}": frozenset, "": frozenset}
    kind = rng.choice([*kinds])
    said = list(numbers)
    if rng.random() < 0.5:
        said = rng.choice([rng.sample(said, len(said)), [*said, 41], said[1:], [50, *said[1:]]])
    said_kind = rng.choice([kind, kind, *kinds])
    if {kind, said_kind} == {"", r"\{\}"}:
        said_kind = kind  # whether a list without braces is the set with them is a convention
    return enclosed(numbers, kind), (kind, kinds[kind](numbers)), (
        enclosed(said, said_kind), (said_kind, kinds[said_kind](said))
    )  # fmt: skip


def enclosed(numbers: list[int], kind: str) -> str:
    half = len(kind) // 2
    return kind[:half] + ", ".join(map(str, numbers)) + kind[half:]


def fuzz(reward: str, makers: list[Maker], count: int, seed: int) -> dict[str, Any]:
    """Counts for one reward, and up to 40 of the wrong answers that it accepts and the right ones that it refuses."""
    rng = Random(f"{reward} {seed}")
    rows = []
    for _ in range(count):
        gold, value, (text, said) = rng.choice(makers)(rng)
        rows.append((gold, text, rng.choice(WRAPS) % text, said is not None and said == value))
    found = rewards.get(reward)(completions=[reply for *_, reply, _ in rows], answer=[gold for gold, *_ in rows])
    wrong = [(gold, text) for (gold, text, _, right), paid in zip(rows, found, strict=True) if paid and not right]
    refused = [(gold, text) for (gold, text, _, right), paid in zip(rows, found, strict=True) if right and not paid]
    right = sum(row[-1] for row in rows)
    return {
        "answers": count, "right": right, "wrong": count - right, "wrong_accepted": len(wrong),
        "right_refused": len(refused), "accepted": wrong[:40], "refused": refused[:40],
        "kinds_refused": Counter(re.sub(r"\d+", "9", text) for _, text in refused).most_common(12),
    }  # fmt: skip


def main() -> None:
    count, seed = (int(text) for text in (*sys.argv[1:3], *("30000", "0")[len(sys.argv) - 1 :]))
    makers: dict[str, list[Maker]] = {"number": [numeric], "math": [*[numeric] * 12, listing, listing, polynomial]}
    found = {reward: fuzz(reward, made, count, seed) for reward, made in makers.items()}
    for reward, counts in found.items():
        print(reward, {name: value for name, value in counts.items() if isinstance(value, int)})
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
