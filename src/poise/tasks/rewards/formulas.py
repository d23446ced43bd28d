r"""Convert numbers and simple LaTeX to a normal form, exactly and without evaluating code.

``clean`` normalizes the spelling of a formula: ``\dfrac12`` becomes ``\frac{1}{2}``, ``1{,}234`` becomes ``1234``, and
symbols that do not change the value are removed (spaces, ``\left``, ``\$``, degrees, ``\text{ cm}``). ``number`` reads
integers, decimals, fractions, mixed numbers and powers of ten as exact fractions; ``number_in`` also finds a number
among words ("5 a day"). Units are removed and not compared, and the percent sign is a unit: ``10%`` is 10, not 0.1.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

LONGEST = 500  # the maximum length of an answer, in characters
_SIGNS = str.maketrans("−–÷⁄∕’％\t\n\r", "--///'%   ", "°€£¥₹") | str.maketrans(
    {
        "×": r"\times ",
        "·": r"\cdot ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": r"\sqrt ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "½": " 1/2",
        "⅓": " 1/3",
        "⅔": " 2/3",
        "¼": " 1/4",
        "¾": " 3/4",
    }
)
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
_WHOLE = re.compile(r"\\(?:text|mathrm|mathbf|mathit|operatorname)\s?\{([^{}]*)\}")
_LAST_TEXT = re.compile(r"(?<=.)\\(text|mathrm)\s?\{([^{}]*)\}\s?(?:\^\s?\{?[23]\}?)?\s?/?\s?$")
_LETTERS = frozenset("mgshLlNJWVKCF")  # units in \mathrm: 5\mathrm{i} is a formula
_GLUED = re.compile(r"(?:[mcdk]m|[mk]?g|m[lL]|ft|in|lbs?|oz|hrs?|mins?|secs?|mph|kph|USD|EUR)(?:\^?[23])?(?!\w)")
_PLAIN = r"(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+(?![ \d]))|\d+)(?:\.\d*)?|\.\d+"
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
_ONE = re.compile(rf"[-+]?(?:{_PLAIN})(?:/\d+)?", re.ASCII)
_MEASURED = re.compile(r"(.*[\d.}])\s+((?:a\s)?[A-Za-z]{2,}(?:\s[A-Za-z]{2,})*)")  # \frac{1}{2} cups a day
_BESIDE = re.compile(r"[\w'\",.:;()\[\]?\s-]*")  # text that may surround an answer's number
_LARGEST_EXPONENT = 300
# Words that change a number or its meaning: "5 million", "not 5", "5 pm", "5 or more".
_CHANGING_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion"
    " quadrillion lakh crore dozen half halve halves third quarter twice double triple thrice"
    " not no none never neither nor isn isnt except without more less fewer greater smaller larger higher lower least"
    " most than but excluding above below under over between beyond almost nearly exceed or false wrong incorrect"
    " pi sqrt log ln lg sin cos tan cot csc sinh cosh tanh arcsin arccos arctan exp mod modulo base remainder factorial"
    " negative squared cubed choose power root plus minus times infinity inf divided multiplied"
    " am pm noon midnight morning afternoon evening bc ad bce ce north south east west"
)
_CHANGING = frozenset(_CHANGING_WORDS.split())
_ORDINAL = re.compile(r"(?!month|teeth|cloth|length|width|depth)[a-z]{2,}ths?")  # 3 tenths, 7 hundredths


@lru_cache(4096)  # every response of a group is compared with the same gold answer
def clean(text: str) -> str:
    """Normalize the spelling of a formula, with single spaces. The caller limits the length."""
    if _NUMBER.fullmatch(text):
        return text
    if not text.isascii():
        text = "".join(c for c in text.translate(_SIGNS) if unicodedata.category(c) not in ("Cf", "Cc", "Cs"))
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = " ".join(_DROPPED.sub(" ", text).split())
    while whole := _WHOLE.fullmatch(text):
        text = whole[1].strip()
    while (last := _LAST_TEXT.search(text)) and _is_unit(last[2], upright=last[1] == "text"):
        text = text[: last.start()].rstrip()
    return text.strip()


def _is_unit(text: str, upright: bool) -> bool:
    r"""Whether the text in ``\text`` (``upright``) or ``\mathrm`` after a formula is a unit."""
    words = re.split(r"[\s/]+", text.strip().replace(".", ""))
    return not changes_value(text) and all(
        word.isascii() and word.isalpha() and (upright or len(word) > 1 or word in _LETTERS) for word in words
    )


def changes_value(text: str) -> bool:
    """Whether a word in the text changes the number before or after it: ``million``, ``thirds``, ``not``, ``isn't``."""
    for word in re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower().replace(".", "")):
        if word in _CHANGING or word.removesuffix("s") in _CHANGING or word.endswith("n't") or _ORDINAL.fullmatch(word):
            return True
    return False


def number_in(text: str) -> Fraction | None:
    """Return the value of a clean text that is a number or contains exactly one number ("about 5 of them"), else None.

    Return None if the number is part of a formula (``x^5``, ``5k``, ``-(5)``) or a word changes the number ("not 5").
    """
    value = number(text[1:-1] if text.startswith("(") and text.endswith(")") else text)
    if value is None and (quantity := _MEASURED.fullmatch(text)) and not changes_value(quantity[2]):
        value = number(quantity[1])
    candidates = [] if value is not None else _ONE.findall(text)
    if len(candidates) != 1:
        return value
    before, _, after = text.partition(candidates[0])
    after = after[unit.end() :] if (unit := _GLUED.match(after)) else after
    after = re.sub(r"(?<=[A-Za-z]{2})/(?:[hs]\b)?", " ", after)  # km/h
    if after.startswith("'") and not before.endswith("'"):  # a prime
        return None
    if not (_BESIDE.fullmatch(before) and _BESIDE.fullmatch(after)):
        return None
    formula = re.search(r"\w$", before) or re.match(r"\w", after) or re.search(r"(?<!\w)-|-(?!\w)", f"{before} {after}")
    variable = re.search(r"(?<![\w'])[b-zB-HJ-Z](?!\w)", f"{before} {after}")  # any letter but a and I
    return None if formula or variable or changes_value(f"{before} {after}") else number(candidates[0])


def number(text: str) -> Fraction | None:
    """Return the exact value of a plain number, else None. ``text`` is a result of ``clean``, or a number in a text."""
    text = text.strip()
    if len(text) > LONGEST:
        return None
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    if match:
        exponent = match[3] or match[4] or "0"
        if len(exponent) > 4 or abs(int(exponent)) > _LARGEST_EXPONENT:
            return None
        value = _decimal(match[2]) * Fraction(10) ** int(exponent)
        return -value if match[1] == "-" else value
    match = _FRACTION.fullmatch(text)
    if not match:
        return None
    above, below = _decimal(match[3] or match[5]), _decimal(match[4] or match[6])
    if below == 0 or (match[2] and (above < 0 or below < 0)):
        return None
    value = above / below + (int(match[2]) if match[2] else 0)
    return -value if match[1] == "-" else value


def _decimal(text: str) -> Fraction:
    digits = text.replace(",", "").replace(" ", "")
    return Fraction(digits + "0" if digits.endswith(".") else digits)


def exact(text: str) -> str:
    """Replace decimals with fractions, because computer algebra rounds decimals and treats 3.141593 as pi."""
    return _POINT.sub(lambda match: rf"\frac{{{int(match[1] + match[2])}}}{{1{'0' * len(match[2])}}}", text)
