"""The rewards exact, choice, number, regex, format and overlong. ``math`` is in ``maths.py``."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from poise._lib.errors import check_range, short
from poise.tasks.rewards import answers, equality, formulas
from poise.tasks.rewards.base import gold_of, text_of, wrong_answer_feedback


class Compares:
    """A reward of 1.0 for the right answer and 0.0 for any other answer; None for a row without a right answer.

    ``column`` names the column with the right answer (default: a column with a common name).
    """

    __name__: ClassVar[str]
    column: str | None
    form: ClassVar[str] = "Write the answer between <answer> and </answer>."

    def __call__(self, /, completions: list[Any], **columns: Any) -> list[float | None]:
        """Return one value per completion."""
        golds = gold_of(self.__name__, columns, self.column, len(completions))
        texts = [text_of(completion) for completion in completions]
        return [self._value(text, gold) if gold else None for text, gold in zip(texts, golds, strict=True)]

    def answer(self, text: str) -> str | None:
        """Return the reply's answer in a normal form, so that equal answers have equal texts."""
        raise NotImplementedError

    def gold(self, text: str) -> str | None:
        """Return the right answer in the same form as ``answer``."""
        raise NotImplementedError

    def feedback(self, text: str, value: float) -> str:
        """Return the wrong answer that was read, or how to write an answer; "" if the answer is right."""
        return "" if value >= 1 else wrong_answer_feedback(self.answer(text), text, self.form)

    def _value(self, text: str, golds: list[str]) -> float:
        answer = self.answer(text)
        return float(answer is not None and any(answer == self.gold(gold) for gold in golds))


@dataclass(frozen=True)
class Exact(Compares):
    """1.0 if the stated answer, or else the whole reply, equals the gold text up to whitespace; else 0.0.

    With ``ignore_case`` upper and lower case are equal.
    """

    ignore_case: bool = False
    column: str | None = None
    __name__ = "exact"

    def answer(self, text: str) -> str | None:
        """Return the stated answer, or the whole reply, with single spaces."""
        answer = answers.final_answer(text)
        return self._spelling(answers.tidy(answers.conclusion(text)) if answer is None else answer)

    def gold(self, text: str) -> str | None:
        """Return the gold text in the same spelling."""
        return self._spelling(answers.gold(text))

    def _spelling(self, text: str) -> str | None:
        text = unicodedata.normalize("NFC", " ".join(text.split()))
        text = text.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", text) else text  # an integer in a float column
        return (text.casefold() if self.ignore_case else text) or None


@dataclass(frozen=True)
class Choice(Compares):
    """1.0 if the answer is the right one of ``letters``: ``B``, ``(B)``, ``B. Paris``, ``option B``.

    A number in the gold column is an index from 0, as in MMLU.
    """

    letters: str = "ABCDE"
    column: str | None = None
    __name__ = "choice"
    form = "Write one letter between <answer> and </answer>."

    def __post_init__(self) -> None:
        if not (isinstance(self.letters, str) and self.letters.isalpha() and self.letters.isupper()):
            raise ValueError(f"choice: letters must be capital letters such as 'ABCD', got {short(self.letters)}")

    def answer(self, text: str) -> str | None:
        """Return the stated letter, or the letter at the start of the reply."""
        answer = answers.final_answer(text)
        return self._letter(answers.conclusion(text) if answer is None else answer)

    def gold(self, text: str) -> str | None:
        """Return the letter in the gold column."""
        text = text.strip()
        if text.isdecimal() and len(text) < 3 and int(text) < len(self.letters):
            return self.letters[int(text)]
        return self._letter(answers.gold(text))

    def _letter(self, text: str) -> str | None:
        text = text.replace("\\text", " ").strip(" \t\r\n*_`\"'$({[")[:200]
        match = re.match(
            rf"(?:(?:option|choice|answer)\s{{0,4}}:?\s{{0,4}})?[({{[*]{{0,4}}([{self.letters}])(?![\w'’])",
            text,
            re.IGNORECASE,
        )
        if not match or (match[1].islower() and len(text) > 3):  # "a dog" is not a choice
            return None
        rest = text[match.end() :]
        return None if re.match(r"\s+[a-z]", rest) or self._another(match[1], rest) else match[1].upper()

    def _another(self, letter: str, rest: str) -> bool:
        """Whether a second letter makes the answer ambiguous: ``A, B``, ``A/B``, ``(A) and (B)``, ``A B``."""
        letters = self.letters if letter.isupper() else self.letters.lower()
        separator = r"[\s)\]}*_$.({[]*(?:(?:[,/;&+|\-]|and\b|or\b)[\s)\]}*_$({[]*)+"
        match = re.match(rf"(?:{separator}|[\s)\]}}*_$.]*[({{[]|[)\]}}*_$]*\s+(?=.\W*$))([{letters}])(?![\w'’])", rest)
        return match is not None and match[1] != letter


@dataclass(frozen=True)
class Number(Compares):
    """1.0 if the answer is the gold number, exactly or within ``tolerance`` times the gold number's absolute value.

    With ``last_number``, the last number is the answer if a reply states no answer, as is usual for GSM8K.
    """

    tolerance: float = 0.0
    last_number: bool = True
    column: str | None = None
    __name__ = "number"
    form = "Write one number between <answer> and </answer>."

    def __post_init__(self) -> None:
        check_range("number", "tolerance", self.tolerance, 0, 1)

    def answer(self, text: str) -> str | None:
        """Return the answer's value as an exact fraction."""
        value = self._read(text)
        return None if value is None else str(value)

    def _read(self, text: str) -> Fraction | None:
        answer = answers.final_answer(text)
        if answer is not None:
            return _number_in(answer)
        last = answers.last_number(answers.conclusion(text)) if self.last_number else None
        return None if last is None else formulas.number(formulas.clean(last))

    def _value(self, text: str, golds: list[str]) -> float:
        value = self._read(text)
        right = [_number_in(answers.gold(gold)) for gold in golds]
        if value is None:
            return 0.0
        tolerance = Fraction(self.tolerance)
        return float(any(gold is not None and abs(value - gold) <= tolerance * abs(gold) for gold in right))


def _number_in(text: str) -> Fraction | None:
    """Return the number in a stated answer; None if there is none."""
    return None if len(text) > formulas.LONGEST else equality.answer_number(formulas.clean(text.replace("**", " ")))


@dataclass(frozen=True)
class Regex:
    """1.0 if ``pattern`` occurs anywhere in the reply, reasoning included, else 0.0.

    With ``ignore_case`` upper and lower case are equal.
    """

    pattern: str = ""
    ignore_case: bool = False
    __name__ = "regex"
    isolated: ClassVar[bool] = True  # on some texts, a pattern may never finish

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ValueError("regex needs a pattern: regex(pattern='…')")
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"regex: pattern {short(self.pattern)} is not a regular expression: {error}") from None

    def __call__(self, /, completions: list[Any], **columns: Any) -> list[float | None]:  # noqa: ARG002
        """Return one value per completion."""
        pattern = re.compile(self.pattern, re.IGNORECASE if self.ignore_case else 0)
        return [float(bool(pattern.search(text_of(completion)))) for completion in completions]

    def feedback(self, text: str, value: float) -> str:  # noqa: ARG002
        """Say that the form is wrong, without the pattern, which may contain the answer."""
        return "" if value >= 1 else "The reply does not have the required form."


@dataclass(frozen=True)
class Format:
    """1.0 if the reply consists of ``<think>…</think><answer>…</answer>`` and whitespace, else 0.0.

    Each tag in ``tags`` must occur once, in this order. With ``rest``, text may follow the last tag. ``opened`` says
    that the prompt already contains the first opening tag, as in some chat templates, so the reply starts inside this
    tag.
    """

    tags: tuple[str, ...] = ("think", "answer")
    rest: bool = False
    opened: bool = False
    __name__ = "format"

    def __post_init__(self) -> None:
        tags = (self.tags,) if isinstance(self.tags, str) else tuple(self.tags)
        if not tags or not all(isinstance(tag, str) and re.fullmatch(r"\w[\w-]*", tag) for tag in tags):
            raise ValueError(f"format: tags must be names such as ('think', 'answer'), got {short(self.tags)}")
        object.__setattr__(self, "tags", tags)

    def __call__(self, /, completions: list[Any], **columns: Any) -> list[float | None]:  # noqa: ARG002
        """Return one value per completion."""
        return [float(self._holds(text_of(completion))) for completion in completions]

    def feedback(self, text: str, value: float) -> str:
        """Describe the first missing or repeated tag, or the required form."""
        if value >= 1:
            return ""
        form = "".join(f"<{tag}>...</{tag}>" for tag in self.tags)
        nothing_else = "" if self.rest else " and nothing else"
        return self._tag_fault(text) or f"The reply must have the form {form}{nothing_else}."

    def _tag_fault(self, text: str) -> str | None:
        text = f"<{self.tags[0]}>{text}" if self.opened else text
        return answers.tag_fault(text, (f"<{slash}{tag}>" for tag in self.tags for slash in ("", "/")))

    def _holds(self, text: str) -> bool:
        if self._tag_fault(text):
            return False
        # Each tag occurs once, so no part of the pattern can match in two ways, and the time is linear in the text.
        parts = [rf"<{tag}>.*?</{tag}>" for tag in self.tags]
        form = r"\s*".join(parts) + (".*" if self.rest else r"\s*")
        text = f"<{self.tags[0]}>{text}" if self.opened else text
        return re.fullmatch(form, text.lstrip(), re.DOTALL) is not None


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft length penalty: 0 up to ``max_tokens − buffer`` tokens, then linear to −1 at ``max_tokens``.

    Paper: arXiv 2503.14476, equation 13 (L_max is ``max_tokens``, L_cache is ``buffer``).
    """

    max_tokens: int = 0
    buffer: int = 0
    __name__ = "overlong"

    def __post_init__(self) -> None:
        check_range("overlong", "max_tokens", self.max_tokens, 1)
        check_range("overlong", "buffer", self.buffer, 0, self.max_tokens)

    def __call__(self, /, completion_ids: list[list[int]], **columns: Any) -> list[float | None]:  # noqa: ARG002
        """Return one value per completion."""
        return [self._penalty(len(ids)) for ids in completion_ids]

    def feedback(self, text: str, value: float) -> str:  # noqa: ARG002
        """Say that the reply is too long; "" if it is not."""
        return "" if value >= 0 else f"The reply is too long: stay below {self.max_tokens - self.buffer} tokens."

    def _penalty(self, length: int) -> float:
        free = self.max_tokens - self.buffer
        if length <= free:
            return 0.0
        return -1.0 if length > self.max_tokens else (free - length) / self.buffer
