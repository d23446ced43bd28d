"""The accuracy before training, which runs that begin alike need to measure only once.

It depends on the settings in ``START``, and neither on the seed of a run nor on what it trains. It also depends on
where it is measured: another device, another number of threads and another version of torch round differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from poise._lib.files import was_changed
from poise._lib.user_code import foreign
from poise.comparison.plan import PlannedRun
from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.tasks import data_fingerprint

START = (
    "model", "task", "rollout", "evaluation", "lora", "device", "dtype", "compile", "remote_code",
    "steps",  # which reward functions see
)  # fmt: skip
PLACE = ("torch", "device", "threads")  # in environment.json
FILE = "before.json"


def alike(run: PlannedRun, other: PlannedRun) -> bool:
    """Whether two runs begin with the same model and measure it in the same way."""
    return all(getattr(run.config, name) == getattr(other.config, name) for name in START)


def measured(run: PlannedRun, others: Iterable[PlannedRun]) -> Path | None:
    """The newest file with the accuracy before training among runs that begin like this one; None if none has it."""
    found = []
    for other in others:
        if alike(run, other):
            with suppress(FileNotFoundError):
                found.append(((other.folder / FILE).stat().st_mtime_ns, other.folder / FILE))
    return max(found)[1] if found else None


def is_measuring(run: PlannedRun) -> bool:
    """Whether a run that is under way has yet to measure its accuracy before training."""
    return not any((run.folder / name).exists() for name in (FILE, "metrics.jsonl"))


def read(path: Path, config: Config) -> dict[str, Any] | None:
    """What was measured, for a run in this process; None if it was measured elsewhere."""
    from poise.models.loading import resolve_device
    from poise.runs.subscribers.records import environment
    from poise.training.accuracy import is_summary

    folder = RunFolder(path.parent)
    there, here = folder.read_json("environment.json"), environment(resolve_device(config.device))
    if not isinstance(there, dict) or any(there.get(name) != here[name] for name in PLACE):
        return None
    if (folder.path / "environment.json").stat().st_mtime_ns > path.stat().st_mtime_ns:
        return None  # that run was resumed since, and may have begun elsewhere
    data = folder.read_json("data.json")
    if data is not None and data != {"fingerprint": data_fingerprint(config.task.build())}:
        return None  # the file was edited since
    names, versions = foreign({"task": dict(config.task)}), folder.code_versions()
    if any(code.get(name) != config.code.get(name) for name in names for code in versions):
        return None  # the task's code was edited since
    before = folder.read_json(FILE)
    return before if is_summary(before) and not was_changed(before) else None
