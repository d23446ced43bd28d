"""A bridge to reasoning-gym: ``task.name=rg/chain_sum``, and its settings as ``task.min_terms=2``.

reasoning-gym has a scorer for every generator. Some scorers are unsafe or too generous for a model's text (version
0.1.25):

- Nine scorers evaluate the answer as Python, directly or through sympy. poise passes only Python literals to four of
  them (``EVALUATED``) and only short formulas without large powers to three (``SYMBOLIC``); any other answer scores 0.
  For ``countdown`` and ``puzzle24``, poise's parser replaces the scorer; puzzle24's scorer also accepts numbers that
  are not in the problem.
- Some scorers return a small score (0.01 to 0.25) for nonsense, one returns the full score. So poise also scores a
  nonsense word on each problem. If this word gets the full score, only the gold answer is right.
- Some scorers return the full score for ``nan``, for 0, for the gold number with the opposite sign, or for the gold
  answer with more text after it. In poise, such an answer scores 0 (``is_plausible``).
- One scorer raises an error on nonsense. If a scorer raises an error, the answer scores 0; if a scorer hangs, the
  answer gets no score.

By default the reward is 1 for the full score, else 0. With ``partial``, the reward is the score minus the score of
a nonsense answer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import Parameter, Signature, signature
from random import Random
from typing import Any, ClassVar

from poise._lib.errors import check_range, how_to_install, unknown
from poise.tasks.base import Problem, Score, Split
from poise.tasks.rewards import formulas
from poise.tasks.rewards.answers import last_answer
from poise.tasks.rewards.arithmetic import ExpressionError, evaluate
from poise.tasks.streams import check_split, draw_of_split
from poise.tasks.time_limit import HungError, Worker

INSTRUCTION = "Think first, then answer, in this form: <think>your reasoning</think><answer>your answer</answer>"
NONSENSE = "xyzzy"
LONGEST = 10_000  # characters of an answer
FULL = 1 - 1e-9
TEST_SHARE = 4  # one question in four is a test question: some generators need seconds per question
BLOCK = 64  # questions per seed
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
SYMBOLIC = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
NUMBERS = ("countdown", "puzzle24")
_OWN = ("instruction", "partial", "timeout")
_FUNCTIONS = "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt pi Abs"
_FORMULA = re.compile(
    rf"(?:{_FUNCTIONS.replace(' ', '|')}|[a-zA-Z](?![a-zA-Z_])|\d{{1,12}}(?:\.\d{{1,12}})?(?![\d.])|[-+*/^(), ])*",
    re.ASCII,
)
_NOT_A_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)j?(?![a-z])")
_POWER = re.compile(r"(?:\*\*|\^)\s*(\(?\s*-?\s*\d{1,2}(?![\d.])(?!\s*(?:\*\*|\^|!)))?")


def reasoning_gym(name: str) -> Callable[..., ReasoningGym]:
    """Puzzles from reasoning-gym; NAME is one of its generators.

    Return the function that builds the task. Its parameters are the generator's settings and poise's settings.
    """
    kinds = _generators()
    if name not in kinds:
        raise ValueError(unknown("generator of reasoning-gym", name, kinds))
    if name == "composite":
        raise ValueError("rg/composite mixes other generators, which poise does not support: name one of them")
    own = [signature(ReasoningGym).parameters[each].replace(kind=Parameter.KEYWORD_ONLY) for each in _OWN]
    theirs = [
        Parameter(each, Parameter.KEYWORD_ONLY, default=parameter.default)
        for each, parameter in signature(kinds[name][1]).parameters.items()
        if each not in ("seed", "size")
    ]

    def build(**settings: Any) -> ReasoningGym:
        ours = {key: settings.pop(key) for key in _OWN if key in settings}
        return ReasoningGym(name, settings, **ours)

    build.__signature__ = Signature([*own, *theirs])  # type: ignore[attr-defined]
    build.__doc__ = f"reasoning-gym's {name}."
    return build


def _generators() -> Mapping[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"tasks named rg/… need reasoning-gym ({error}); {how_to_install('rg')}") from error
    generators: Mapping[str, Any] = DATASETS
    return generators


@dataclass
class ReasoningGym:
    """A task with a generator and a scorer from reasoning-gym.

    ``settings`` are the generator's settings. ``instruction`` is the text after a question. With ``partial``, the
    reward is not 0 or 1 but the score minus the score of a nonsense answer. ``timeout`` is the time limit for one
    answer in seconds.
    """

    dataset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    instruction: str = INSTRUCTION
    partial: bool = False
    timeout: float = 10.0

    concurrent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(self.name, "timeout", self.timeout, 0.01)
        self._worker = Worker()
        self._block = lru_cache(16)(self._create)
        self._entry = lru_cache(4096)(self._make)
        try:
            self._scorer = self._block(0).score_answer
        except Exception as error:  # reasoning-gym checks settings with assertions
            raise ValueError(f"{self.name}: {type(error).__name__}: {error}") from error

    @property
    def name(self) -> str:
        """``rg/`` and the generator's name."""
        return f"rg/{self.dataset}"

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Yield the questions of one split. The splits share no question and no seed."""
        check_split(split)
        numbers = _numbers(split, Random(f"{self.name} {seed}"))

        def draw() -> tuple[str, tuple[int, str]]:
            number = next(numbers)
            question = str(self._entry(number)["question"])
            return question, (number, question)

        while True:
            number, question = draw_of_split(self.name, split, draw, share=TEST_SHARE)
            prompt = f"{question}\n{self.instruction}".strip()
            yield Problem(f"{self.name}/{number}", prompt, "all", {"number": number, "question": question})

    def _create(self, block: int) -> Any:
        from reasoning_gym import create_dataset

        # Most generators build question i from seed + i, so blocks with seeds at least BLOCK apart share no question.
        return create_dataset(self.dataset, size=BLOCK, seed=block * BLOCK, **self.settings)

    def _make(self, number: int) -> dict[str, Any]:
        block, index = divmod(number, BLOCK)
        entry: dict[str, Any] = self._block(block)[index]
        return entry

    def score(self, problem: Problem, text: str) -> Score:
        """Score a reply with the scorer, and apply the guards described at the top of this file."""
        answer = last_answer(text)
        if not answer or len(answer) > LONGEST:  # some scorers accept an empty answer
            return Score(0.0, False)
        entry = self._entry(problem.data["number"])
        if entry["question"] != problem.data["question"]:
            return Score(0.0, False, failed=f"{self.name} now builds a different question from the same number")
        try:
            value = self._worker.run(self.timeout, self._value, answer, entry)
        except HungError as error:
            return Score(0.0, False, failed=f"the scorer of {self.name} {error}")
        correct = value >= FULL
        return Score(value if self.partial else float(correct), correct, answer=" ".join(answer.split()))

    def gold(self, problem: Problem) -> Any:
        """Return the generator's answer. Other answers may be right too."""
        return self._entry(problem.data["number"])["answer"]

    def feedback(self, problem: Problem, text: str) -> str:  # noqa: ARG002
        """Return a hint if no answer could be read, else "": the scorers have no feedback."""
        return "" if last_answer(text) else "No answer could be read: write it between <answer> and </answer>."

    def _value(self, answer: str, entry: dict[str, Any]) -> float:
        """Score an answer from 0 to 1, minus the score of nonsense unless the answer is right."""
        gold = entry["answer"]
        if answer == gold:
            return 1.0
        if self.dataset in NUMBERS:
            return float(_reaches(answer, entry["metadata"]["numbers"], entry["metadata"].get("target", 24)))
        if not self._harmless(answer):
            return 0.0
        nonsense = self._ask(NONSENSE, entry)
        if nonsense >= FULL:
            return float(isinstance(gold, str) and answer.casefold() == gold.strip().casefold())
        value = self._ask(answer, entry)
        if value >= FULL:
            return float(is_plausible(answer, gold))
        return max(0.0, value - nonsense)

    def _ask(self, answer: str, entry: dict[str, Any]) -> float:
        try:
            return min(1.0, max(0.0, float(self._scorer(answer, entry))))
        except Exception:  # the scorer did not expect such an answer
            return 0.0

    def _harmless(self, answer: str) -> bool:
        """Whether the answer is safe for the scorer. A scorer that evaluates answers gets only literals or small
        formulas."""
        if self.dataset in EVALUATED:
            try:
                ast.literal_eval(answer)
            except Exception:
                return False
        return self.dataset not in SYMBOLIC or is_small_formula(answer)


def _numbers(split: Split, rng: Random) -> Iterator[int]:
    """Yield question numbers, block after block; even blocks belong to the training split."""
    while True:
        block = 2 * rng.getrandbits(23) + (split == "test")
        yield from range(block * BLOCK, (block + 1) * BLOCK)


def _reaches(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Whether an expression has the value ``target`` and uses every number in ``numbers`` exactly once."""
    try:
        value, used = evaluate(answer)
    except ExpressionError:
        return False
    return value == target and sorted(used) == sorted(numbers)


def is_plausible(answer: str, gold: Any) -> bool:
    """Whether an answer can be right. If the gold answer is a number, the answer must be within 1 % of this number."""
    if not isinstance(gold, str):
        return True
    reply, truth = (" ".join(text.casefold().split()).strip(" .`\"'") for text in (answer, gold))
    if reply == truth:
        return True
    if _NOT_A_NUMBER.search(reply) and not _NOT_A_NUMBER.search(truth):
        return False
    gold_value = None if " " in truth else formulas.number(formulas.clean(truth))
    if gold_value is not None:
        value = formulas.number_in(formulas.clean(reply)) if len(reply) <= 2 * len(truth) + 100 else None
        return value is not None and abs(value - gold_value) <= abs(gold_value) / 100
    return not truth or not (reply.startswith(truth) or reply.endswith(truth))


def is_small_formula(text: str) -> bool:
    """Whether a text is safe for sympy: known functions, single letters, numbers and operators, and no large power."""
    if len(text) > 300 or not _FORMULA.fullmatch(text):
        return False
    size = 1
    for exponent in _POWER.findall(text):
        if not exponent:  # more than two digits, not a number, or itself a power
            return False
        size *= max(1, int(exponent.strip("(- ")))
    return size <= 1000
