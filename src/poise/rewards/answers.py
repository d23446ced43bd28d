r"""Where in a reply its answer is: the one place that decides it. Everything here is linear in the length of the reply.

The order: ``<answer>…</answer>``; else the last ``\boxed{…}``; else the last line that begins with ``####``, as in
GSM8K; else what follows the last "the answer is" or "answer:". Only the last statement counts: a reply cannot hedge.
What stands before ``</think>`` is not looked at, and a reply has no answer while a ``<think>`` is not closed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

_PHRASE = re.compile(r"\banswer[\s*_]{0,6}(?:is|was|=|:)\s{0,4}:?", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]{0,8}####", re.MULTILINE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3}){1,100}(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+", re.ASCII)
_END = re.compile(r"[.!?;](?=\s)(?!\s+[a-z?\\+*/=^<>-])")  # of a sentence: "60. or more" and "60. + 2" go on
_EDGES = " \t\r\n*_`"
_QUOTES = _EDGES + "\"'"


def stated(text: str) -> str | None:
    """The answer that the reply states, as it is written; None where it states none."""
    text = conclusion(text)
    inside = tagged(text, "answer")
    if inside is not None:
        box = boxed(inside)
        return tidy(inside if box is None else box)
    box = boxed(text)
    if box is not None:
        return tidy(box)
    for pattern in (_HASHES, _PHRASE):
        if last := _last(pattern, text):
            return tidy(_sentence(text, last.end())) or None
    return None


def gold(text: str) -> str:
    r"""The answer in a gold column: behind ``####`` (GSM8K), in the last box (MATH), or the text itself."""
    after = text.rpartition("####")[2].strip()
    if "####" in text and after and "\n" not in after:
        return tidy(after)
    box = boxed(text)
    return tidy(text if box is None else box)


def conclusion(text: str) -> str:
    """What follows the reasoning; nothing while a ``<think>`` is not closed. Rewards and tasks share this rule."""
    after = text.rpartition("</think>")[2]
    return "" if "<think>" in after else after


def last_answer(text: str) -> str | None:
    """What stands in the last ``<answer>…</answer>`` behind the reasoning; None where there is none."""
    inside = tagged(conclusion(text), "answer")
    return None if inside is None else inside.strip()


def tagged(text: str, tag: str) -> str | None:
    """What stands between the last ``<tag>`` that is closed and its ``</tag>``."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def tag_fault(text: str, tags: Iterable[str]) -> str | None:
    """Which of the tags is missing, or there more than once; None where each occurs exactly once."""
    for tag in tags:
        if (times := text.count(tag)) != 1:
            return f"The tag {tag} must occur once, not {times} times." if times else f"The tag {tag} is missing."
    return None


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}`` or ``\fbox{…}``, or of ``\boxed 5``. None without one, or if open."""
    last = _last(_BOX, text)
    if last is None:
        return None
    rest = text[last.end() :].lstrip()
    if not rest.startswith("{"):
        word = re.match(r"[^\s${}\\]+", rest)
        return word[0] if word else None
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return rest[1 : brace.start()]
    return None


def last_number(text: str) -> str | None:
    """The last number in the text, as it is written."""
    last = _last(_NUMBER, text)
    return last[0] if last else None


def numbers(text: str) -> list[str]:
    """All numbers in the text, as they are written."""
    return _NUMBER.findall(text)


def tidy(text: str) -> str:
    """Without the blanks, quotes and stars around it, and without the full stop of its sentence. f' keeps its prime."""
    text = text.strip(_EDGES)
    ends = _QUOTES if text.startswith("'") else _EDGES + '"'
    text = text.lstrip(_QUOTES).rstrip(ends)
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip(ends)
    return text


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _sentence(text: str, start: int) -> str:
    """From ``start`` to the end of the line or sentence; of a formula in dollars the formula alone."""
    line = text[start : start + 2000].lstrip(_EDGES).split("\n", 1)[0]
    formula = re.match(r"\$\$(.+?)\$\$|\$((?:\\.|[^$\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", line)
    if formula:
        return next(inside for inside in formula.groups() if inside)
    return _END.split(line, maxsplit=1)[0]
