"""The reward for mathematics: exact comparison where that decides, math-verify in killable processes for the rest."""

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
from poise.rewards import answers, equality, formulas
from poise.rewards.base import RewardError, gold_of, text_of, wrong
from poise.rewards.calling import LostError, Process

MOST_WORKERS = 4
REMEMBERED = 20_000  # pairs of answer and gold: a group of responses often has the same answer many times
PATIENCE = 300.0  # seconds of a stuck machine: the limit of a check is processor time, and far smaller
Pair = tuple[str, str, bool]  # gold, answer, and whether math-verify's own rules hold
MISSING = f"math needs math-verify; {how_to_install('math')} (for plain numbers, the reward 'number' does without it)"


@dataclass(frozen=True)
class Math:
    r"""1.0 where the stated answer (``\boxed{}``, ``<answer>``, ``####``, "the answer is") equals the gold one, or 0.0.

    ``equality`` says what is decided without computer algebra. For the rest math-verify has ``seconds`` of processor
    time a check. What takes longer is wrong, and counted: the metric ``math/cut_off``. With ``last_number`` a reply
    that states no answer is taken at its last number. With ``lenient`` math-verify alone decides, by its own rules.
    ``column`` holds the right answer; without it, common names are looked for.
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
        """One value per completion; None where the data has no answer."""
        golds = gold_of("math", columns, self.column, len(completions))
        said = [self._stated(text_of(completion)) for completion in completions]
        open_pairs: dict[Pair, bool] = {}
        values = [self._decide(answer, gold, open_pairs) for answer, gold in zip(said, golds, strict=True)]
        found, cut_off = checks().equal(list(open_pairs), self.seconds) if open_pairs else ({}, 0)
        if log_metric is not None:
            log_metric("math/cut_off", float(cut_off))
        return [float(any(found[pair] for pair in value)) if isinstance(value, list) else value for value in values]

    def answer(self, text: str) -> str | None:
        """What the reply says, in a form in which equal answers are, as a rule, equal texts."""
        said = self._stated(text)
        return None if said is None else equality.spelling(said) or None

    def feedback(self, text: str, value: float) -> str:
        """What was read as the answer, if that is wrong; or how to write one."""
        return "" if value >= 1 else wrong(self._stated(text) or None, text, r"Put the final answer within \boxed{}.")

    def _stated(self, text: str) -> str | None:
        said = answers.stated(text)
        if said is None and self.last_number:
            said = answers.last_number(answers.conclusion(text))
        return said

    def _decide(self, answer: str | None, golds: list[str], open_pairs: dict[Pair, bool]) -> float | list[Pair] | None:
        """The value, or the pairs of which one must be equal; those go to ``open_pairs`` too."""
        if not golds:
            return None
        if answer is None:
            return 0.0
        pairs = []
        for text in golds:
            gold = answers.gold(text)
            verdict = (answer == gold or None) if self.lenient else equality.equal(answer, gold)
            if verdict:
                return 1.0
            spell = str if self.lenient else lambda formula: formulas.exact(formulas.clean(formula))
            if verdict is None and equality.worth_checking(pair := (spell(gold), spell(answer), self.lenient)):
                pairs.append(pair)
        open_pairs.update(dict.fromkeys(pairs, True))
        return pairs or 0.0


class Checks:
    """Processes that run math-verify, started when first needed, and what they have found."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._found: OrderedDict[Pair, bool | None] = OrderedDict()
        self._lock = threading.Lock()
        self._idle: list[Process] = []

    def equal(self, pairs: Sequence[Pair], seconds: float) -> tuple[dict[Pair, bool], int]:
        """Whether gold and answer are equal, per pair; and how many checks of these were cut off, now or earlier."""
        with self._lock:
            unknown = [pair for pair in pairs if pair not in self._found]
            if count := min(_processors(), MOST_WORKERS, -(-len(unknown) // 4)):
                with ThreadPoolExecutor(count) as pool:
                    checked = pool.map(lambda pair: self._check(pair, seconds), unknown)
                    self._found.update(zip(unknown, checked, strict=True))
            found = {pair: self._found[pair] for pair in pairs}
            while len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
        return {pair: bool(equal) for pair, equal in found.items()}, list(found.values()).count(None)

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().kill()

    def _check(self, pair: Pair, seconds: float) -> bool | None:
        for again in (False, True):  # a worker that somebody killed is no fault of the answer
            process = _started() if again else self._idle_or_started()
            with suppress(LostError):
                equal: bool | None = process.ask({"pair": pair, "seconds": seconds}, PATIENCE)["equal"]
                self._idle.append(process)
                return equal
        return None

    def _idle_or_started(self) -> Process:
        with suppress(IndexError):
            return self._idle.pop()
        return _started()


def _started() -> Process:
    try:
        return Process("math")
    except LostError as error:
        raise RewardError(f"reward 'math' could not start math-verify: {error}; {MISSING}") from None


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_CHECKS: Checks | None = None


def checks() -> Checks:
    """The processes of this process: a fork gets its own."""
    global _CHECKS
    if _CHECKS is None or _CHECKS.owner != os.getpid():
        _CHECKS = Checks()
    return _CHECKS
