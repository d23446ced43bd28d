r"""Numbers and simple LaTeX, compared exactly and without evaluating anything.

``clean`` brings a formula into a common spelling: ``\dfrac12`` is ``\frac{1}{2}``, ``1{,}234`` is ``1234``, and what
does not change a value is dropped (spaces, ``\left``, ``\$``, degrees, units). ``number`` reads integers, decimals,
fractions, mixed numbers and powers of ten as exact fractions. Units are dropped and not compared, and the percent sign
is a unit: ``10%`` is 10, and not 0.1.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

LONGEST = 500  # characters of an answer that are worth comparing
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ",
    "√": r"\sqrt ", "°": "", "≤": r"\le ", "≥": r"\ge ", "’": "'", "€": "", "£": "", "¥": "", "₹": "",
    "\t": " ", "\n": " ", "\r": " ",
    "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "％": "%",
})  # fmt: skip
_DROPPED = re.compile(
    r"\\left(?![a-zA-Z])\.?|\\right(?![a-zA-Z])\.?|\\(?:big|Big|bigg|Bigg)[lr]?(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])|\\textstyle(?![a-zA-Z])"
    r"|(?<!\\)\\[!,;: ]|\\\$|\$|~|(?<!\\)\\[()\[\]]|\^\s?\\circ(?![a-zA-Z])|\^\s?\{\s?\\circ\s?\}|\\degree(?![a-zA-Z])"
    r"|\\%|%|\\q?quad(?![a-zA-Z])"
)
_SPELLINGS = [
    (re.compile(r",\s?\\!\s?"), "{,}"),  # MATH writes 1,\!234
    (re.compile(r"\\(?:d|t|c)frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:leq|leqslant)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\(?:mathrm|textbf|textit|textrm|mathbf|mathit|mbox|operatorname)(?![a-zA-Z])"), r"\\text"),
    (re.compile(r"\\frac\s?(\d)\s?(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s?(\d)\s?\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s?(\{[^{}]*\})\s?(\d)(?!\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s?(\d)(?!\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\{,\}"), ""),
]
_TEXT = re.compile(r"\\text\s?\{([^{}]*)\}(?:\s?\^\s?(?:\{\s?[23]\s?\}|[23]))?")
_UNIT = re.compile(r"(?<=[\d}])\s*(?:[A-Za-z]{2,20}\.?\s?(?:/\s?)?){1,4}(?:\^\s?(?:\{\s?[23]\s?\}|[23]))?$")
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"([-+]?)\s*({_PLAIN})(?:\s*[eE]([-+]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?([-+]?\d+)\}}?)?", re.ASCII
)
_FRACTION = re.compile(
    rf"([-+]?)\s*(\d+(?=\s*\\|\s+\d))?\s*(?:\\frac\s?\{{\s*(-?\s*(?:{_PLAIN}))\s*\}}\s*\{{\s*(-?\s*(?:{_PLAIN}))\s*\}}|({_PLAIN})\s*/\s*({_PLAIN}))",
    re.ASCII,
)
# Words behind a number that are no unit: they change its value, or are part of a formula.
SCALES = frozenset({"hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "third", "quarter"})
_NO_UNITS = SCALES | {
    "pi", "sqrt", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "exp", "mod",
    "factorial", "squared", "cubed", "choose",
    "am", "pm", "or", "and", "to", "by", "over", "plus", "minus", "times", "root", "infinity", "inf",
}  # fmt: skip
_LARGEST_EXPONENT = 300


@lru_cache(4096)  # the right answer is asked for again for every response of a group
def clean(text: str) -> str:
    """The formula in the common spelling, with single blanks. The caller limits its length."""
    if _NUMBER.fullmatch(text):
        return text
    if not text.isascii():
        text = "".join(c for c in text.translate(_SIGNS) if unicodedata.category(c) not in ("Cf", "Cc", "Cs"))
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = " ".join(_DROPPED.sub(" ", text).split())
    return _without_units(text).strip()


def _without_units(text: str) -> str:
    whole = _TEXT.fullmatch(text)
    if whole:
        return whole[1]
    head = text
    while head.endswith(("}", "}^2", "}^3")) and (last := _last_text(head)):
        if last[1].strip().lower() in _NO_UNITS:
            return text
        head = head[: last.start()].rstrip(" /")
    unit = _UNIT.search(head[-120:])
    if unit:
        words = re.findall("[A-Za-z]+", unit[0])
        if not any(word.lower() in _NO_UNITS for word in words):
            head = head[: len(head) - len(unit[0])]
    return head if number(head) is not None else text


def _last_text(text: str) -> re.Match[str] | None:
    start = text.rfind("\\text")
    return _TEXT.fullmatch(text, start) if start > 0 else None


def number(text: str) -> Fraction | None:
    """The exact value of a plain number, or None. Takes what ``clean`` returns, or a number as it stands in a text."""
    text = text.strip()
    if len(text) > LONGEST:
        return None
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    found = _NUMBER.fullmatch(text)
    if found:
        exponent = found[3] or found[4] or "0"
        if len(exponent) > 4 or abs(int(exponent)) > _LARGEST_EXPONENT:
            return None
        value = _decimal(found[2]) * Fraction(10) ** int(exponent)
        return -value if found[1] == "-" else value
    found = _FRACTION.fullmatch(text)
    if not found:
        return None
    above, below = _decimal(found[3] or found[5]), _decimal(found[4] or found[6])
    if below == 0 or (found[2] and (above < 0 or below < 0)):
        return None
    value = above / below + (int(found[2]) if found[2] else 0)
    return -value if found[1] == "-" else value


def _decimal(text: str) -> Fraction:
    digits = text.replace(",", "").replace(" ", "")
    return Fraction(digits + "0" if digits.endswith(".") else digits)


def canonical(value: Fraction) -> str:
    """One text per value: ``5``, ``-1/3``."""
    return str(value)
