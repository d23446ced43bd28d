"""Warnings of a run: what keeps it from learning without ending it. Each is said once, and kept in ``warnings.json``.

``poise.training.warnings`` decides when a run has one; docs/warnings.md explains each by its name.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from poise.runs.folder import DamagedError, RunFolder

FILE = "warnings.json"


@dataclass(frozen=True)
class RunWarning:
    """One warning: its name, such as ``no-spread``, the step after which it was said, what is wrong and what to do."""

    name: str
    step: int  # 0: before the first step
    what: str
    remedy: str

    def __str__(self) -> str:
        when = f" after step {self.step}" if self.step else ""
        return f"warning{when}: {self.what}\n  {self.remedy}"


def read(folder: RunFolder) -> list[RunWarning]:
    """The warnings of a run, in the order in which they were said."""
    return parse(folder.read_json(FILE), str(folder.path / FILE))


def add(folder: RunFolder, warning: RunWarning) -> bool:
    """Write a warning down, and return True, unless the run has one of that name."""
    known = read(folder)
    if any(warning.name == old.name for old in known):
        return False
    folder.write_json(FILE, [asdict(each) for each in (*known, warning)])
    return True


def parse(data: Any, place: str) -> list[RunWarning]:
    """The warnings in the contents of the file at ``place``; None: there is no file."""
    entries = [] if data is None else data
    kinds = {"name": str, "step": int, "what": str, "remedy": str}
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or any(type(entry.get(key)) is not kind for key, kind in kinds.items()):
            raise DamagedError(f"{place} holds no warnings as poise writes them: remove the file")
    return [RunWarning(**{key: entry[key] for key in kinds}) for entry in entries]
