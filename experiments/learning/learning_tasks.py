"""Small generated tasks for learning.py: short questions with short answers, held-out ones never trained on.

poise train task.name=experiments/learning/learning_tasks.py:Largest model=… run=…
poise tasks show experiments/learning/learning_tasks.py:Sums
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import ClassVar

from poise.tasks import Problem, Score, Split

TEST_SHARE = 3  # one question in this many is held out
PATIENCE = 20_000  # draws without a new held-out question: then there is none left

ANIMALS = tuple(
    """
    horse cow sheep goat pig dog cat mouse rabbit lion tiger bear wolf fox deer monkey elephant giraffe zebra camel
    frog snake turtle eagle owl duck goose chicken parrot shark whale dolphin salmon crab spider bee ant butterfly
    """.split()  # noqa: SIM905
)
THINGS = tuple(
    """
    table chair lamp bottle spoon knife plate window door carpet pencil book paper hammer nail bucket ladder candle
    mirror clock shirt shoe hat coat glove ring coin key rope basket bread cheese butter sugar apple lemon car train
    boat bridge tower guitar drum
    """.split()  # noqa: SIM905
)
FILLERS = ("well", "so", "now", "then", "good", "right", "fine", "yes")


class Questions(ABC):
    """Questions with one right answer, without end. The reply is right if the last answer that it names is."""

    name: ClassVar[str]
    concurrent: ClassVar[bool] = True

    @abstractmethod
    def draw(self, rng: Random) -> tuple[str, str, str, list[str]]:
        """What the question is about, whatever its order or words; the question; its answer; the options, if any."""

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Questions of one split, told apart by a hash of what they are about. Held-out ones come once each."""
        rng = Random(f"{self.name} {split} {seed}")
        seen: set[str] = set()
        missed = 0
        while missed < PATIENCE:
            missed += 1
            about, question, answer, options = self.draw(rng)
            held_out = int.from_bytes(sha256(about.encode()).digest()[:8], "big") % TEST_SHARE == 0
            if held_out != (split == "test") or question in seen:
                continue
            missed = 0
            if held_out:
                seen.add(question)
            yield Problem(f"{self.name}/{about}", question, "all", {"answer": answer, "options": options})

    def score(self, problem: Problem, text: str) -> Score:
        """1 if the last number, or the last of the options, that the reply names is the answer, else 0."""
        options = problem.data["options"]
        named = re.findall(r"[a-z]+", text.lower()) if options else re.findall(r"\d+", text.replace(",", ""))
        said = next((word for word in reversed(named) if not options or word in options), None)
        right = said == problem.data["answer"]
        return Score(float(right), right, answer=said)

    def demonstration(self, problem: Problem, seed: int = 0, noise: float | None = None) -> str:  # noqa: ARG002
        """The answer."""
        return str(problem.data["answer"])

    def constants(self, problems: Sequence[Problem]) -> dict[str, float]:
        """What replies reach that do not look at the question: the best single answer, the best place in a list."""
        answers = [str(problem.data["answer"]) for problem in problems]
        found = {"answer": max(Counter(answers).values()) / len(problems)}
        places: Counter[int] = Counter()
        for problem, answer in zip(problems, answers, strict=True):
            listed = re.findall(r"\w+", problem.prompt.rpartition(":")[2].replace(" or ", " "))
            if answer in listed and ":" in problem.prompt:
                places[listed.index(answer)] += 1
        return found | ({"place": max(places.values()) / len(problems)} if places else {})


@dataclass(frozen=True)
class Largest(Questions):
    """Which of some numbers is the largest?"""

    count: int = 3
    low: int = 10
    high: int = 99

    name: ClassVar[str] = "largest"

    def draw(self, rng: Random) -> tuple[str, str, str, list[str]]:
        """Different numbers in any order."""
        numbers = rng.sample(range(self.low, self.high + 1), self.count)
        listed = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
        about = " ".join(map(str, sorted(numbers)))
        return about, f"Which number is the largest: {listed}?", str(max(numbers)), []


@dataclass(frozen=True)
class Animal(Questions):
    """Which of some words is an animal?"""

    count: int = 3

    name: ClassVar[str] = "animal"

    def draw(self, rng: Random) -> tuple[str, str, str, list[str]]:
        """One animal among things."""
        animal = rng.choice(ANIMALS)
        words = [animal, *rng.sample(THINGS, self.count - 1)]
        about = " ".join(sorted(words))
        rng.shuffle(words)
        listed = ", ".join(words[:-1]) + f" or {words[-1]}"
        return about, f"Which of these is an animal: {listed}?", animal, words


@dataclass(frozen=True)
class Sums(Questions):
    """Two numbers are added. ``digits`` writes them digit by digit, for small models that know nothing else.

    ``words`` puts so many words before the sum of a demonstration, each any of eight: a model that has learned them is
    unsure of every one, and none matters.
    """

    low: int = 1
    high: int = 40
    digits: bool = False
    words: int = 0

    name: ClassVar[str] = "sums"

    def draw(self, rng: Random) -> tuple[str, str, str, list[str]]:
        """The same two numbers in either order are about the same, so that both are held out, or neither."""
        a, b = rng.randint(self.low, self.high), rng.randint(self.low, self.high)
        question = f"{_apart(a)} + {_apart(b)} =" if self.digits else f"What is {a} + {b}?"
        return f"{min(a, b)} {max(a, b)}", question, str(a + b), []

    def score(self, problem: Problem, text: str) -> Score:
        """As for any question; digits that stand apart are one number."""
        return super().score(problem, re.sub(r"(?<=\d) (?=\d)", "", text) if self.digits else text)

    def demonstration(self, problem: Problem, seed: int = 0, noise: float | None = None) -> str:
        """Words, then the sum."""
        answer = super().demonstration(problem, seed, noise)
        words = Random(f"{problem.id} {seed}").choices(FILLERS, k=self.words)
        return " ".join([*words, _apart(answer) if self.digits else answer])


def _apart(number: int | str) -> str:
    return " ".join(str(number))
