"""``poise warmstart``."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Optional

import typer

from poise._lib.errors import unknown
from poise.cli.common import explained, fail, home


def warmstart(
    out: Annotated[Path, typer.Argument(callback=home, help="Where the model goes.")],
    args: Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...")] = None,  # noqa: UP045
    device: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Train a tiny model on noisy worked solutions: how the embedded model was made.

    Examples:

    - `poise warmstart my-model steps=2000 batch=128`
    - `poise warmstart my-model noise=0.1 people=2-4 layers=6 workers=8`
    """
    from poise.config.documents import split_overrides
    from poise.runs.console import Console
    from poise.training.warm_start import embedded
    from poise.training.warm_start import train as run

    settings = embedded()
    own = {f.name for f in fields(settings)} - {"task_settings"}
    with explained():
        given, _ = split_overrides(args or [])
    own_changes = {key: value for key, value in given.items() if key in own}
    for key, parsed in given.items():
        if key in own:
            continue
        if key in settings.task_settings or key in ("depth", "phrasing", "instruction"):
            settings = replace(settings, task_settings={**settings.task_settings, key: parsed})
        else:
            fail(unknown("setting of warmstart", key, [*own, *settings.task_settings]))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fail(f"{out} {'is not empty' if out.is_dir() else 'is a file'}: choose another folder")
    try:
        settings = replace(settings, **own_changes)
        settings.build_task()
    except (ValueError, TypeError) as error:
        fail(error)
    with explained(), Console(settings.steps) as console:
        run(settings, out, device=device, say=console.step)
    print(f"saved to {out}; measure it with: poise eval {out} --people {settings.task_settings.get('people', '3-7')}")
