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

from poise.rewards import units

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
    (re.compile(r"\\(?:textbf|textit|textrm|textnormal|mbox)(?![a-zA-Z])"), r"\\text"),
    (re.compile(r"\\frac\s?(\d)\s?(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s?(\d)\s?\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s?(\{[^{}]*\})\s?(\d)(?!\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s?(\d)(?!\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\{,\}"), ""),
    (re.compile(r"\^\s?(?:\{\s?\\prime\s?\}|\\prime(?![a-zA-Z]))"), "'"),
]
_POWER = r"(?:\^\s?(?:\{\s?[23]\s?\}|[23]))?"
_TEXT = re.compile(rf"\\(text|mathrm)\s?\{{([^{{}}]*)\}}{_POWER}")
_WHOLE = re.compile(r"\\(?:text|mathrm|mathbf|mathit|operatorname)\s?\{([^{}]*)\}")
_UNIT = re.compile(rf"(?<=[\d}}\s])([A-Za-z]{{1,20}}(?:\.?(?:\s|\s?/\s?)[A-Za-z]{{1,20}}){{0,4}}\.?)\s?{_POWER}$")
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"([-+]?)\s*({_PLAIN})(?:\s*[eE]([-+]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?([-+]?\d+)\}}?)?", re.ASCII
)
_FRACTION = re.compile(
    rf"([-+]?)\s*(\d+(?=\s*\\|\s+\d))?\s*(?:\\frac\s?\{{\s*(-?\s*(?:{_PLAIN}))\s*\}}\s*\{{\s*(-?\s*(?:{_PLAIN}))\s*\}}|({_PLAIN})\s*/\s*({_PLAIN}))",
    re.ASCII,
)
# 2.5, and not 1,234.5, x^2.5 or 0.1\overline{6}
_POINT = re.compile(
    r"(?<![\d.^_])(?:(?<!,)|(?!\d{3}\.))(\d*)\.(\d+)(?![\d.]|\s?\\(?:overline|bar|[lc]?dots?(?![a-z])))", re.ASCII
)
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
    whole = _WHOLE.fullmatch(text)
    if whole:
        return _without_units(whole[1].strip())
    head = text
    while head.endswith(("}", "}^2", "}^3")) and (last := _last_text(head)):
        before = head[: last.start()].rstrip(" /")
        if not units.is_unit(last[2], upright=True, named=last[1] == "mathrm" or not _ends_plain(before)):
            return head
        head = before
    unit = _UNIT.search(head[-120:])
    if unit is None:
        return head
    before = head[: len(head) - len(unit[0])]
    plain, apart = number(before) is not None, before.endswith(" ")
    if (plain or apart) and units.is_unit(unit[1], upright=False, named=not (plain and apart)):
        return before.rstrip()
    return head


def _ends_plain(text: str) -> bool:
    """Whether units follow a plain number here, or such a number with further units."""
    last = _last_text(text)
    return number(text) is not None or (last is not None and number(text[: last.start()]) is not None)


def _last_text(text: str) -> re.Match[str] | None:
    start = max(text.rfind("\\text"), text.rfind("\\mathrm"))
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


def exact(text: str) -> str:
    """The formula with its decimals as fractions: computer algebra rounds decimals, and takes 3.141593 for pi."""
    return _POINT.sub(lambda found: rf"\frac{{{int(found[1] + found[2])}}}{{1{'0' * len(found[2])}}}", text)


def canonical(value: Fraction) -> str:
    """One text per value: ``5``, ``-1/3``."""
    return str(value)
