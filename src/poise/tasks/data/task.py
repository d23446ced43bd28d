"""A data set as a task: questions come from columns, scores from reward functions with TRL's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any, ClassVar

from poise._lib.errors import check_choice, check_range, check_whole, counted
from poise.tasks.base import NO_REWARD, Attempt, Message, Problem, Score, Split
from poise.tasks.data.order import Mixture, Stream, Table
from poise.tasks.data.reader import QUESTION_COLUMNS, Make, Reader, places, question_key
from poise.tasks.data.rows import DataError, fingerprint, plain_row, share
from poise.tasks.data.sources import OFF, Source, Tables, each_row, sources_of
from poise.tasks.episodes import SingleTurn
from poise.tasks.rewards import Rewards, text_of
from poise.tasks.streams import check_split


class Dialogue(SingleTurn):
    """A single-turn episode that starts with the messages of a row. ``Data.score_all`` scores whole batches."""

    parts: Mapping[str, float] = MappingProxyType({})  # the values of the rewards, by name

    def start(self) -> list[Message]:
        """Return the row's messages."""
        return list(self.problem.data["messages"])

    def feedback(self) -> str:
        """Return what is wrong with the reply. Call this after ``Data.score_all``."""
        feedback: str = self.task.rewards.feedback(self.reply, self.parts)  # type: ignore[attr-defined]
        return feedback


@dataclass
class Data:
    """Your questions from a file, and reward functions that score the answers.

    ``file`` is a file (jsonl, json, csv or parquet), a folder that ``datasets`` saved, or a hub id; in Python also a
    ``datasets.Dataset``, a list of dicts, or any object with ``len()`` and indexing. A list of data sets, each with a
    ``name`` and optionally a ``weight``, is a mixture. ``config`` and ``split`` choose the training data.
    ``test_split`` chooses the held-out split: by default ``test`` or ``validation``, if the data set has one; with
    ``off``, no test split is used. With ``streaming``, poise reads a large data set during training and shuffles it in
    blocks of ``buffer`` rows. ``test_file`` is a data set of held-out problems. Without it and without a test split,
    the share ``held_out`` of the training data is held out, chosen by a hash of the question.

    ``reward`` is the name of a built-in reward, ``file.py:name``, a dotted path, or a list of these, with
    ``reward_weights`` (default: 1 each). A call of a reward that hangs is cut off after ``reward_timeout`` seconds.
    With ``reward_quick``, rewards run in the trainer's process, where no call can be cut off. ``question`` and
    ``answer`` name a column, or several, of which poise uses the first that a data set has; without them, poise looks
    for common names. Rewards get all columns. ``difficulty`` names a column; poise reports accuracy for each value of
    this column. ``system`` is a system message before the question. ``template`` is the user's message; in it, poise
    replaces ``{question}``, or any other column in braces, with the column's value.
    """

    file: Any
    reward: Any = ()
    reward_weights: Sequence[float] | None = None
    reward_timeout: float = 30.0
    reward_quick: bool = False
    question: str | Sequence[str] | None = None
    answer: str | Sequence[str] | None = None
    difficulty: str | None = None
    system: str | None = None
    template: str = "{question}"
    test_file: Any = None
    held_out: float = 0.1
    config: str | None = None
    split: str = "train"
    test_split: str | None = None
    streaming: bool = False
    buffer: int = 10_000

    name: ClassVar[str] = "data"
    one_turn: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(self.name, "held_out", self.held_out, 0.0, 0.9)
        check_whole(self.name, "buffer", self.buffer, 1)
        if not self.reward:
            raise ValueError("a dataset needs a reward: reward=math, reward=exact, or reward=my_rewards.py:correct")
        if isinstance(self.reward_weights, int | float):
            self.reward_weights = [self.reward_weights]
        # The rewards determine which columns the data must have.
        self.rewards = Rewards(self.reward, self.reward_weights, self.reward_timeout, self.reward_quick)
        self.notes: list[str] = []  # notes about the data for the user
        self._load()

    @property
    def source(self) -> str:
        """The name of the data set in messages."""
        return " and ".join(map(str, self._sources()))

    # Problems

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Yield all problems of a split, epoch after epoch."""
        for number in count():
            if not (problems := self.epoch(split, seed, number)):
                return
            yield from problems

    def epoch(self, split: Split, seed: int, number: int) -> Sequence[Problem]:
        """Return the problems of a split, in the order of an epoch."""
        check_split(split)
        if split == "train":
            return self._train.epoch(seed, number)
        size = len(self._test.problems)
        return [self._test.at(seed, place) for place in range(number * size, (number + 1) * size)]

    def leave_out(self, unfit: Callable[[Problem], bool], why: str, remedy: str = "") -> None:
        """Remove problems that do not fit the model, and add a note. ``remedy`` is the advice if no problem is left."""
        parts = self._train.parts
        for split, part in [*(("train", part) for part in parts), ("test", self._test)]:
            out = part.leave_out(unfit)
            number = counted(len(out), f"{split} problem")
            if out and isinstance(part, Table) and not part.problems:
                raise DataError(f"data {part.source}: all {number} left out, {why}{remedy and f': {remedy}'}")
            if out:
                of = f"{part.source}: " if len(parts) > 1 and split == "train" else ""
                self.notes.append(f"{of}{number} left out, {why}: {places(out)}")
        self._train.changed()

    def sizes(self) -> str:
        """Describe the number of problems, for the user."""
        train = sum(len(part.problems) for part in self._train.parts if isinstance(part, Table))
        streamed = [part.source for part in self._train.parts if isinstance(part, Stream)]
        said = [counted(train, "problem") + " to train on"] if train else []
        said += [f"{source} is streamed, in blocks of {self.buffer:,} rows" for source in streamed]
        return f"{', '.join(said)}, {len(self._test.problems):,} held out ({self._where})"

    # Scores

    def episode(self, problem: Problem) -> Dialogue:
        """Create a single-turn episode."""
        return Dialogue(self, problem)  # type: ignore[arg-type]

    def score_all(self, attempts: Sequence[Attempt]) -> list[Score]:
        """Score all attempts with one call of each reward."""
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

    def _sources(self) -> list[Source]:
        settings = {key: getattr(self, key) for key in ("config", "split", "test_split", "streaming")}
        return sources_of(self.file, self._question_columns(), **settings)

    def _question_columns(self) -> list[str]:
        named = [self.question] if isinstance(self.question, str) else self.question or ()
        return [*named, *QUESTION_COLUMNS]

    def _load(self) -> None:
        """Read the training problems and the held-out problems."""
        sources = self._sources()
        reader = Reader(self, mixed=len(sources) > 1)
        sets = [self._open(source, reader) for source in sources]
        test, self._where = self._hold_out(sets, reader)
        known = {question_key(problem) for problem in test}
        for each in sets:
            each.reserve(known, self.notes)
        order = f" in blocks of {self.buffer}" if any(each.tables.streamed for each in sets) else ""
        parts = [each.part("train" + f" {number}" * bool(number)) for number, each in enumerate(sets)]
        self.fingerprint = fingerprint({"train": [p for each in sets for p in each.problems], "test": test}) + order
        self._train = Mixture(parts, [source.weight for source in sources])
        self._test = Table(self.source, "test", test)

    def _open(self, source: Source, reader: Reader) -> _Set:
        tables = Tables(source, self.buffer)
        problems, make = reader.read(tables.rows(tables.training()), str(source))
        return _Set(tables, problems, make)

    def _hold_out(self, sets: Sequence[_Set], reader: Reader) -> tuple[list[Problem], str]:
        """Return the held-out problems of all data sets, and a description of their origin."""
        if self.test_file is not None:
            found = sources_of(self.test_file, self._question_columns(), test_split=self.test_split)
            opened = [Tables(source, self.buffer) for source in found]
            test = [p for tables in opened for p in self._read_held_out(tables, tables.only_held_out(), reader)]
            return test, " and ".join(map(str, found))
        test, where = [], dict[str, None]()
        for each in sets:
            tables, split = each.tables, each.tables.held_out()
            if split is None:
                each.share = self.held_out
                where[f"chosen by a hash of the question, task.held_out={self.held_out:g}"] = None
                test += each.chosen()
                continue
            found_by_name = "" if tables.source.test_split else f", since data.test_split is not {OFF}"
            where[f"split {split} of {tables.source}{found_by_name}"] = None
            test += self._read_held_out(tables, split, reader)
        return test, " and ".join(where)

    def _read_held_out(self, tables: Tables, split: str, reader: Reader) -> list[Problem]:
        return reader.read(tables.rows(split, "test_split"), str(tables.source))[0]


@dataclass
class _Set:
    """One data set: its problems (for a streamed set, only the first block), and the function that converts a row.

    The share ``share`` of the questions is held out, chosen by a hash.
    """

    tables: Tables
    problems: list[Problem]
    make: Make
    share: float = 0.0
    known: set[str] = field(default_factory=set)  # the keys of all held-out problems

    def chosen(self) -> list[Problem]:
        """Return the held-out problems that the hash chooses."""
        found = [problem for problem in self.problems if self._chosen(problem)]
        if self.tables.streamed and self.share and not found:
            raise DataError(
                f"data {self.tables.source}: none of its first {counted(len(self.problems), 'row')} falls into the "
                "held-out share: raise task.held_out, name task.test_file=FILE, or set task.held_out=0 evaluation=off"
            )
        return found

    def reserve(self, known: set[str], notes: list[str]) -> None:
        """Remove every data set's held-out problems from this data set's training problems."""
        self.known = known
        both = [problem for problem in self.problems if question_key(problem) in known and not self._chosen(problem)]
        if both:
            asked = f"{len(both)} of {counted(len(self.problems), 'question')} in {self.tables.source}"
            notes.append(f"{asked} left out of training, as they are held out too: {places(both)}")
        self.problems = [problem for problem in self.problems if not self._reserved(problem)]

    def part(self, name: str) -> Table | Stream:
        """Return the training problems. ``name`` is part of the seed of their order."""
        source, tables = str(self.tables.source), self.tables
        if not tables.streamed:
            return Table(source, name, self.problems)
        table = tables.table(tables.training())
        return Stream(source, name, lambda: self._streamed(table), tables.buffer)

    def _streamed(self, table: Any) -> Iterator[Problem | None]:
        """Convert each row to a problem; None for a row that is unusable or held out."""
        for number, row in enumerate(each_row(table), 1):
            problem = None
            with suppress(ValueError):
                problem = self.make(number, plain_row(row))
            yield None if problem is None or self._reserved(problem) else problem

    def _chosen(self, problem: Problem) -> bool:
        return self.share > 0 and share(question_key(problem)) < self.share

    def _reserved(self, problem: Problem) -> bool:
        return question_key(problem) in self.known or self._chosen(problem)


@dataclass
class Math(Data):
    """Mathematics from a file (GSM8K, MATH, DeepScaleR, AIME or any file with such columns), scored by ``math``."""

    reward: Any = "math"
    template: str = "{question}\n\nReason step by step, and put your final answer within \\boxed{}."

    name: ClassVar[str] = "math"


def task_of(data: Any, *, test: Any = None, name: str = "data", **settings: Any) -> Data:
    """Build the task of a data set in memory: a ``datasets.Dataset`` or a list of rows.

    >>> task = task_of(dataset, reward=my_reward, question="problem", held_out=0.2)

    ``data`` may also be a file, a hub id or a list of data sets; see ``Data.file``. ``test`` is the held-out data set,
    ``name`` is ``data`` or ``math``, and ``settings`` are the task's settings.
    """
    kinds = {kind.name: kind for kind in (Data, Math)}
    check_choice("task_of", "name", name, kinds)
    return kinds[name](data, test_file=test, **settings)
