"""Finds run folders and their progress. Reads only small files, and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poise._lib.files import loads, read_json, was_changed
from poise.runs.lock import is_owned

PLAN = "plan.json"  # in the folder of a comparison
DEEPEST = 6  # levels of folders to search; a comparison's runs are three levels below it
_WRITTEN = ("metrics.jsonl", "before.json")  # only runs write these
_TAIL = 1 << 20  # bytes; a line of metrics is shorter


def is_comparison(folder: Path) -> bool:
    """Whether ``poise compare`` created this folder."""
    return (folder / PLAN).is_file()


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run folder. It may lack a checkpoint, and config.json may be damaged."""
    settings = Path(folder) / "config.json"
    if settings.is_file() and any(settings.with_name(name).is_file() for name in _WRITTEN):
        return True
    return "rollout" in _read(settings.parent, "config.json")


@dataclass(frozen=True)
class Listed:
    """One run in a list. ``before`` and ``after`` are held-out accuracies; None if not measured.

    ``edited`` tells whether one of them was changed after the run wrote it.
    """

    folder: Path
    state: str  # training, finished, diverged, stopped or damaged
    settings: dict[str, str]  # model, task, regulator and algorithm
    steps: int
    planned: int | None
    before: float | None
    after: float | None
    edited: bool
    changed: float  # the time of the run's last write, in seconds since 1970


def find_runs(folder: Path) -> list[Listed]:
    """Find the runs in a folder and its subfolders, newest first by the time of the last write."""
    return sorted((read(path) for path in _runs(folder, DEEPEST)), key=lambda run: -run.changed)


def read(folder: Path) -> Listed:
    """Return the list entry of a run. A damaged config.json or metrics.jsonl only sets the state to "damaged"."""
    settings, before, summary = (_read(folder, name) for name in ("config.json", "before.json", "summary.json"))
    task, diverged = settings.get("task"), _read(folder, "diverged.json")
    named = {name: settings.get(name) for name in ("model", "task", "regulator", "algorithm")}
    named["task"] = task.get("name") if isinstance(task, dict) else None
    steps, planned = _last_step(folder), settings.get("steps")
    ended = summary.get("steps") == steps and "after" in summary
    state = "stopped"
    if not settings or steps is None:
        state = "damaged"
    elif is_owned(folder):
        state = "training"
    elif ended:
        state = "finished"
    elif type(diverged.get("step")) is int and diverged["step"] > steps:
        state = "diverged"
    files = [folder / name for name in (*_WRITTEN, "config.json", "summary.json")]
    return Listed(
        folder=folder,
        state=state,
        settings={name: value if isinstance(value, str) else "?" for name, value in named.items()},
        steps=steps or 0,
        planned=planned if type(planned) is int else None,
        before=_accuracy(before),
        after=_accuracy(summary.get("after")) if ended else None,
        edited=was_changed(before) or was_changed(summary),
        changed=max((path.stat().st_mtime for path in files if path.is_file()), default=0.0),
    )


def _runs(folder: Path, levels: int) -> Iterator[Path]:
    if is_run(folder):
        if not (folder / "diagnose.json").exists():  # written by poise diagnose, which saves its settings too
            yield folder
    elif levels:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and (not path.is_symlink() or is_run(path)):
                try:
                    yield from _runs(path, levels - 1)
                except PermissionError:
                    continue


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object in a file of the folder; empty if the file is missing or unreadable."""
    try:
        data = read_json(folder / name)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _last_step(folder: Path) -> int | None:
    """The number of the last step with metrics; 0 if there is none yet, None if the file is damaged."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")[:-1]  # text after the last line break is a torn line
        return int(loads(lines[-1])["step"]) if lines else 0
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _accuracy(evaluation: Any) -> float | None:
    value = evaluation.get("accuracy") if isinstance(evaluation, dict) else None
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else None
