"""``poise runs``."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poise.cli.common import fail, home

if TYPE_CHECKING:
    from poise.runs.listing import Listed


def runs(
    folder: Annotated[Path, typer.Argument(callback=home, help="The folder that holds the runs.")] = Path("runs"),
) -> None:
    """List the runs in a folder and below it, newest first: state, settings, steps, held-out accuracy before → after.

    A run is training, finished, stopped (go on with `poise train --resume DIR`), diverged, or damaged.

    Examples:

    - `poise runs`
    - `poise runs runs/cmp`
    """
    from poise.runs.console import Console, visible
    from poise.runs.listing import find_runs

    if not folder.is_dir():
        fail(f"{folder}: there is no such folder; name the one that holds your runs: poise runs DIR")
    try:
        found = find_runs(folder)
    except OSError as error:
        fail(error)
    if not found:
        print(visible(f"no runs in {folder}; begin one with: poise train {shlex.quote(f'run={folder}/first')}"))
        return
    with Console(0) as console:
        console.table([_row(run) for run in found])


def _row(run: Listed) -> dict[str, Any]:
    return {
        "run": str(run.folder),
        "state": run.state,
        "steps": f"{run.steps}/{run.planned}" if run.planned else str(run.steps),
        "held-out": f"{_share(run.before)} → {_share(run.after)}",
        "model": run.model,
        "task": run.task,
        "regulator": run.regulator,
        "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)),
    }


def _share(accuracy: float | None) -> str:
    return "–" if accuracy is None else f"{accuracy:.3f}"
