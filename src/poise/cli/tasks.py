"""``poise tasks``."""

from __future__ import annotations

from typing import Annotated

import typer

from poise.cli.common import explained, fail


def list_tasks(context: typer.Context) -> None:
    """List the tasks and their settings."""
    if context.invoked_subcommand is not None:
        return
    from poise import tasks

    rows = [(name, maker, ", ".join(tasks.settings_of(name))) for name, maker in tasks.TASKS.items()]
    rows += [(f"{prefix}/NAME", maker, "those of NAME") for prefix, maker in tasks.PREFIXES.items()]
    width = max(len(name) for name, *_ in rows)
    for name, maker, settings in rows:
        about = (maker.__doc__ or "").strip().partition("\n")[0]
        print(f"{name:{width}s} {about}\n{'':{width}s} settings: {settings}")


def show(
    args: Annotated[list[str] | None, typer.Argument(metavar="[TASK] [KEY=VALUE]...")] = None,
) -> None:
    """Show a problem: its prompt, and the right answer where the task knows it.

    TASK is a name from `poise tasks`, or `file.py:Class`. Settings of the task are written as everywhere else, with
    `task.` in front. `seed` (0) chooses the problem; `split` is `train` or `test`.

    Examples:

    - `poise tasks show kk task.people=4 seed=0`
    - `poise tasks show kk task.people=3 task.phrasing=plain split=test`
    """
    from poise import tasks
    from poise.config.run_settings import task_to_show

    with explained():
        task, seed, split = task_to_show(args or [])
        try:
            (problem,) = tasks.draw(task, split, seed, 1)  # type: ignore[arg-type]
        except ValueError as error:
            fail(error)
        print(f"{problem.id} (difficulty {problem.difficulty}, {split})")
        for message in tasks.begin(task, problem).start():
            print(
                f"\n{message['content']}"
                if message["role"] == "user"
                else f"\n[{message['role']}] {message['content']}"
            )
        if (gold := tasks.gold_answer(task, problem)) is not None:
            print(f"\n--- the right answer\n{gold}")
