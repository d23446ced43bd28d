"""Which folder a run goes to: its own to go on in, if it is the same run, or the next free one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from poise._lib.errors import short
from poise._lib.files import expand
from poise.config.documents import Document, merge
from poise.config.run_settings import differences
from poise.config.schema import Config
from poise.models.places import ModelError
from poise.runs.console import Console, complain
from poise.runs.folder import CHANGEABLE, RunFolder


class TrainError(RuntimeError):
    """Training cannot continue. The message says why, and what to do."""


@contextmanager
def model_errors() -> Iterator[None]:
    """Turn an error of the model, such as a prompt that is too long for it, into a TrainError."""
    try:
        yield
    except ModelError as error:
        raise TrainError(str(error)) from error


@contextmanager
def run_folder(config: Config, *, resume: bool) -> Iterator[RunFolder]:
    """The folder to train in. A new run that fails before it has measured anything leaves none, for the next attempt.

    One that is interrupted in its first evaluation, or fails in a step, stays: it can be resumed.
    """
    if resume:
        yield open_to_resume(config)
        return
    folder = RunFolder.create(config.run, config.model_dump(mode="json"), keep=config.keep_checkpoints)
    try:
        yield folder
    except BaseException as error:
        measures = config.evaluation.problems > 0 and isinstance(error, Exception)
        begun = ("before.json", "metrics.jsonl") if measures else ("environment.json",)
        if not any((folder.path / name).exists() for name in begun):
            folder.discard()
        raise


def open_to_resume(config: Config) -> RunFolder:
    """Open the run's folder, and refuse a config that changes more than it may (``CHANGEABLE``)."""
    folder = RunFolder.open(config.run, keep=config.keep_checkpoints)
    saved = folder.config
    done, tokens = folder.progress()
    requested = config.model_dump(mode="json")
    changes = list(differences(saved, requested))
    for key, before, now in changes:
        if key not in CHANGEABLE:
            raise TrainError(
                f"a resumed run keeps its settings, but {key} differs from {folder.path}/config.json ({short(now)} "
                f"instead of {short(before)}): leave it out, or begin another run=DIR"
            )
        if key == "rollout.max_prompt" and now < before:
            raise TrainError(f"{key}={now}: a resumed run may only raise it; the run in {folder.path} has {before}")
    if config.steps < done:
        raise TrainError(
            f"steps={config.steps}: the run in {folder.path} is at step {done} already, and nothing was changed; "
            "raise steps to go on, or begin a shorter run in another run=DIR"
        )
    if config.budget is not None and config.budget != saved.get("budget") and config.budget < tokens:
        raise TrainError(
            f"budget={config.budget}: the run in {folder.path} has sampled {tokens} tokens already, and nothing was "
            "changed; raise budget to go on, or begin a shorter run in another run=DIR"
        )
    for key, before, now in changes:
        if CHANGEABLE[key]:
            complain(f"{key} was {short(before)} and is {short(now)} now: {CHANGEABLE[key]}")
    return folder


def keep_changes(config: Config, folder: RunFolder, step: int) -> None:
    """Write down the settings and the code that differ from this step on, once nothing can refuse the start."""
    saved = folder.config
    changes = list(differences(saved, config.model_dump(mode="json")))
    for key, _, now in changes:
        saved = merge(saved, _nested(key.split("."), now))
    if changes:
        folder.write_config(saved)
    versions = folder.code_versions()
    if config.code and config.code not in versions[-1:]:
        earlier = folder.read_json("code.json") if versions else []
        folder.write_json("code.json", [*earlier, {"after_step": step, "code": config.code}])


def _nested(keys: list[str], value: Any) -> Document:
    """A document with one setting."""
    return {keys[0]: _nested(keys[1:], value) if keys[1:] else value}


def in_free_folder(config: Config, *, quiet: bool = False) -> Config:
    """The config, with the next free folder (``runs/mine-2``) if there is a run in its own: a cell is run twice."""
    taken = expand(config.run)
    if not (taken / "config.json").exists():
        return config
    if taken.name in ("", ".."):  # such as run=., which is a name only in full
        taken = taken.resolve()
    numbered = (taken.with_name(f"{taken.name}-{number}") for number in count(2))
    free = next(str(folder) for folder in numbered if not folder.exists() and not folder.is_symlink())
    Console(0, quiet=quiet).note(f"{taken} has a run already, so this one goes to {free} (resume=True goes on with it)")
    return config.model_copy(update={"run": free})
