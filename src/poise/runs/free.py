"""Whether a new run may begin in a folder: without torch, so that it can be asked first."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from poise._lib.files import TEMPORARY, read_json
from poise._lib.user_code import asks_for_code
from poise.runs.lock import OWNER


def check_free(path: Path) -> None:
    """Raise FileExistsError unless the folder is missing or empty."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"run folder {path} is a file; choose another run=DIR")
    entries = path.iterdir() if path.exists() else []
    if any(not entry.name.startswith(TEMPORARY) and entry.name != OWNER for entry in entries):
        way = f", or go on with the run in it: {resume_command(path)}" if (path / "config.json").exists() else ""
        raise FileExistsError(f"run folder {path} is not empty; choose another run=DIR{way}")


def resume_command(path: Path) -> str:
    """The command that resumes the run in a folder."""
    settings = None
    with suppress(ValueError, OSError):
        settings = read_json(path / "config.json")
    trust = isinstance(settings, dict) and asks_for_code(settings)
    return f"poise train --resume run={shlex.quote(str(path))}" + (" --trust" if trust else "")
