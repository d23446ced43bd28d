"""Which folders are runs."""

from __future__ import annotations

from pathlib import Path

from poise._lib.files import read_json


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run's, even one that was stopped before its first checkpoint."""
    try:
        settings = read_json(Path(folder) / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and "rollout" in settings
