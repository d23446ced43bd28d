r"""Find the answer in a reply; no other module decides this. Every function's time is linear in the reply's length.

The answer is, in this order of priority: ``<answer>…</answer>``; the last ``\boxed{…}``; the last line that begins with
``####``, as in GSM8K; the text after the last "the answer is" or "answer:". If a form occurs several times, only the
last counts, so a reply cannot state several answers. Text before ``</think>`` is ignored, and a reply with an unclosed
``<think>`` has no answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

_PHRASE = re.compile(r"\banswer[\s*_]{0,6}(?:is|was|=|:)\s{0,4}:?", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]{0,8}####", re.MULTILINE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_NUMBER = re.compile(  # also 1,000 and 1 000, with any kind of space
    r"[-+]?(?:\d{1,3}(?:,\d{3}){1,100}(?!\d)|(?<!\d )\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3}){1,100}(?![\d ]\d|\d)|\d+)"
    r"(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+",
    re.ASCII,
)
_END = re.compile(r"[.!?;](?=\s)(?!\s+[a-z?\\+*/=^<>-])")  # a sentence's end; not in "60. or more" and "60. + 2"
_EDGES = " \t\r\n*_`"
_QUOTES = _EDGES + "\"'"


def final_answer(text: str) -> str | None:
    """Return the answer that a reply states, as written; None if the reply states no answer."""
    text = conclusion(text)
    inside = _tagged(text)
    if inside is not None:
        box = last_box(inside)
        return tidy(inside if box is None else box)
    box = last_box(text)
    if box is not None:
        return tidy(box)
    for pattern in (_HASHES, _PHRASE):
        if last := _last(pattern, text):
            return tidy(_sentence(text, last.end())) or None
    return None


def gold(text: str) -> str:
    r"""Return the answer in a gold column: after ``####`` (GSM8K), in the last box (MATH), or the whole text."""
    after = text.rpartition("####")[2].strip()
    if "####" in text and after and "\n" not in after:
        return tidy(after)
    box = last_box(text)
    return tidy(text if box is None else box)


def conclusion(text: str) -> str:
    """Return the text after the reasoning, or "" if a ``<think>`` is not closed."""
    after = text.rpartition("</think>")[2]
    return "" if "<think>" in after else after


def last_answer(text: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>`` after the reasoning; None if there is none."""
    inside = _tagged(conclusion(text))
    return None if inside is None else inside.strip()


def _tagged(text: str) -> str | None:
    """Return the text between the last ``</answer>`` and the ``<answer>`` before it; None if there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


def tag_fault(text: str, tags: Iterable[str]) -> str | None:
    """Describe the first tag that is missing or repeated; None if each tag occurs exactly once."""
    for tag in tags:
        if (times := text.count(tag)) != 1:
            return f"The tag {tag} must occur once, not {times} times." if times else f"The tag {tag} is missing."
    return None


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}``, ``\fbox{…}`` or ``\boxed 5``; None without a closed box."""
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
    """Return the last number in the text, as written; None if there is none."""
    last = _last(_NUMBER, text)
    return last[0] if last else None


def tidy(text: str) -> str:
    """Strip whitespace, quotes, asterisks, underscores and a final period from an answer. Keep the prime of f'."""
    text = text.strip(_EDGES)
    ends = _QUOTES if text.startswith("'") else _EDGES + '"'
    text = text.lstrip(_QUOTES).rstrip(ends)
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip(ends)
    return text


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _sentence(text: str, start: int) -> str:
    """Return the LaTeX formula at ``start``, or else the text up to the end of the line or sentence."""
    line = text[start : start + 2000].lstrip(_EDGES).split("\n", 1)[0]
    formula = re.match(r"\$\$(.+?)\$\$|\$((?:\\.|[^$\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", line)
    if formula:
        return next(inside for inside in formula.groups() if inside)
    return _END.split(line, maxsplit=1)[0]
