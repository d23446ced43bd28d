"""TRL's environments as a task: classes for TRL's ``environment_factory`` run unchanged.

An environment defines ``reset(**row) -> str | None``; poise appends the returned text to the prompt. The environment's
other public methods are tools: the model calls the tools and reads their results. If the environment defines
``get_reward() -> float``, poise calls this method once at the end. A reply without a tool call ends the episode. If a
tool raises an error, the model reads the error, as in TRL.

**Ours:** if a call is malformed, the model reads an error message. If ``reset`` or ``get_reward`` raises an error, or
any call does not return in time, only that episode fails. If ``reset`` has a parameter ``seed`` but the row has no such
column, ``seed`` is the problem's number, so that all attempts at a problem get the same seed. Unlike in TRL,
``feedback() -> str`` is not a tool: poise calls this method at the end of the episode to get a description of the
result.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, ClassVar, SupportsFloat

from poise._lib import live
from poise._lib import user_code as _user_code
from poise._lib.errors import check_range, check_whole, quote, short
from poise.tasks.base import NO_REWARD, Attempt, Message, Problem, Score, Split, TaskError
from poise.tasks.data.rows import DataError, fingerprint, share
from poise.tasks.data.sources import read_all
from poise.tasks.rewards import Grade, Rewards
from poise.tasks.rewards.worker import result_of
from poise.tasks.streams import check_split, draw_of_split
from poise.tasks.time_limit import HungError, Worker
from poise.tasks.tools import answer_all

EMPTY: list[Message] = [{"role": "user", "content": ""}]  # TRL's prompt without data


@dataclass
class Environment:
    """An environment with the interface of TRL's ``environment_factory``: ``environment=my_env.py:Env``.

    ``factory`` is a class or function, or its path. With ``file``, ``reset`` gets the file's rows, epoch after epoch.
    ``test_file`` contains the test rows. Without ``test_file``, the share ``held_out`` of the rows is held out, chosen
    by a hash of the row. ``reward`` names reward functions, which also get the argument ``environments``.
    ``reward_weights`` are their weights (default: 1 each); the environment's ``get_reward`` is added with weight 1. An
    attempt is correct if its reward is at least ``correct_at``. ``turns`` is the maximum number of replies per episode,
    ``timeout`` the time limit for one call in seconds.
    """

    factory: str | Callable[[], Any]
    file: str | None = None
    test_file: str | None = None
    held_out: float = 0.1
    reward: Any = ()
    reward_weights: Sequence[float] | None = None
    correct_at: float = 1.0
    turns: int = 16
    timeout: float = 30.0

    name: ClassVar[str] = "environment"
    concurrent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("environment", "turns", self.turns, 1, 64)
        check_range("environment", "timeout", self.timeout, 0.001)
        check_range("environment", "correct_at", self.correct_at)
        factory = live.resolve(self.factory)
        if isinstance(factory, str):
            factory = _load(factory)
        elif not callable(factory):
            raise TypeError(f"environment: factory must be a class or function, got {short(factory)}")
        self._rewards = Rewards(self.reward, self.reward_weights, quick=True) if self.reward else None
        self._pool = _Pool(factory, self.timeout)
        if self._rewards is None and not hasattr(self._pool.kind, "get_reward"):
            raise ValueError(
                f"environment: {self._pool.kind.__name__} has no get_reward, and there is no reward function: the "
                "model would learn nothing; write get_reward, or name a reward function with reward="
            )
        check_range("environment", "held_out", self.held_out, 0.0, 0.9)
        if self.file is not None:
            self._rows = _split(self.file, self.test_file, self.held_out)
            self._pool.check_columns(problem for split in self._rows.values() for problem in split)
            self.fingerprint = fingerprint(self._rows)
            self.epoch = self._epoch  # only with a file: without a file the task is not ``Finite``

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Yield rows for ``reset``, epoch after epoch. Without data, yield numbers; one in ten is a test problem."""
        check_split(split)
        if self.file is not None:
            for number in count() if self._rows[split] else ():
                yield from self._epoch(split, seed, number)
            return
        rng = Random(f"environment {seed}")

        def draw() -> tuple[str, int]:
            number = rng.getrandbits(31)
            return f"environment {number}", number

        while True:
            number = draw_of_split("environment", split, draw)
            yield Problem(f"environment/{number}", "", "all", {"row": {"prompt": EMPTY}, "number": number})

    def _epoch(self, split: Split, seed: int, number: int) -> list[Problem]:
        check_split(split)
        return Random(f"epoch {seed} {number} {split}").sample(self._rows[split], len(self._rows[split]))

    def episode(self, problem: Problem) -> EnvironmentEpisode:
        """Create an episode. No other episode uses its environment at the same time."""
        return EnvironmentEpisode(problem, self._pool, self.turns, self.correct_at)

    def score_all(self, attempts: Sequence[Attempt]) -> list[Score]:
        """Score each attempt: the environment's reward plus the weighted values of the reward functions."""
        scores = [attempt.episode.score() for attempt in attempts]
        alive = [at for at, score in enumerate(scores) if score.failed is None]
        if self._rewards is not None and alive:
            chosen = [attempts[at] for at in alive]
            rows = [attempt.problem.data["row"] for attempt in chosen]
            names = {name for row in rows for name in row}
            grades = self._rewards.score(
                prompts=[attempt.prompt for attempt in chosen],
                completions=[attempt.completion for attempt in chosen],
                completion_ids=[attempt.completion_ids for attempt in chosen],
                columns={name: [row.get(name) for row in rows] for name in sorted(names)},
                ids=[attempt.problem.id for attempt in chosen],
                state=chosen[0].progress,
                environments=[attempt.episode.environment for attempt in chosen],  # type: ignore[attr-defined]
                reported=chosen[0].reported,
            )
            for at, grade in zip(alive, grades, strict=True):
                scores[at] = self._sum(scores[at], grade)
        for attempt in attempts:
            attempt.episode.close()  # type: ignore[attr-defined]
        return scores

    def _sum(self, own: Score, grade: Grade) -> Score:
        reward = own.reward + grade.reward
        correct = reward >= self.correct_at
        failed = grade.failed if grade.applies or hasattr(self._pool.kind, "get_reward") else NO_REWARD
        return Score(reward, correct, {**own.parts, **grade.parts}, grade.answer, failed)


def _split(file: str, test_file: str | None, held_out: float) -> dict[str, list[Problem]]:
    """Read training and test problems. The test problems come from ``test_file`` or are chosen by a hash of the row."""
    problems = _problems_of(file)
    test = _problems_of(test_file) if test_file else [each for each in problems if share(_meaning(each)) < held_out]
    known = {_meaning(problem) for problem in test}
    train = [problem for problem in problems if _meaning(problem) not in known]
    if test_file and len(train) < len(problems):
        raise DataError(f"data {file}: some rows are also in {test_file}: remove them from one file")
    if not train:
        raise DataError(f"data {file}: no row is left for training: add rows, or lower held_out")
    return {"train": train, "test": test}


def _problems_of(file: str) -> list[Problem]:
    return [Problem(f"{file}:{number}", "", "all", {"row": row, "number": number}) for number, row in read_all(file)]


def _meaning(problem: Problem) -> str:
    return json.dumps(problem.data["row"], sort_keys=True)


def _load(path: str) -> Callable[[], Any]:
    """Load the factory at a path: a class with a ``reset`` method, or the user's function, which poise will call."""
    factory: Callable[[], Any] = _user_code.load("environment", path, object)
    if inspect.isclass(factory):
        fits = callable(getattr(factory, "reset", None))
    else:
        package = str(getattr(factory, "__module__", "")).partition(".")[0]
        fits = inspect.isfunction(factory) and package != "poise" and package not in sys.stdlib_module_names
    if not fits:
        raise TypeError(f"{path!r} is not an environment: name a class with a reset method, or your own function")
    return factory


class _Pool:
    """A pool of environments, which episodes reuse as in TRL. If all environments are in use, the pool creates
    another."""

    def __init__(self, factory: Callable[[], Any], timeout: float) -> None:
        self.factory, self.timeout = factory, timeout
        self.worker = Worker()
        first = self.make()
        self.free = [first]
        self.kind = type(first)
        if not callable(getattr(first, "reset", None)):
            raise ValueError(f"environment: {self.kind.__name__} has no reset method")
        methods = dict(inspect.getmembers(self.kind, predicate=inspect.isfunction))
        # A method ``feedback`` without arguments describes the episode's result; with arguments it is a tool.
        self.has_feedback = "feedback" in methods and len(inspect.signature(methods["feedback"]).parameters) == 1
        hidden = {"reset", "get_reward", *(["feedback"] if self.has_feedback else [])}
        self.tools = [name for name in methods if name not in hidden and not name.startswith("_")]
        for name in self.tools:
            _check_tool(self.kind, name)
        self.wants_seed = "seed" in inspect.signature(self.kind.reset).parameters

    def check_columns(self, problems: Iterable[Problem]) -> None:
        """Raise an error for a row that ``reset`` does not accept: every episode with this row would fail."""
        signature = inspect.signature(self.kind.reset)
        for problem in problems if inspect.isfunction(self.kind.reset) else ():
            try:
                signature.bind(self, **self.settings_of(problem))
            except TypeError as error:
                raise DataError(
                    f"data {problem.id}: {self.kind.__name__}.reset does not accept this row ({error}): every column "
                    "is passed by name; rename or remove the column, or let reset take **row"
                ) from None

    def settings_of(self, problem: Problem) -> dict[str, Any]:
        """Return the arguments of ``reset``: the row's columns, and a seed if ``reset`` has a parameter ``seed``."""
        seed = {"seed": problem.data["number"]} if self.wants_seed else {}
        return {**seed, **problem.data["row"]}

    def run(self, function: Callable[..., Any], /, *args: Any, **settings: Any) -> Any:
        """Call user code within the time limit."""
        return self.worker.run(self.timeout, function, *args, **settings)

    def make(self) -> Any:
        """Create an environment."""
        try:
            return self.run(self.factory)
        except (Exception, SystemExit) as error:
            raise ValueError(f"environment: the factory failed: {type(error).__name__}: {error}") from error


def _check_tool(kind: type, name: str) -> None:
    """Raise an error if a tool lacks type hints or a docstring: the tool's schema is built from them."""
    method = getattr(kind, name)
    docstring = inspect.getdoc(method) or ""
    arguments = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
    bare = [p.name for p in arguments if p.annotation is p.empty or not re.search(rf"(?m)^\s*{p.name}\b.*:", docstring)]
    if bare or not docstring:
        lacks = f"the argument {bare[0]} lacks one of these" if docstring else "it has no docstring"
        raise ValueError(
            f"environment: {kind.__name__}.{name} is public, so it is a tool: it needs a docstring, and each argument "
            f"needs a type hint and a line under Args: ({lacks}); if it is not a tool, begin its name with _"
        )


class EnvironmentEpisode:
    """One episode in one environment."""

    def __init__(self, problem: Problem, pool: _Pool, turns: int, correct_at: float) -> None:
        self.problem, self.pool, self.turns, self.correct_at = problem, pool, turns, correct_at
        self.name = pool.kind.__name__
        self.environment: Any = None
        self.replies = 0
        self.failed: str | None = None
        self.last_tool_text = ""
        self.final_feedback = ""

    def tools(self) -> list[Callable[..., Any]]:
        """Return the environment's tools: its public methods, unbound."""
        return [getattr(self.pool.kind, name) for name in self.pool.tools]

    def start(self) -> list[Message]:
        """Return the row's prompt; the text from ``reset`` is appended to the last message."""
        row: Mapping[str, Any] = self.problem.data["row"]
        prompt = row.get("prompt", EMPTY)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = self._call("reset", **self.pool.settings_of(self.problem))
        if self.failed is None and not isinstance(text, str | None):
            raise TaskError(f"{self.name}.reset must return text or None, got {short(text)}")
        last = {**messages[-1], "content": messages[-1]["content"] + (text or "")}
        if self.failed is None and not last["content"]:
            raise TaskError(
                f"{self.name}.reset returned no text, and there is no prompt: the model would read nothing; return the "
                "task from reset, or use data with a prompt"
            )
        return [*messages[:-1], last]

    def step(self, reply: str) -> list[Message]:
        """Run the reply's tool calls. Without a tool call, or after the last turn, the episode ends."""
        self.replies += 1
        if self.failed is not None:
            return []
        functions = {name: _synchronous(getattr(self.environment, name)) for name in self.pool.tools}
        try:
            messages: list[Message] = self.pool.run(answer_all, reply, functions)
        except HungError as error:
            self.failed = f"a tool of {self.name} {error}"
            return []
        self.last_tool_text = messages[-1]["content"] if messages else self.last_tool_text
        return messages if self.replies < self.turns else []

    def score(self) -> Score:
        """Return the score from ``get_reward``, or 0 without that method. ``score_all`` adds the reward functions."""
        reward = 0.0
        if self.failed is None and hasattr(self.pool.kind, "get_reward"):
            reward = self._call("get_reward")
            if self.failed is None and (isinstance(reward, str) or not isinstance(reward, SupportsFloat)):
                self.failed = f"{self.name}.get_reward returned {short(reward)}, not a number"
        if self.failed is not None:
            return Score(0.0, False, failed=self.failed)
        return Score(reward, reward >= self.correct_at, {self.name: reward})

    def feedback(self) -> str:
        """Return the text of the environment's ``feedback``, or else the last result of a tool."""
        if self.final_feedback:
            return self.final_feedback
        said = (
            f"The last tool said {quote(self.last_tool_text, 200)}." if self.last_tool_text else "No tool was called."
        )
        return f"{said} Turns: {self.replies}."

    def close(self) -> None:
        """Get the environment's feedback, and return the environment to the pool unless the episode failed."""
        if self.pool.has_feedback and self.failed is None and self.environment is not None:
            text = self._call("feedback")
            if self.failed is None and not isinstance(text, str):
                raise TaskError(f"{self.name}.feedback must return text, got {short(text)}")
            self.final_feedback = text or ""
        if self.failed is None and self.environment is not None:
            self.pool.free.append(self.environment)
        self.environment = None

    def _call(self, method: str, /, **settings: Any) -> Any:
        """Call a method of the environment. If it fails, the episode ends without a score."""
        try:
            if self.environment is None:
                self.environment = self.pool.free.pop() if self.pool.free else self.pool.make()
            return self.pool.run(getattr(self.environment, method), **settings)
        except (Exception, SystemExit) as error:
            what = str(error) if isinstance(error, HungError) else f"raised {type(error).__name__}: {error}"
            self.failed = f"{self.name}.{method} {what}"
            return None


def _synchronous(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that a call waits for the result if the method is async."""
    return lambda **arguments: result_of(method(**arguments))
