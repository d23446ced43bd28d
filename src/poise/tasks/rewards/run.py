"""Find rewards by name, and call several rewards on a batch of completions: one grade per completion."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poise._lib import live
from poise._lib import user_code as _user_code
from poise._lib.calls import read_call
from poise._lib.errors import check_range, check_settings, counted, quote, short, unknown
from poise._lib.fingerprint import in_place
from poise.tasks.rewards import answers, worker
from poise.tasks.rewards.base import Grade, TrainerState, text_of
from poise.tasks.rewards.callers import Batch, InProcess, InWorker, Outcome
from poise.tasks.rewards.maths import Math
from poise.tasks.rewards.simple import Choice, Exact, Format, Number, Overlong, Regex

# Data columns that are not passed to rewards.
RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
LARGEST_WEIGHT = 1e30
LONGEST_ANSWER = 1000  # characters of an answer that are compared
Named = str | Callable[..., Any]
TABLE = {kind.__name__.lower(): kind for kind in (Exact, Choice, Number, Math, Regex, Format, Overlong)}


@dataclass(frozen=True)
class Spec:
    """A reward and its location for a worker process; ``module`` is None if a worker process cannot load the reward.

    ``foreign`` is True if the reward is not part of poise. ``code`` is the fingerprint of its files when loaded.
    """

    reward: Callable[..., Any]
    foreign: bool = False
    module: str | None = None
    name: str = ""
    args: list[Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    code: _user_code.Code = field(default_factory=dict)


def get(text: str | Callable[..., Any]) -> Callable[..., Any]:
    """Load a reward: ``get("regex(pattern='x')")``, ``get("file.py:name")``, ``get("package.module.name")``.

    For ``name(settings)``, call the class or function with the settings to build the reward.
    """
    return find(text).reward


def find(text: str | Callable[..., Any]) -> Spec:
    """Load a reward and its location for a worker process. A Python object has no location and runs in this process."""
    text = live.resolve(text)
    if not isinstance(text, str):
        if not callable(text):
            raise TypeError(f"a reward must be a name or a callable, got {short(text)}")
        return Spec(worker.build(text, None, {}))
    name, positional, keywords = _read(text)
    if name in TABLE:
        kind = TABLE[name]
        check_settings(name, keywords, inspect.signature(kind).parameters)
        if positional:
            raise TypeError(f"{name}: write settings with their names, such as {name}(setting=value)")
        return Spec(kind(**keywords), False, kind.__module__, kind.__qualname__, [], keywords)
    if name.endswith(".py"):
        raise ValueError(f"reward {name!r}: name the function in the file, such as {name}:name")
    if not re.search(r"[.:]", name):
        raise ValueError(unknown("reward", name, TABLE) + "; for your own reward, write file.py:name or package.name")
    _check_reach(name)
    target = _user_code.load("reward", name, object)
    module, _, inner = name.rpartition(":") if ":" in name else name.rpartition(".")
    brackets = text.rstrip().endswith(")")
    call = positional if brackets else None
    try:
        reward = worker.build(target, call, keywords)
    except Exception as error:  # a user's class may raise anything
        hint = _user_code.forgotten_dataclass(target) if brackets and isinstance(error, TypeError) else ""
        raise ValueError(f"reward {text!r}: {type(error).__name__}: {error}{hint}") from error
    module = str(in_place(Path(module).expanduser())) if module.endswith(".py") else module
    code = _user_code.code_of({"task": {"reward": f"{module}:{inner}"}})
    return Spec(reward, True, module, inner, call, keywords, code)


def _check_reach(name: str) -> None:
    """Raise an error for a path to code that is not a reward: loading a reward may call this code."""
    if not _user_code.is_foreign(name):  # poise's code needs no consent, so only the rewards in TABLE are allowed
        raise ValueError(f"reward {name!r}: use the short names of poise's own rewards: {', '.join(TABLE)}")
    if re.split("[.:]", name)[0] in sys.stdlib_module_names and ".py:" not in name:  # os.system, subprocess.Popen
        raise ValueError(f"reward {name!r} is part of Python itself, not a reward")


def _read(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse a name and its settings. Unlike in ``read_call``, the name may be any path, even one with spaces."""
    name, bracket, rest = text.strip().partition("(")
    if not name or any(char in name for char in "'\"\n"):
        raise ValueError(f"cannot read the reward {short(text)}; write name, name(setting=value) or file.py:name")
    _, args, settings = read_call(f"settings{bracket}{rest}", text)
    return name.strip(), args, settings


class Rewards(AbstractContextManager["Rewards"]):
    """Weighted rewards with TRL's signature: ``Rewards(["math", "my_rewards.py:brief"], weights=[1, 0.2])``.

    If a reward is named by its path, it runs in a worker process, and a call is cut off after ``timeout`` seconds. With
    ``quick``, the reward runs in this process, where no call can be cut off. Python callables and most built-in rewards
    always run in this process.
    """

    def __init__(
        self,
        specs: Named | Sequence[Named],
        weights: Sequence[float] | None = None,
        timeout: float = 30.0,
        quick: bool = False,
    ):
        names = _as_list(specs)
        check_range("rewards", "timeout", timeout, 0.01)
        self.weights = [1.0] * len(names) if weights is None else list(weights)
        for weight in self.weights:
            check_range("rewards", "a weight", weight, -LARGEST_WEIGHT, LARGEST_WEIGHT)
        if len(self.weights) != len(names):
            counts = f"{counted(len(names), 'reward')}, {counted(len(self.weights), 'weight')}"
            raise ValueError(f"give one weight per reward: {counts}")
        self.timeout, self.quick = timeout, quick
        self.specs = [find(each) for each in names]
        self.names = _unique([_name(spec) for spec in self.specs])
        self._callers = [self._caller(name, spec) for name, spec in zip(self.names, self.specs, strict=True)]
        self._lock = threading.Lock()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        ids: Sequence[str],
        state: TrainerState | None = None,
        environments: Sequence[Any] | None = None,
        reported: dict[str, list[float]] | None = None,
    ) -> list[Grade]:
        """Return one grade per completion. ``columns`` holds the data's columns, one value per completion.

        ``ids`` are the rows' names in messages. If ``reported`` is a dict, append the values that rewards report with
        ``log_metric`` to its lists, by name.
        """
        texts = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        shared = {**texts, **{name: values for name, values in columns.items() if name not in RESERVED}}
        batch = Batch(shared, list(ids), state or TrainerState(), environments)
        if not batch.ids:
            return []
        with self._lock:
            outcomes = self._outcomes(batch)
        if reported is not None:
            for metric, value in (pair for outcome in outcomes for pair in outcome.metrics):
                reported.setdefault(metric, []).append(value)
        return [self._grade(row, text_of(completions[row]), outcomes) for row in range(len(batch.ids))]

    def _outcomes(self, batch: Batch) -> list[Outcome]:
        """Return the outcome of each reward. Rewards in worker processes run in parallel."""
        remote = [caller for caller in self._callers if isinstance(caller, InWorker)]
        with ThreadPoolExecutor(max(1, len(remote))) as pool:
            futures = {caller.name: pool.submit(caller.values, batch) for caller in remote}
            local = {each.name: each.values(batch) for each in self._callers if each.name not in futures}
            return [local[name] if name in local else futures[name].result() for name in self.names]

    def _caller(self, name: str, spec: Spec) -> InProcess | InWorker:
        isolated = spec.foreign or getattr(spec.reward, "isolated", False)
        return InWorker(name, spec, self.timeout) if isolated and not self.quick else InProcess(name, spec)

    def feedback(self, text: str, parts: Mapping[str, float]) -> str:
        """Return what is wrong with a reply, reward by reward. ``parts`` comes from the reply's grade.

        Feedback on a user's reward gives only its value. Feedback never reveals the right answer.
        """
        sentences = []
        for name, spec in zip(self.names, self.specs, strict=True):
            if name not in parts:
                continue
            if not spec.foreign and hasattr(spec.reward, "feedback"):
                sentences.append(spec.reward.feedback(text, parts[name]))
            elif parts[name] < getattr(spec.reward, "correct_at", 1.0):
                sentences.append(f"The reward {quote(name)} is {parts[name]:.2f}.")
        return " ".join(filter(None, sentences))

    def answer_columns(self) -> list[str | None]:
        """Return the columns where built-in rewards look for the right answer; None stands for the common names."""
        own = [spec.reward for spec in self.specs if type(spec.reward) in TABLE.values()]
        return [reward.column for reward in own if hasattr(reward, "column")]

    def close(self) -> None:
        """End the worker processes. Worker processes also end when this process ends, even if it is killed."""
        for caller in self._callers:
            caller.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grade(self, row: int, text: str, outcomes: Sequence[Outcome]) -> Grade:
        failed = next((outcome.failed[row] for outcome in outcomes if row in outcome.failed), None)
        values = [None if failed else outcome.values[row] for outcome in outcomes]
        applying = [(i, value) for i, value in enumerate(values) if value is not None]
        first = applying[0] if applying else None
        return Grade(
            reward=float(sum(self.weights[i] * value for i, value in applying)),
            parts={self.names[i]: value for i, value in applying},
            correct=first is not None and first[1] >= getattr(self.specs[first[0]].reward, "correct_at", 1.0),
            answer=_answer(self.specs[first[0] if first else 0].reward, text),
            failed=failed,
            applies=bool(applying) or failed is not None,
            extra={column: values[row] for outcome in outcomes for column, values in outcome.extra.items()},
        )


def _answer(reward: Callable[..., Any], text: str) -> str | None:
    read = getattr(reward, "answer", None)
    answer = read(text) if callable(read) else answers.final_answer(text)
    return None if answer is None else str(answer)[:LONGEST_ANSWER]


def _as_list(specs: Any) -> list[Named]:
    if isinstance(specs, str) or callable(specs):
        return [specs]
    if not isinstance(specs, Sequence):
        raise TypeError(
            f"a reward must be a name, a callable or a list of these, got {short(specs)}; set weights in reward_weights"
        )
    if not specs:
        raise ValueError("give at least one reward")
    return list(specs)


def _name(spec: Spec) -> str:
    reward = spec.reward
    while hasattr(reward, "func") and not hasattr(reward, "__name__"):  # functools.partial
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__)).strip("<>")  # <lambda>


def _unique(names: list[str]) -> list[str]:
    """Append numbers to repeated names: two files may each define a ``reward_func``."""
    return [name if (n := names[:i].count(name)) == 0 else f"{name}_{n + 1}" for i, name in enumerate(names)]
