"""Which folders are runs."""

from __future__ import annotations

from pathlib import Path

from poise._lib.files import read_json

_WRITTEN = ("metrics.jsonl", "before.json")  # by runs alone


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run's, even one without a checkpoint or with a damaged config.json."""
    settings = Path(folder) / "config.json"
    if settings.is_file() and any(settings.with_name(name).is_file() for name in _WRITTEN):
        return True
    try:
        found = read_json(settings)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "rollout" in found
