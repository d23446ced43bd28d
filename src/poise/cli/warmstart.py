"""``poise warmstart``."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poise._lib.errors import short
from poise.cli.common import Settings, check_folder_is_free, explained, fail, home, loading

if TYPE_CHECKING:
    from poise.training.warm_start import Warmstart


def warmstart(
    out: Annotated[Path, typer.Argument(callback=home, help="A new folder for the model.")],
    args: Settings = None,
) -> None:
    """Train a model on worked solutions of a task. This is how the embedded model was made.

    Settings are `task.name` and those of the task (`task.…`), `steps`, `batch`, `lr`, `seed`, `workers`, `compile` and
    `device`; then `width`, `layers`, `heads` and `vocabulary` for a new model, or `model` (a folder, a run or a hub id)
    to start from another. What you leave out is as for the embedded model.

    Examples:

    - `poise warmstart my-model steps=2000 batch=128`
    - `poise warmstart my-model task.noise=0.1 task.people=2-4 layers=6 workers=8`
    - `poise warmstart my-model model=Qwen/Qwen2.5-0.5B-Instruct task.name=kk steps=500 batch=32 lr=1e-5`
    """
    check_folder_is_free(out, "choose another folder; poise warmstart OTHER model=FOLDER goes on from the model in one")
    with loading():
        from poise.config.documents import split_overrides
        from poise.runs.console import Console
        from poise.training.warm_start import embedded
        from poise.training.warm_start import train as run

    with explained():
        changes, _ = split_overrides(args or [])
        device = str(changes.pop("device", "auto"))
        settings = _changed(embedded(), changes)
    with explained(), Console(settings.steps) as console:
        run(settings, out, device=device, say=console.step, note=console.note)
    print(f"saved to {out}; measure it on its task with: poise eval {shlex.quote(str(out))}")


def _changed(settings: Warmstart, changes: dict[str, Any]) -> Warmstart:
    """The settings with what was typed in their place. Another task begins with its own defaults."""
    from poise import tasks
    from poise.config.messages import unknown_key
    from poise.training.warm_start import NEW_MODEL

    task = changes.pop("task", {})
    if not isinstance(task, dict):
        named = f"; for the task of that name: task.name={task}" if isinstance(task, str) else ""
        fail(f"task = {short(task)}: must be a group of settings, key: value{named}")
    own = [field.name for field in fields(settings) if not field.name.startswith("task")]
    if changes.get("model") is not None:  # it has its own shape
        shape: dict[str, Any] = {field.name: field.default for field in fields(settings) if field.name in NEW_MODEL}
        settings = replace(settings, **shape)
    try:
        name = task.get("name", settings.task)
        chosen = (settings.task_settings if name == settings.task else {}) | task
        chosen.pop("name", None)
        settings = replace(settings, task=name, task_settings=chosen)
        known = [*own, "device", "task.name", *(f"task.{key}" for key in tasks.settings_of(name))]
        for key in [*changes, *(f"task.{key}" for key in chosen)]:
            if key not in known:
                fail(unknown_key(key, known))
        settings = replace(settings, **changes)
        settings.build_task()
    except (ValueError, TypeError) as error:
        fail(error)
    return settings
