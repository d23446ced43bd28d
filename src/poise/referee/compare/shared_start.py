"""The accuracy before training: runs with the same start measure it only once.

This accuracy depends on the settings in ``START``, not on a run's seed or method. It also depends on the machine,
because another device, number of threads or version of torch rounds differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from poise._lib.files import was_changed
from poise._lib.user_code import foreign
from poise.referee.compare.plan import PlannedRun
from poise.runs.folder import RunFolder
from poise.tasks import data_fingerprint
from poise.training.config.schema import Config

# ``steps`` is included because reward functions see it.
START = (
    *("model", "revision", "template", "task", "rollout", "evaluation", "lora"),
    *("device", "dtype", "compile", "deterministic", "remote_code", "steps"),
)
PLACE = ("torch", "device", "threads")  # compared in environment.json
FILE = "before.json"


def same_start(run: PlannedRun, other: PlannedRun) -> bool:
    """Whether two runs start with the same model and evaluate it with the same settings."""
    return all(getattr(run.config, name) == getattr(other.config, name) for name in START)


def newest_file(run: PlannedRun, others: Iterable[PlannedRun]) -> Path | None:
    """The newest ``before.json`` among runs with the same start; None if there is none."""
    files = []
    for other in others:
        if same_start(run, other):
            with suppress(FileNotFoundError):
                files.append(((other.folder / FILE).stat().st_mtime_ns, other.folder / FILE))
    return max(files)[1] if files else None


def is_measuring(run: PlannedRun) -> bool:
    """Whether an active run is still measuring its accuracy before training."""
    return not any((run.folder / name).exists() for name in (FILE, "metrics.jsonl"))


def read(path: Path, config: Config) -> dict[str, Any] | None:
    """The accuracy in this file; None if a run in this process might measure a different accuracy."""
    from poise.models.loading import resolve_device
    from poise.runs.subscribers.recorder import environment
    from poise.training.accuracy import is_summary

    folder = RunFolder(path.parent)
    there, here = folder.read_json("environment.json"), environment(resolve_device(config.device))
    if not isinstance(there, dict) or any(there.get(name) != here[name] for name in PLACE):
        return None
    if (folder.path / "environment.json").stat().st_mtime_ns > path.stat().st_mtime_ns:
        return None  # that run was resumed, perhaps on another machine
    data = folder.read_json("data.json")
    if data is not None and data != {"fingerprint": data_fingerprint(config.task.build())}:
        return None  # the data were edited
    names, versions = foreign({"task": dict(config.task)}), folder.code_versions()
    if any(code.get(name) != config.code.get(name) for name in names for code in versions):
        return None  # the task's code was edited
    before = folder.read_json(FILE)
    return before if is_summary(before) and not was_changed(before) else None
