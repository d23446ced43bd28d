"""Checkpoints on disk: written completely or not at all, sealed by a manifest, and verified before reading.

A checkpoint is written to a temporary folder, synced, sealed by ``manifest.json`` with the checksum of every file, and
renamed to its final name. The manifest also contains the step, and the seed and settings of the run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from poise._lib.errors import complain, short
from poise._lib.files import MANIFEST, OLD, TEMPORARY, dumps, loads, remove, remove_leftovers, seal, sync_folder, verify
from poise.runs.folder import CheckpointError, RunFolder, step_of

T = TypeVar("T")
_ROUNDING = "the remaining steps round differently"
# The settings that a resumed run may change, each with the message about its effect. All others are fixed.
CHANGEABLE = {
    **dict.fromkeys(("run", "steps", "budget", "tracking", "checkpoint_every", "keep_checkpoints"), ""),
    **dict.fromkeys(("rollouts_every", "rollout.vllm_memory"), ""),
    **dict.fromkeys(("optim.micro_tokens", "rollout.batch", "device", "compile"), _ROUNDING),
    "task.reward_timeout": "slow rewards now have a different time limit",
    "rollout.max_prompt": "longer problems, dropped before, are now used in training and evaluation",
    "stop_at": "with stop_at, evaluations during training use separate problems",
}


class OtherSettingsError(ValueError):
    """A checkpoint's settings differ from the run's; ``difference`` describes how."""

    def __init__(self, difference: str) -> None:
        self.difference = difference
        what = "it was saved with settings other than those in config.json"
        super().__init__(f"{what} ({difference}): undo the changes there")


class CheckpointFiles:
    """The checkpoints in a run's folder."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    @cached_property
    def _origin(self) -> dict[str, Any]:
        """The seed and the fixed settings as JSON values; they identify this run's checkpoints."""
        config = self.run.config
        fixed = {key: value for key, value in dotted(config) if key not in CHANGEABLE}
        return {"seed": config.get("seed"), "settings": loads(dumps(fixed))}

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield an empty folder to fill. On success, it becomes the checkpoint of ``step``, and old ones are removed.

        A kill at any moment leaves either the old checkpoints or the new ones.
        """
        run, folder = self.run, self.run.checkpoint(step)
        temporary, old = folder.with_name(TEMPORARY + folder.name), folder.with_name(OLD + folder.name)
        try:
            remove(temporary)
            temporary.mkdir(parents=True)
            yield temporary
            seal(temporary, {"step": step, **self._origin})
            run.sync_metrics()  # the metrics must survive a power cut if the checkpoint does
            if folder.exists():
                os.replace(folder, old)
            os.replace(temporary, folder)
            sync_folder(folder.parent)
        except BaseException as error:
            remove_leftovers(folder.parent)
            # safetensors and tokenizers are written in Rust and raise their own errors if the disk is full.
            if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
                raise CheckpointError(self._write_failure(step, error)) from error
            raise
        remove(old)
        earlier = [other for other in run.checkpoints() if other < step]
        for other in earlier[: len(earlier) + 1 - run.keep]:
            remove(run.checkpoint(other))

    def load(self, read: Callable[[Path], T], *, say: Callable[[str], None] = complain) -> tuple[int, T] | None:
        """Return the step of the newest intact checkpoint and the result of ``read``; None if there is no checkpoint.

        If a checkpoint is unreadable, ``say`` gets a message and the previous checkpoint is tried. If an intact
        checkpoint does not fit into memory, raise CheckpointError instead.
        """
        failures: list[str] = []
        others: list[OtherSettingsError] = []
        for step in reversed(self.run.checkpoints()):
            folder = self.run.checkpoint(step)
            try:
                self.verify(step)
                contents = read(folder)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error):
                    raise CheckpointError(
                        f"out of memory while reading {folder}, which is intact: is another process using the device? "
                        f"Then continue with: {self.run.resume_command}"
                    ) from error
                failures.append(f"checkpoint {folder} cannot be read: {str(error) or type(error).__name__}")
                others += [error] if isinstance(error, OtherSettingsError) else []
                cause = error
                continue
            if failures:
                say("\n".join([*failures, f"continuing from the checkpoint of step {step}"]))
            return step, contents
        if failures and len(others) == len(failures):
            raise CheckpointError(
                f"{self.run.path}/config.json was edited since the run began ({others[0].difference}): undo the "
                f"changes there. Only these settings may change, written after --resume: {', '.join(CHANGEABLE)}"
            ) from cause
        if failures:
            listed = "\n  ".join(failures)
            remedy = "put one of them back, or begin again in another run=DIR"
            raise CheckpointError(f"no checkpoint of {self.run.path} can be read:\n  {listed}\n{remedy}") from cause
        return None

    def verify(self, step: int, within: str = "") -> None:
        """Raise ValueError or OSError unless the checkpoint of a step is intact and belongs to this run.

        ``within`` limits the check of checksums to a subfolder of the checkpoint.
        """
        manifest, origin = verify(self.run.checkpoint(step), within), self._origin
        if manifest.get("step", step) != step:
            raise ValueError(f"it belongs to step {manifest['step']}, but its folder has another name")
        if manifest.get("seed", origin["seed"]) != origin["seed"]:
            raise ValueError(f"it belongs to a run with seed {manifest['seed']}; this one has seed {origin['seed']}")
        saved, now = manifest.get("settings", origin["settings"]), origin["settings"]
        for key in {**saved, **now} if isinstance(saved, dict) else ():
            if saved.get(key) != now.get(key):
                raise OtherSettingsError(f"{key} = {short(now.get(key))} instead of {short(saved.get(key))}")

    def _write_failure(self, step: int, error: BaseException) -> str:
        """The error message: what failed, which earlier checkpoint is intact, and what to do."""
        intact = "there is no earlier one"
        for earlier in reversed([other for other in self.run.checkpoints() if other != step]):
            try:
                self.verify(earlier)
            except (OSError, ValueError):
                continue
            intact = f"the checkpoint of step {earlier} is intact"
            break
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
        remedy = f"{'free some space' if full else 'fix the cause'}, then {self.run.resume_command}"
        return f"checkpoint of step {step} could not be written: {error}; {intact}. {remedy}"


def verify_model(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` is the model of a checkpoint and its files changed since they were saved.

    Other models have no manifest, so they are not checked.
    """
    checkpoint = folder.resolve().parent
    run = RunFolder(checkpoint.parent.parent)
    own = checkpoint.parent.name == "checkpoints" and (run.path / "config.json").exists()
    step = step_of(checkpoint)
    try:
        if own and step:
            CheckpointFiles(run).verify(step, folder.name)
        elif (checkpoint / MANIFEST).exists():
            verify(checkpoint, folder.name)
    except (ValueError, OSError) as error:
        others = [run.checkpoint(other) for other in run.checkpoints() if own and other != step]
        hint = f"; there is also {others[-1]}" if others else ""
        raise CheckpointError(f"checkpoint {checkpoint} cannot be used: {error}{hint}") from error


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with dotted keys: the key ``lr`` in the group ``optim`` becomes ``optim.lr``."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
