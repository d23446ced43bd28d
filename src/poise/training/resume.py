"""Opens the folder of a run. A resumed run must have the same settings, code and data as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from poise._lib import live
from poise._lib.errors import UserError, complain, short
from poise._lib.files import expand
from poise._lib.user_code import edited
from poise.runs.checkpoint_files import CHANGEABLE
from poise.runs.folder import RunFolder
from poise.runs.lock import owned
from poise.tasks import Task, TaskError, data_fingerprint
from poise.tasks.data import Data
from poise.training.config.documents import merge, nested
from poise.training.config.run_settings import differences
from poise.training.config.schema import Config


class TrainError(UserError, RuntimeError):
    """Training cannot continue. The message says why, and what to do."""


@contextmanager
def run_folder(config: Config, *, resume: bool) -> Iterator[RunFolder]:
    """The folder to train in, locked against other processes.

    A new run that fails before its first measurement deletes its folder, so the name can be reused. The folder stays
    if the run was interrupted in its first evaluation or failed in a step: then it can be resumed.
    """
    with owned(expand(config.run), make=not resume):
        if resume:
            yield open_to_resume(config)
            return
        folder = RunFolder.create(config.run, config.model_dump(mode="json"), keep=config.keep_checkpoints)
        try:
            yield folder
        except BaseException as error:
            measures = config.evaluation.problems > 0 and isinstance(error, Exception)
            signs = ("before.json", "metrics.jsonl") if measures else ("environment.json",)
            if not any((folder.path / name).exists() for name in signs):
                folder.discard()
            raise


def open_to_resume(config: Config) -> RunFolder:
    """Open the run's folder. Raise TrainError if the config changes a setting that is not in ``CHANGEABLE``."""
    folder = RunFolder.open(config.run, keep=config.keep_checkpoints)
    saved = folder.config
    step, tokens = folder.progress()
    requested = config.model_dump(mode="json")
    changes = list(differences(saved, requested))
    for key, before, now in changes:
        if key not in CHANGEABLE:
            raise TrainError(
                f"a resumed run keeps its settings, but {key} differs from {folder.path}/config.json ({short(now)} "
                f"instead of {short(before)}): remove it, or begin another run=DIR"
            )
        if key == "rollout.max_prompt" and now < before:
            raise TrainError(f"{key}={now}: a resumed run may only raise it; the run in {folder.path} has {before}")
    if config.steps < step:
        raise TrainError(
            f"steps={config.steps}: the run in {folder.path} is at step {step} already, and nothing was changed; "
            "raise steps to continue, or begin a shorter run in another run=DIR"
        )
    if config.budget is not None and config.budget != saved.get("budget") and config.budget < tokens:
        raise TrainError(
            f"budget={config.budget}: the run in {folder.path} has sampled {tokens} tokens already, and nothing was "
            "changed; raise budget to continue, or begin a shorter run in another run=DIR"
        )
    for key, before, now in changes:
        if CHANGEABLE[key]:
            complain(f"{key} was {short(before)} and is {short(now)} now: {CHANGEABLE[key]}")
    return folder


def keep_changes(config: Config, folder: RunFolder, step: int) -> None:
    """Record the settings and code that change at this step. Call this after all checks that may reject the resume."""
    saved = folder.config
    changes = list(differences(saved, config.model_dump(mode="json")))
    for key, _, now in changes:
        saved = merge(saved, nested(key.split("."), now))
    if changes:
        folder.write_config(saved)
    versions = folder.code_versions()
    if config.code and config.code not in versions[-1:]:
        earlier = folder.read_json("code.json") if versions else []
        folder.write_json("code.json", [*earlier, {"after_step": step, "code": config.code}])


def check_same_code(config: Config, folder: RunFolder, *, accept: bool = False) -> list[str]:
    """Refuse to resume a run with edited code, unless ``accept`` is set. Return the names of the edited files."""
    versions = folder.code_versions()
    files = edited(versions[-1], config.code) if versions and config.code else []
    if files and not accept:
        if objects := [name for name in files if live.is_name(name)]:
            raise TrainError(
                f"{', '.join(objects)}: not the same object as when the run in {folder.path} began: its code, its "
                "values or its weights differ; pass the same one, begin another run, or accept the change with "
                "trust_changed=True"
            )
        raise TrainError(
            f"{', '.join(files)}: this code was edited since the run in {folder.path} began; put it back, begin "
            "another run=DIR, or accept the change with --trust-changed (in Python: trust_changed=True)"
        )
    return files


def check_same_data(task: Task, folder: RunFolder) -> None:
    """Refuse to resume a run whose dataset has changed since it began."""
    fingerprint = data_fingerprint(task)
    if fingerprint is None:
        return
    saved = folder.read_json("data.json")
    if saved is None:
        folder.write_json("data.json", {"fingerprint": fingerprint})
    elif not isinstance(saved, dict) or saved.get("fingerprint") != fingerprint:
        raise TaskError(
            f"the data in {task.source if isinstance(task, Data) else getattr(task, 'file', task.name)} differ "
            f"from the data with which the run in {folder.path} began: put them back, or begin another run=DIR"
        )
