r"""Which words behind a number are units, and which change what it says.

``KNOWN`` units are dropped wherever they stand behind a number. In ``\text{…}``, or behind a blank if it is a plural of
four letters or more, any other plain word is a unit too (``5\text{ red balls}``, ``5 apples``), unless one of them
changes the value: ``million``, ``thirds``, ``or more``, ``p.m.``. A single letter is a unit in ``\text{…}`` and
``\mathrm{…}`` alone, and only if it is a known one: ``5\mathrm{i}`` and ``6xy`` are formulas.
"""

from __future__ import annotations

import re


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_UPRIGHT = _set("m g s h L l N J W V K C F in mi cc ms rad deg Pa")  # bare, they may be variables
_SHORT = _set("mm cm dm km ft yd mg kg oz lb lbs ml mL min mins hr hrs sec secs mph kph Hz kHz kPa kW kWh kJ USD EUR")
_LONG = _set(
    "inch inches foot feet yard mile meter metre centimeter centimetre millimeter millimetre kilometer kilometre"
    " gram kilogram milligram ounce pound ton tonne liter litre milliliter millilitre gallon quart pint cup"
    " hour minute second day week month year decade century centuries dollar cent dime nickel penny pennies pence euro"
    " degree radian unit point percent person people man men woman women child children student square cubic"
)
KNOWN = _SHORT | _LONG | {word + "s" for word in _LONG}
_JOINING = _set("per of a an each every the sq cu")
_NUMBERS = _set(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion"
    " quadrillion lakh crore dozen half halve halves third quarter twice double triple thrice"
)
_COMPARISONS = _set(
    "not no none never neither nor isn isnt except without more less fewer greater smaller larger higher lower least"
    " most than above below under over between beyond almost nearly exceed or false wrong incorrect negative"
)
_FORMULAS = _set(
    "pi sqrt log ln lg sin cos tan cot csc sinh cosh tanh arcsin arccos arctan exp mod modulo base remainder factorial"
    " squared cubed choose power root plus minus times infinity inf divided multiplied"
)
_TIMES = _set("am pm noon midnight morning afternoon evening bc ad bce ce north south east west")
_CHANGING = _NUMBERS | _COMPARISONS | _FORMULAS | _TIMES
_SENTENCE = _set("and to by up down if when unless for but is are was were does")  # no part of a unit's name
_ORDINAL = re.compile(r"[a-z]{2,}(?:th|ths)")  # 3 tenths, 7 hundredths


def changes_value(word: str) -> bool:
    """Whether a number with this word is another number, or not a plain one: ``million``, ``thirds``, ``not``."""
    word = word.lower()
    if word in KNOWN:
        return False
    return word in _CHANGING or word.removesuffix("s") in _CHANGING or bool(_ORDINAL.fullmatch(word))


def is_unit(text: str, upright: bool, named: bool = False) -> bool:
    r"""Whether every word belongs to a unit. ``upright``: it stands in ``\text``. ``named``: known units alone."""
    words = [word.removesuffix(".") for word in re.findall(r"[^\s/]+", text)]
    if not all(word.isascii() and word.isalpha() for word in words):
        return False
    if not upright and "/" in text:  # km/h: a letter may follow a unit that is known
        return words[:1] != [] and words[0] in KNOWN and all(word in _UPRIGHT | KNOWN for word in words[1:])
    verdicts = [_word(word, upright, named) for word in words if word not in _JOINING]
    return bool(verdicts) and all(verdicts)


def _word(word: str, upright: bool, named: bool) -> bool:
    if word in KNOWN or word.lower() in _LONG or word.lower().removesuffix("s") in _LONG:
        return True
    if upright and word in _UPRIGHT:
        return True
    if named or changes_value(word) or word.lower() in _SENTENCE:
        return False
    return len(word) > 2 if upright else len(word) > 3 and word.endswith("s")
