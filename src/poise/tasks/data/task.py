"""A dataset as a task: questions from its columns, scores from reward functions with TRL's signature."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from random import Random
from typing import Any, ClassVar

from poise._lib.errors import check_range, counted, short
from poise.rewards import GOLD_COLUMNS, Rewards, text_of
from poise.tasks.base import NO_REWARD, Attempt, Message, Problem, Score, Split, check_split
from poise.tasks.data.rows import DataError, Row, Rows, fingerprint, read, share, some, splits_of

QUESTION_COLUMNS = ("prompt", "question", "problem", "messages")  # looked for in this order
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass
class Dialogue:
    """An episode of one turn, which starts with the messages of a row."""

    messages: list[Message]
    rewards: Rewards
    reply: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)  # what each reward said

    def start(self) -> list[Message]:
        """The row's messages."""
        return self.messages

    def step(self, reply: str) -> list[Message]:  # noqa: ARG002
        """Any reply ends it."""
        return []

    def score(self) -> Score:
        """Never asked for: ``Data.score_all`` scores whole batches."""
        raise NotImplementedError

    def feedback(self) -> str:
        """What is wrong with the reply; to be asked for after ``Data.score_all``."""
        return self.rewards.feedback(self.reply, self.parts)


@dataclass(frozen=True)
class Data:
    """Your own questions: a file of them, and a reward function that scores the answers.

    ``file`` is jsonl, json, csv or parquet, a folder that ``datasets`` saved, or a hub id. ``reward`` is the name of a
    built-in reward, ``file.py:name``, a dotted path, or a list of these, with ``reward_weights`` (default: 1 each). A
    call that hangs is cut off after ``reward_timeout`` seconds; with ``reward_quick`` rewards run in the trainer's own
    process, where nothing can cut them off. ``question`` and ``answer`` name columns; without them, common names are
    looked for. All columns reach the reward. ``difficulty`` is a column for whose values accuracy is shown apart.
    ``system`` is a system message before the question. ``template`` makes the user's message of a question:
    ``{question}``, or any column in braces, stands for its value. ``test_file`` holds the held-out problems; without
    one, ``held_out`` is the share that is chosen for it, by a hash of the question. ``split`` is that of a hub id, or
    of a folder that has several.
    """

    file: str
    reward: Any = ()
    reward_weights: Sequence[float] | None = None
    reward_timeout: float = 30.0
    reward_quick: bool = False
    question: str | None = None
    answer: str | None = None
    difficulty: str | None = None
    system: str | None = None
    template: str = "{question}"
    test_file: str | None = None
    held_out: float = 0.1
    split: str = "train"

    name: ClassVar[str] = "data"
    concurrent: ClassVar[bool] = False
    one_turn: ClassVar[bool] = True

    rewards: Rewards = field(init=False, repr=False, compare=False)
    notes: list[str] = field(init=False, repr=False, compare=False)  # what a user should know about the data
    fingerprint: str = field(init=False, repr=False, compare=False)  # another one: the data are others
    _problems: dict[str, list[Problem]] = field(init=False, repr=False, compare=False)
    _order: Callable[[str, int, int], list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_range(self.name, "held_out", self.held_out, 0.0, 0.9)
        if not self.reward:
            raise ValueError("a dataset needs a reward: reward=math, reward=exact, or reward=my_rewards.py:correct")
        if isinstance(self.reward_weights, int | float):
            object.__setattr__(self, "reward_weights", [self.reward_weights])
        specs = list(self.reward) if isinstance(self.reward, list | tuple) else self.reward
        notes: list[str] = []
        rewards = Rewards(specs, self.reward_weights, self.reward_timeout, self.reward_quick)
        object.__setattr__(self, "rewards", rewards)  # they say which columns the data must have
        problems = self._load(notes)
        made = {
            "notes": notes,
            "fingerprint": fingerprint(problems),
            "_problems": problems,
            "_order": lru_cache(4)(self._shuffled),
        }
        for key, value in made.items():
            object.__setattr__(self, key, value)

    # Problems

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """All problems of a split, epoch after epoch."""
        for number in count():
            found = self.epoch(split, seed, number)
            if not found:
                return
            yield from found

    def epoch(self, split: Split, seed: int, number: int) -> list[Problem]:
        """The problems of a split in the order of an epoch."""
        check_split(split)
        problems = self._problems[split]
        return [problems[place] for place in self._order(split, seed, number)]

    def _shuffled(self, split: str, seed: int, number: int) -> list[int]:
        order = list(range(len(self._problems[split])))
        Random(f"epoch {seed} {number} {split}").shuffle(order)
        return order

    def leave_out(self, unfit: Callable[[Problem], bool], why: str, remedy: str = "") -> None:
        """Leave out the problems that do not fit the model, and note it. ``remedy`` is for where none is left."""
        for split, problems in self._problems.items():
            out = [problem for problem in problems if unfit(problem)]
            if len(out) == len(problems) and out:
                everything = counted(len(out), f"{split} problem is", f"{split} problems are")
                raise DataError(f"data {self.file}: all {everything} left out, {why}{remedy and f': {remedy}'}")
            if out:
                gone = {problem.id for problem in out}
                problems[:] = [problem for problem in problems if problem.id not in gone]
                number = counted(len(out), f"{split} problem is", f"{split} problems are")
                self.notes.append(f"{number} left out, {why}: {_places(out)}")
        self._order.cache_clear()  # type: ignore[attr-defined]

    def sizes(self) -> str:
        """How many problems there are, for a person."""
        where = self.test_file or f"chosen by a hash of the question, task.held_out={self.held_out:g}"
        train, test = (len(self._problems[split]) for split in ("train", "test"))
        return f"{counted(train, 'problem')} to train on, {test:,} held out ({where})"

    # Scores

    def episode(self, problem: Problem) -> Dialogue:
        """One turn."""
        return Dialogue(list(problem.data["messages"]), self.rewards)

    def score_all(self, attempts: Sequence[Attempt]) -> list[Score]:
        """What the rewards say, all in one call."""
        rows = [attempt.problem.data["row"] for attempt in attempts]
        names = {name: None for row in rows for name in row}
        verdicts = self.rewards.score(
            [a.prompt if a.problem.data["chat"] else a.problem.data["text"] for a in attempts],
            [a.completion if a.problem.data["chat"] else a.completion[-1]["content"] for a in attempts],
            [attempt.completion_ids for attempt in attempts],
            {name: [row.get(name) for row in rows] for name in names},
            [attempt.problem.id for attempt in attempts],
            attempts[0].progress if attempts else None,
            reported=attempts[0].reported if attempts else None,
        )
        for attempt, verdict in zip(attempts, verdicts, strict=True):
            if isinstance(attempt.episode, Dialogue):
                attempt.episode.reply, attempt.episode.parts = text_of(attempt.completion), verdict.parts
        return [Score(v.reward, v.correct, v.parts, v.answer, v.failed if v.applies else NO_REWARD) for v in verdicts]

    # Rows

    def _load(self, notes: list[str]) -> dict[str, list[Problem]]:
        """The problems of both splits."""
        splits = splits_of(self.file)
        first = self._read(self.file, self.split, notes)
        if self.test_file is not None:
            held_out = self._read(self.test_file, "test" if "test" in splits_of(self.test_file) else self.split, notes)
        elif self.split == "train" and "test" in splits:
            held_out = self._read(self.file, "test", notes)
        else:
            chosen = {p.id: share(_key(p)) < self.held_out for p in first}
            return {
                "train": [p for p in first if not chosen[p.id]],
                "test": [p for p in first if chosen[p.id]],
            }
        known = {_key(problem) for problem in held_out}
        both = [problem for problem in first if _key(problem) in known]
        if both:
            notes.append(
                f"{len(both)} of {counted(len(first), 'question')} in {self.file} {'is' if len(both) == 1 else 'are'} "
                f"also among the held-out ones, and left out of training: {_places(both)}"
            )
        return {"train": [problem for problem in first if _key(problem) not in known], "test": held_out}

    def _read(self, source: str, split: str, notes: list[str]) -> list[Problem]:
        found = read(source, split)
        rows = found.rows
        if not rows:
            unread = f"; {_lines(found)}" if found.unreadable else ""
            raise DataError(f"data {source} has no row{unread}")
        columns = list(dict.fromkeys(name for _, row in rows for name in row))
        question = _column("question", self.question, QUESTION_COLUMNS, columns, source)
        answer = _column("answer", self.answer, (), columns, source) if self.answer else _usual(GOLD_COLUMNS, columns)
        renamed = str(answer).lower() if self.answer is None else GOLD_COLUMNS[0]  # where rewards look for it
        if self.difficulty is not None:
            _column("difficulty", self.difficulty, (), columns, source)
        problems, empty, wrong = [], [], []
        for number, row in rows:
            try:
                messages, chat = self._messages(row, question)
            except ValueError as error:
                wrong.append((number, str(error)))
                continue
            if messages is None:
                empty.append(number)
                continue
            given = row if answer is None else {**row, renamed: row.get(answer)}
            text = row[question] if isinstance(row[question], str) else str(messages[-1]["content"])
            data = {"row": given, "messages": messages, "chat": chat, "text": text}
            level = "all" if self.difficulty is None else str(row.get(self.difficulty))
            problems.append(Problem(f"{source}:{number}", str(messages[-1]["content"]), level, data))
        if found.unreadable:
            notes.append(f"{source}: {_lines(found)}")
        if wrong:
            why = wrong[0][1]
            lines = some([number for number, _ in wrong])
            notes.append(f"{source}: {counted(len(wrong), 'row')} cannot be used ({why}): {lines}")
        if empty:
            said = counted(len(empty), "row has no question and is", "rows have no question and are")
            notes.append(f"{source}: {said} left out: {some(empty)}")
        if not problems:
            asked = counted(len(rows), "row")
            why = f" ({wrong[0][1]})" if wrong else ""
            raise DataError(f"data {source}: none of its {asked} has a question in column {question!r}{why}")
        self._check_answers([*columns, *([renamed] if answer else [])], source)
        golds = [name or (renamed if answer else GOLD_COLUMNS[0]) for name in self.rewards.answer_columns()]
        unknown = [p for p in problems if any(p.data["row"].get(name) in (None, "") for name in golds)]
        if unknown:
            said = counted(len(unknown), "row has no answer, and gets", "rows have no answer, and get")
            notes.append(f"{source}: {said} no reward from rewards that compare with it: {_places(unknown)}")
        copies = _repeated(problems)
        if copies:
            said = counted(len(copies), "row repeats", "rows repeat")
            kept = "is kept" if len(copies) == 1 else "are kept"
            notes.append(f"{source}: {said} an earlier question, and {kept}: {_places(copies)}")
        return problems

    def _check_answers(self, columns: Sequence[str], source: str) -> None:
        """Raise where a reward would find no right answer to compare with: it is called long after."""
        for name in self.rewards.answer_columns():
            if name is None:
                _column("answer", None, GOLD_COLUMNS, columns, source)
            elif name not in columns:
                known = ", ".join(columns)
                raise DataError(f"data {source} has no column {name!r}, which a reward names (it has: {known})")

    def _messages(self, row: Row, question: str) -> tuple[list[Message] | None, bool]:
        """What the model is shown first, and whether the row holds messages itself; None: there is no question."""
        asked = row.get(question)
        if asked is None or (isinstance(asked, str) and not asked.strip()) or asked == []:
            return None, False
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        if isinstance(asked, list):
            messages = [_message(each) for each in asked]
            while messages and messages[-1]["role"] == "assistant":  # a solution, as in data for fine-tuning
                messages.pop()
            if not messages:
                return None, True
            if messages[0]["role"] == "system":
                system = []
            if self.template != "{question}":
                messages[-1] = {**messages[-1], "content": self._fill(row, messages[-1]["content"])}
            return system + messages, True
        return [*system, {"role": "user", "content": self._fill(row, str(asked))}], False

    def _fill(self, row: Row, question: str) -> str:
        values = {**row, "question": question}
        return re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], self.template)


@dataclass(frozen=True)
class Math(Data):
    """Mathematics from a file: GSM8K, MATH, DeepScaleR, AIME and whatever has their columns, scored by ``math``."""

    reward: Any = "math"
    template: str = "{question}\n\nReason step by step, and put your final answer within \\boxed{}."

    name: ClassVar[str] = "math"


def _message(value: Any) -> Message:
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str) or value.get("role") not in ROLES:
        raise ValueError(f"a message must have a role ({', '.join(ROLES)}) and a content of text, got {short(value)}")
    return {"role": value["role"], "content": content}


def _places(problems: Sequence[Problem]) -> str:
    """The lines of problems, for a message."""
    return some([int(problem.id.rpartition(":")[2]) for problem in problems])


def _column(what: str, name: str | None, usual: Sequence[str], columns: Sequence[str], source: str) -> str:
    """The column that holds a question or an answer, or what to do."""
    if name is not None and name not in columns:
        raise DataError(f"data {source} has no column {name!r} (it has: {', '.join(columns)}): task.{what}=COLUMN")
    found = name or _usual(usual, columns)
    if found is None:
        raise DataError(
            f"data {source}: none of its columns is called {', '.join(usual)} (it has: {', '.join(columns)}); "
            f"name the one with the {what}: task.{what}=COLUMN"
        )
    return found


def _usual(usual: Sequence[str], columns: Sequence[str]) -> str | None:
    """The first column with a usual name, in whatever case."""
    known = {column.lower(): column for column in reversed(columns)}
    return next((known[name] for name in usual if name in known), None)


def _key(problem: Problem) -> str:
    """Equal for the same question, whatever its spaces and letter case."""
    return " ".join(problem.data["text"].casefold().split())


def _repeated(problems: Sequence[Problem]) -> list[Problem]:
    """Those whose question an earlier one has."""
    first: dict[str, Problem] = {}
    return [problem for problem in problems if first.setdefault(_key(problem), problem) is not problem]


def _lines(found: Rows) -> str:
    number, why = found.unreadable[0]
    listed = some([number for number, _ in found.unreadable])
    said = counted(len(found.unreadable), "row cannot be read and is", "rows cannot be read and are")
    return f"{said} left out: {listed} ({f'line {number}: ' if len(found.unreadable) > 1 else ''}{why})"
