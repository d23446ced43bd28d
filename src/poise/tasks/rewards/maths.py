"""The reward for mathematics: exact comparison where possible, else math-verify in worker processes."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from poise._lib.errors import check_range, how_to_install
from poise.tasks.rewards import answers, equality, formulas
from poise.tasks.rewards.base import RewardError, gold_of, text_of, wrong_answer_feedback
from poise.tasks.rewards.callers import LostError, Process

MOST_WORKERS = 4
REMEMBERED = 20_000  # pairs of answer and gold: a group often repeats the same answer
PATIENCE = 300.0  # wall-clock seconds, in case the machine hangs; each check also has a limit on CPU time
Pair = tuple[str, str, bool]  # gold, answer, lenient
MISSING = f"math needs math-verify; {how_to_install('math')} (the reward 'number' compares plain numbers without it)"


@dataclass(frozen=True)
class Math:
    r"""1.0 if the answer (``\boxed{}``, ``<answer>``, ``####``, "the answer is") equals the gold answer, else 0.0.

    Most answers need no computer algebra. math-verify checks the other answers, with a limit of ``seconds`` of CPU time
    for each answer. An answer over the limit is wrong and counts in the metric ``math/cut_off``. With ``last_number``,
    the last number is the answer if a reply states no answer. With ``lenient``, only math-verify decides, by its own
    rules. ``column`` names the column with the right answer (default: a column with a common name).
    """

    seconds: float = 1.0
    last_number: bool = False
    lenient: bool = False
    column: str | None = None
    __name__: ClassVar[str] = "math"

    def __post_init__(self) -> None:
        check_range("math", "seconds", self.seconds, 0.01, 60)
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(MISSING)

    def __call__(
        self, /, completions: list[Any], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        """Return one value per completion; None for a row without a right answer."""
        golds = gold_of("math", columns, self.column, len(completions))
        replies = [self._final_answer(text_of(completion)) for completion in completions]
        open_pairs: dict[Pair, bool] = {}
        values = [self._decide(answer, gold, open_pairs) for answer, gold in zip(replies, golds, strict=True)]
        equal, cut_off = checks().equal(list(open_pairs), self.seconds) if open_pairs else ({}, 0)
        if log_metric is not None:
            log_metric("math/cut_off", float(cut_off))
        return [float(any(equal[pair] for pair in value)) if isinstance(value, list) else value for value in values]

    def answer(self, text: str) -> str | None:
        """Return the reply's answer in a normal form: equal answers usually have equal texts."""
        answer = self._final_answer(text)
        return None if answer is None else equality.spelling(answer) or None

    def feedback(self, text: str, value: float) -> str:
        """Return the wrong answer that was read, or how to write an answer; "" if the answer is right."""
        form = r"Put the final answer within \boxed{}."
        return "" if value >= 1 else wrong_answer_feedback(self._final_answer(text) or None, text, form)

    def _final_answer(self, text: str) -> str | None:
        answer = answers.final_answer(text)
        if answer is None and self.last_number:
            answer = answers.last_number(answers.conclusion(text))
        return answer

    def _decide(self, answer: str | None, golds: list[str], open_pairs: dict[Pair, bool]) -> float | list[Pair] | None:
        """Return the reward's value, or the pairs that math-verify must check. Add these pairs to ``open_pairs``."""
        if not golds:
            return None
        if answer is None:
            return 0.0
        pairs = []
        for text in golds:
            gold = answers.gold(text)
            equal = (answer == gold or None) if self.lenient else equality.equal(answer, gold)
            if equal:
                return 1.0
            spell = str if self.lenient else lambda formula: formulas.exact(formulas.clean(formula))
            if equal is None and equality.worth_checking(pair := (spell(gold), spell(answer), self.lenient)):
                pairs.append(pair)
        open_pairs.update(dict.fromkeys(pairs, True))
        return pairs or 0.0


class Checks:
    """Processes that run math-verify, started when needed, and a cache of results."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._results: OrderedDict[Pair, bool | None] = OrderedDict()
        self._lock = threading.Lock()
        self._idle: list[Process] = []

    def equal(self, pairs: Sequence[Pair], seconds: float) -> tuple[dict[Pair, bool], int]:
        """Return whether gold and answer are equal for each pair, and the number of pairs whose check was cut off."""
        with self._lock:
            unknown = [pair for pair in pairs if pair not in self._results]
            if count := min(_processors(), MOST_WORKERS, -(-len(unknown) // 4)):
                with ThreadPoolExecutor(count) as pool:
                    checked = pool.map(lambda pair: self._check(pair, seconds), unknown)
                    self._results.update(zip(unknown, checked, strict=True))
            results = {pair: self._results[pair] for pair in pairs}
            while len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
        return {pair: bool(equal) for pair, equal in results.items()}, list(results.values()).count(None)

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().kill()

    def _check(self, pair: Pair, seconds: float) -> bool | None:
        for again in (False, True):  # retry once: another process may have killed the worker
            process = _start() if again else self._idle_or_new()
            with suppress(LostError):
                equal: bool | None = process.ask({"pair": pair, "seconds": seconds}, PATIENCE)["equal"]
                self._idle.append(process)
                return equal
        return None

    def _idle_or_new(self) -> Process:
        with suppress(IndexError):
            return self._idle.pop()
        return _start()


def _start() -> Process:
    try:
        return Process("math")
    except LostError as error:
        raise RewardError(f"reward 'math' could not start math-verify: {error}; {MISSING}") from None


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_CHECKS: Checks | None = None


def checks() -> Checks:
    """Return this process's ``Checks``; a fork creates its own."""
    global _CHECKS
    if _CHECKS is None or _CHECKS.owner != os.getpid():
        _CHECKS = Checks()
    return _CHECKS
