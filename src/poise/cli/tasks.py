"""``poise tasks``."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Optional

import typer

from poise import tasks
from poise.cli.common import fail


def list_tasks(context: typer.Context) -> None:
    """List the tasks and their settings."""
    if context.invoked_subcommand is None:
        for name in tasks.names():
            doc = (tasks.TASKS[name].__doc__ or "").strip().splitlines()
            print(f"{name:6s} {doc[0] if doc else ''}\n       settings: {', '.join(tasks.settings_of(name))}")


def show(
    name: Annotated[str, typer.Argument()],
    args: Annotated[Optional[list[str]], typer.Argument(metavar="[SETTING=VALUE]...")] = None,  # noqa: UP045
    people: Annotated[Optional[str], typer.Option(help="For kk: how many people.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option()] = 0,
    split: Annotated[str, typer.Option(help="train or test")] = "train",
) -> None:
    """Look at a problem: its prompt, a worked solution where the task has one, and its score.

    Examples:

    - `poise tasks show kk --people 4 --seed 0`
    - `poise tasks show kk --people 3 style=compact phrasing=plain`
    """
    task = _task(name, people, args or [])
    try:
        problem = next(islice(task.problems(split, seed), 1))  # type: ignore[arg-type]
    except ValueError as error:
        fail(error)
    print(f"{problem.id} (difficulty {problem.difficulty}, {split})\n\n{problem.prompt}")
    if isinstance(task, tasks.Demonstrates):
        text = task.demonstration(problem, seed=seed)
        print(f"\n--- a worked solution\n{text}\n\n--- its score\n{task.score(problem, text)}")


def _task(name: str, people: str | None, args: list[str]) -> tasks.Task:
    from poise.config.documents import split_overrides

    try:
        settings, _ = split_overrides(args)
        if people is not None:
            settings["people"] = people
        return tasks.get(name, **settings)
    except (ValueError, TypeError) as error:
        fail(error)
