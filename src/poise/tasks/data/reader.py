"""Convert rows to problems: find the question and answer columns, build the messages, and skip unusable rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poise._lib.errors import counted, short
from poise.tasks.base import Message, Problem
from poise.tasks.data.rows import DataError, Row, Rows, some
from poise.tasks.rewards import GOLD_COLUMNS
from poise.tasks.rewards.base import gold_texts

if TYPE_CHECKING:
    from poise.tasks.data.task import Data

QUESTION_COLUMNS = ("prompt", "question", "problem", "messages")  # tried in this order
ROLES = ("system", "developer", "user", "assistant", "tool")
Names = str | Sequence[str] | None  # one column, several (the first that exists is used), or None (try common names)
Make = Callable[[int, Row], Problem | None]  # converts a row and its number to a problem; None without a question


@dataclass(frozen=True)
class Reader:
    """Converts rows to problems according to the task's settings.

    ``mixed`` is True if there are several data sets. In this case all problems have the right answer in the same
    column, and a problem's difficulty is the name of its data set.
    """

    task: Data
    mixed: bool

    def read(self, found: Rows, name: str) -> tuple[list[Problem], Make]:
        """Convert the rows to problems. Also return the function that converts other rows of the data set ``name``."""
        source, rows = found.source, found.rows
        if not rows:
            unread = f"; {_lines(found)}" if found.unreadable else ""
            raise DataError(f"data {source} has no row{unread}")
        columns = list(dict.fromkeys(column for _, row in rows for column in row))
        make, gold = self._columns(source, columns, name)
        problems, empty, wrong = [], [], []
        for number, row in rows:
            try:
                problem = make(number, row)
            except ValueError as error:
                wrong.append((number, str(error)))
                continue
            if problem is None:
                empty.append(number)
            else:
                problems.append(problem)
        if found.unreadable:
            self.task.notes.append(f"{source}: {_lines(found)}")
        if wrong:
            self._note(source, f"left out ({wrong[0][1]})", [number for number, _ in wrong])
        self._note(source, "without a question (left out)", empty)
        if not problems:
            asked, why = counted(len(rows), "row"), f" ({wrong[0][1]})" if wrong else ""
            question = _column("question", self.task.question, QUESTION_COLUMNS, columns, source)
            raise DataError(f"data {source}: none of its {asked} has a question in column {question!r}{why}")
        self._check_answers([*columns, *([gold] if gold else [])], source)
        golds = [name or gold or GOLD_COLUMNS[0] for name in self.task.rewards.answer_columns()]
        unknown = [p for p in problems if any(not gold_texts(p.data["row"].get(name)) for name in golds)]
        self._note(source, "without an answer (rewards that compare with the answer do not apply)", _numbers(unknown))
        first: dict[str, Problem] = {}
        copies = [p for p in problems if first.setdefault(question_key(p), p) is not p]
        self._note(source, "with a repeated question (kept)", _numbers(copies))
        return problems, make

    def _note(self, source: str, what: str, numbers: list[int]) -> None:
        """Add a note for the user about these rows, unless ``numbers`` is empty."""
        if numbers:
            self.task.notes.append(f"{source}: {counted(len(numbers), 'row')} {what}: {some(numbers)}")

    def _columns(self, source: str, columns: Sequence[str], name: str) -> tuple[Make, str | None]:
        """Return the function that converts a row to a problem, and the column with the right answer for rewards."""
        task = self.task
        question = _column("question", task.question, QUESTION_COLUMNS, columns, source)
        answer = _column("answer", task.answer, (), columns, source) if task.answer else _usual(GOLD_COLUMNS, columns)
        if task.difficulty is not None:
            _column("difficulty", task.difficulty, (), columns, source)
        usual = task.answer is None and not self.mixed
        gold = None if answer is None else answer.lower() if usual else GOLD_COLUMNS[0]

        def make(number: int, row: Row) -> Problem | None:
            messages, chat = self._messages(row, question)
            if messages is None:
                return None
            given = row if answer is None else {**row, str(gold): row.get(answer)}
            text = row[question] if isinstance(row[question], str) else str(messages[-1]["content"])
            data = {"row": given, "messages": messages, "chat": chat, "text": text}
            level = name if self.mixed else "all"
            if task.difficulty is not None:
                level = str(row.get(task.difficulty))
            return Problem(f"{source}:{number}", str(messages[-1]["content"]), level, data)

        return make, gold

    def _check_answers(self, columns: Sequence[str], source: str) -> None:
        """Raise an error if a reward needs the right answer but the data has no such column. Without this check, the
        error would come much later."""
        for name in self.task.rewards.answer_columns():
            if name is None:
                _column("answer", None, GOLD_COLUMNS, columns, source)
            elif name not in columns:
                known = ", ".join(columns)
                raise DataError(f"data {source} has no column {name!r}, which a reward names (it has: {known})")

    def _messages(self, row: Row, question: str) -> tuple[list[Message] | None, bool]:
        """Return the first messages (None without a question), and whether the row's question is a list of messages."""
        asked = row.get(question)
        if asked is None or (isinstance(asked, str) and not asked.strip()) or asked == []:
            return None, False
        system: list[Message] = [] if self.task.system is None else [{"role": "system", "content": self.task.system}]
        if isinstance(asked, list):
            messages = [_message(each) for each in asked]
            while messages and messages[-1]["role"] == "assistant":  # a solution, as in data for fine-tuning
                messages.pop()
            if not messages:
                return None, True
            if messages[0]["role"] == "system":
                system = []
            if self.task.template != "{question}":
                messages[-1] = {**messages[-1], "content": self._fill(row, messages[-1]["content"])}
            return system + messages, True
        return [*system, {"role": "user", "content": self._fill(row, str(asked))}], False

    def _fill(self, row: Row, question: str) -> str:
        values = {**row, "question": question}
        return re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], self.task.template)


def _message(value: Any) -> Message:
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str) or value.get("role") not in ROLES:
        raise ValueError(f"a message must have a role ({', '.join(ROLES)}) and text as its content, got {short(value)}")
    return {"role": value["role"], "content": content}


def places(problems: Sequence[Problem]) -> str:
    """List the problems' row numbers, for a message."""
    return some(_numbers(problems))


def _numbers(problems: Sequence[Problem]) -> list[int]:
    return [int(problem.id.rpartition(":")[2]) for problem in problems]


def _column(what: str, named: Names, usual: Sequence[str], columns: Sequence[str], source: str) -> str:
    """Return the column of questions or answers. If there is none, raise an error that says what to do."""
    names = [named] if isinstance(named, str) else list(named or ())
    found = next((name for name in names if name in columns), None) or (None if names else _usual(usual, columns))
    if found is None and names:
        listed = " or ".join(map(repr, names))
        raise DataError(f"data {source} has no column {listed} (it has: {', '.join(columns)}): set task.{what}=COLUMN")
    if found is None:
        raise DataError(
            f"data {source}: none of its columns is called {', '.join(usual)} (it has: {', '.join(columns)}); "
            f"name the column with the {what}: set task.{what}=COLUMN"
        )
    return found


def _usual(usual: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the first column with a common name, ignoring case."""
    known = {column.lower(): column for column in reversed(columns)}
    return next((known[name] for name in usual if name in known), None)


def question_key(problem: Problem) -> str:
    """Return a key for the question that ignores spacing and letter case."""
    return " ".join(problem.data["text"].casefold().split())


def _lines(found: Rows) -> str:
    number, why = found.unreadable[0]
    listed = some([number for number, _ in found.unreadable])
    return f"{counted(len(found.unreadable), 'unreadable row')} left out: {listed} (line {number}: {why})"
