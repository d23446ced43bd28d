"""The right answer to a problem, for people who read a run's responses. Neither the model nor its feedback sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poise.rewards.base import GOLD_COLUMNS
from poise.tasks.base import Problem, Task, explained, readable

LONGEST = 4000  # characters: data for fine-tuning has whole solutions there


def gold_answer(task: Task, problem: Problem) -> str | None:
    """The right answer in words; None where there is none to show.

    A task may have ``gold(problem)``. For any other, it is the first text or number called answer, solution or
    ground_truth in the problem's data, or in the row of a file that the data hold.
    """
    if callable(own := getattr(task, "gold", None)):  # it may be a setting of the task, such as a column's name
        with explained(task, problem, "the gold answer"):
            found = own(problem)
    else:
        data: Any = problem.data
        places = [data, data.get("row")] if isinstance(data, Mapping) else []
        values = [place.get(key) for place in places if isinstance(place, Mapping) for key in GOLD_COLUMNS]
        found = next(filter(_is_plain, values), None)
    return readable(str(found).strip())[:LONGEST] or None if _is_plain(found) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return bool(abs(value) < 10**LONGEST)  # Python writes no longer one
    return isinstance(value, str | float)
