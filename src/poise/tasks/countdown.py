"""Countdown: combine given numbers into an expression with a given value.

The public form of the task (TinyZero's): three or four numbers up to 99, every number used exactly once, the answer
between ``<answer>`` tags, a reward of 1 for a right answer and 0.1 for one that is wrong but there. **Ours:** the
verifier evaluates nothing as code and computes with fractions; with ``use = "some"`` numbers may be left over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import count
from random import Random
from typing import ClassVar, NamedTuple

from poise._lib.errors import check_choice, check_range
from poise._lib.quotes import quote
from poise.tasks.arithmetic import ExpressionError, evaluate, number_text
from poise.tasks.base import Problem, Score, Split, check_split
from poise.tasks.replies import last_answer
from poise.tasks.streams import check_whole, draw_of_split, sizes

USE = {"all": "Use each number exactly once.", "some": "Use each number at most once."}
INSTRUCTION = (
    "Think first, then give the expression, in this form: <think>your reasoning</think><answer>(1 + 2) * 3</answer>"
)
LARGEST_TARGET = 999


class Attempt(NamedTuple):
    """An expression, its value, and how that is worked out."""

    value: int
    expression: str
    steps: list[str]


@dataclass(frozen=True)
class Countdown:
    """Countdown: reach a target with + - * / from given numbers; puzzles without end.

    ``numbers`` is how many, ``largest`` the largest of them, ``target`` the largest target. ``use`` is ``all`` or
    ``some`` of the numbers. A wrong answer that can be read gets ``format_reward``. Demonstrations show up to ``tries``
    failed attempts before the right one; with ``noise`` an attempt is taken for right that often although it is not.
    ``instruction`` is the text before a puzzle.
    """

    numbers: int | str | Sequence[int] = "3-4"
    largest: int = 99
    target: int = 99
    use: str = "all"
    format_reward: float = 0.1
    instruction: str = INSTRUCTION
    tries: int = 3
    noise: float = 0.0

    name: ClassVar[str] = "countdown"
    concurrent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", sizes("Countdown", "numbers", self.numbers, 2, 6))
        check_whole("Countdown", "largest", self.largest, 3, LARGEST_TARGET)
        check_whole("Countdown", "target", self.target, 10, LARGEST_TARGET)
        check_choice("Countdown", "use", self.use, USE)
        check_range("Countdown", "format_reward", self.format_reward, 0.0, 1.0)
        check_whole("Countdown", "tries", self.tries, 0, 100)
        check_range("Countdown", "noise", self.noise, 0.0, 1.0)

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Puzzles of one split; the same numbers with the same target are never in both."""
        check_split(split)
        rng = Random(f"countdown {seed}")
        counts = sizes("Countdown", "numbers", self.numbers, 2, 6)
        for turn in count():
            drawn = partial(self._draw, counts[turn % len(counts)])
            yield self._problem(*draw_of_split("Countdown", split, rng, drawn))

    def _draw(self, size: int, rng: Random) -> tuple[str, tuple[list[int], Attempt]]:
        """Numbers, and how they reach a target: combined at random until it is one that is allowed."""
        while True:
            numbers = [rng.randint(1, self.largest) for _ in range(size)]
            solution = _combine(numbers, rng)
            if 10 <= solution.value <= self.target:
                return f"countdown {sorted(numbers)} {solution.value}", (numbers, solution)

    def _problem(self, numbers: list[int], solution: Attempt) -> Problem:
        listed = ", ".join(map(str, numbers))
        prompt = f"Make {solution.value} from the numbers {listed} with + - * / and parentheses. {USE[self.use]}"
        data = {
            "numbers": numbers, "target": solution.value, "solution": solution.expression, "steps": solution.steps,
        }  # fmt: skip
        name = f"countdown/{solution.value}/" + "-".join(map(str, numbers))
        return Problem(name, f"{prompt} {self.instruction}".strip(), f"{len(numbers)} numbers", data)

    def score(self, problem: Problem, text: str) -> Score:
        """1 for a right expression, ``format_reward`` for another, 0 where there is none to read."""
        answer, _, right = self._judge(problem, text)
        return Score(1.0 if right else self.format_reward if answer else 0.0, right, answer=answer)

    def feedback(self, problem: Problem, text: str) -> str:
        """Which rule a response breaks, in a sentence."""
        return self._judge(problem, text)[1]

    def _judge(self, problem: Problem, text: str) -> tuple[str | None, str, bool]:
        """The expression, what to say of it, and whether it is right."""
        answer = last_answer(text)
        if answer is None:
            return None, "There is no <answer>…</answer>.", False
        try:
            value, used = evaluate(answer)
        except ExpressionError as error:
            return None, f"The answer {quote(answer)} is no expression: {error}.", False
        answer = "".join(answer.split())
        given, spent = Counter(map(Fraction, problem.data["numbers"])), Counter(used)
        if spent - given:
            return answer, _overspent(spent - given, spent, given), False
        if self.use == "all" and given - spent:
            left = ", ".join(number_text(number) for number in given - spent)
            return answer, f"The answer does not use {left}. {USE['all']}", False
        target = problem.data["target"]
        found = f"The value of the answer is {number_text(value)}"
        return answer, f"{found}, which is right." if value == target else f"{found}, not {target}.", value == target

    def demonstration(self, problem: Problem, seed: int = 0, noise: float | None = None) -> str:
        """Attempts that fail, one that does not, and the answer: worked out step by step."""
        noise = self.noise if noise is None else noise
        rng = Random(f"{problem.id} {seed}")
        numbers, target = problem.data["numbers"], problem.data["target"]
        right = Attempt(target, problem.data["solution"], problem.data["steps"])
        lines: list[str] = []
        for _ in range(rng.randint(0, self.tries)):
            attempt = _combine(numbers, rng)
            if attempt.value == target or rng.random() < noise:
                right = attempt
                break
            lines += [*attempt.steps, "no"]
        thought = "\n".join([*lines, *right.steps, "yes"])
        return f"<think>{thought}</think><answer>{right.expression}</answer>"


def _overspent(over: Counter[Fraction], spent: Counter[Fraction], given: Counter[Fraction]) -> str:
    """The first number that is used too often."""
    number = next(iter(over))
    if not given[number]:
        return f"The answer uses {number_text(number)}, which is not one of the numbers."
    return f"The answer uses {number_text(number)} {spent[number]} times, and it is given {given[number]} times."


def _combine(numbers: Sequence[int], rng: Random) -> Attempt:
    """Numbers joined two by two at random until one is left."""
    parts = [(number, str(number)) for number in numbers]
    steps = []
    while len(parts) > 1:
        rng.shuffle(parts)
        (b, right), (a, left) = sorted((parts.pop(), parts.pop()))
        signs = "+-*" if a > b else "+*"  # every value stays a whole number above 0
        sign = rng.choice(signs + "/" * (a % b == 0))
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
        steps.append(f"{a} {sign} {b} = {value}")
        parts.append((value, f"({left} {sign} {right})"))
    value, expression = parts[0]
    return Attempt(value, expression[1:-1], steps)
