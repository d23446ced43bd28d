"""``poise doctor verl``: whether poise works inside verl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poise.cli.common import Settings, home


def verl(
    args: Settings = None,
    config_path: Annotated[Path | None, typer.Option(callback=home, help="A folder with your configurations.")] = None,
    config_name: Annotated[str, typer.Option(help="The configuration in that folder.")] = "ppo_trainer",
) -> None:
    """Check whether verl has loaded poise, which verl does not show; with settings, whether verl can train them.

    Examples:

    - `poise doctor verl`
    - `poise doctor verl trainer.v1.trainer_mode=poise_sync +trainer.v1.poise_sync.regulator=lopti ...`
    - `poise doctor verl --config-path examples/scale --config-name verl-8gpu`
    """
    from poise.integrations import doctor

    if not doctor.verl(print, args or [], config_path, config_name):
        raise typer.Exit(1)
