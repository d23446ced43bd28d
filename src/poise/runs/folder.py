"""The run folder: everything that a run writes, and what it resumes from.

    config.json, data.json         the run's settings; the fingerprint of its dataset, if it has one
    code.json                      the hashes of the user's own code, for each version that it was trained with
    metrics.jsonl                  one line per step, append-only
    environment.json, models.json  versions and hardware of every start; checkpoints of run folders as frozen models
    rollouts/step-000010.jsonl.gz  the responses of a step, with their scores
    tokens/step-000010.safetensors their tokens, each with its log-probability, weight and so on
    checkpoints/step-000010/       what a resumed run starts from, sealed by manifest.json
    before.json, summary.json      held-out accuracy before training; the final results
    problems.json, diverged.json   those results by problem; the step at which the gradient was not finite
    warnings.json                  what keeps the run from learning (``poise.runs.subscribers.warnings``)
    owner.json                     the process that trains here, while one does (``poise.runs.lock``)

A kill at any moment leaves only complete files, except for the last line of metrics.jsonl: readers ignore it if torn.
One process writes to a run at a time; any number may read.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from poise._lib.errors import check_range, short
from poise._lib.files import (
    MANIFEST,
    OLD,
    TEMPORARY,
    check_own,
    dumps,
    expand,
    loads,
    read_json,
    remove,
    remove_leftovers,
    replacing,
    seal,
    sync_folder,
    verify,
)
from poise._lib.user_code import Code
from poise.runs.console import complain
from poise.runs.listing import is_comparison
from poise.runs.lock import check_free, resume_command
from poise.runs.metrics_file import COPY, DamagedError, MetricsFile

__all__ = ["CheckpointError", "DamagedError", "RunFolder", "step_of", "verify_model"]

T = TypeVar("T")
_STEP = r"step-(\d{6,})"
_OWN = (
    *("config.json", "data.json", "metrics.jsonl", "environment.json", "before.json", "summary.json", "problems.json"),
    *("models.json", "code.json", "diverged.json", "warnings.json", "curve.png", "rollouts", "tokens", "checkpoints"),
)
_ROUNDING = "the rest of the run rounds differently"
# The settings that a resumed run may change, and what the user is told then. All others are fixed.
CHANGEABLE = {
    "run": "", "steps": "", "budget": "", "tracking": "", "checkpoint_every": "", "keep_checkpoints": "",
    "rollouts_every": "", "rollout.vllm_memory": "", "optim.micro_tokens": _ROUNDING, "rollout.batch": _ROUNDING,
    "device": _ROUNDING, "compile": _ROUNDING, "task.reward_timeout": "slow rewards are cut off at another time",
    "rollout.max_prompt": "longer problems, left out before, are trained on and measured from now on",
    "stop_at": "with stop_at, evaluations during training have problems of their own",
}  # fmt: skip
LARGEST_ROLLOUTS = 2**30  # uncompressed bytes of a step's responses: a hostile 10 MB file can unpack to 10 GB
ASIDE = "set-aside-"  # prefix of an unreadable checkpoint that the run continued without


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read. The message says what to do."""


class OtherSettingsError(ValueError):
    """A checkpoint was saved with other settings than the run has; ``difference`` says which."""

    def __init__(self, difference: str) -> None:
        self.difference = difference
        what = "it was saved with settings other than those in config.json"
        super().__init__(f"{what} ({difference}): undo the changes there")


class RunFolder:
    """One run's folder. Use ``create`` or ``open``; ``keep`` is the number of checkpoints to keep."""

    def __init__(self, path: str | Path, *, keep: int = 2) -> None:
        check_range("RunFolder", "keep", keep, low=1)
        self.path = expand(path)
        self.keep = keep
        self._config = self.path / "config.json"
        self._metrics = MetricsFile(self.path / "metrics.jsonl")
        self._rollouts = self.path / "rollouts"
        self._tokens = self.path / "tokens"
        self._checkpoints = self.path / "checkpoints"

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], *, keep: int = 2) -> RunFolder:
        """Create a run in a folder that is missing or empty."""
        run = cls(path, keep=keep)
        check_free(run.path)
        run.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(run.path)
        run.write_config(config)
        return run

    @classmethod
    def open(cls, path: str | Path, *, keep: int = 2, resume: bool = True) -> RunFolder:
        """Open the run in a folder to resume it. ``resume=False`` only reads, and is safe while a process trains there.

        Resuming removes what a killed process left half-written.
        """
        run = cls(path, keep=keep)
        if not run._config.is_file():
            why = "is a file" if run.path.is_file() else "does not exist"
            if run.path.is_dir():
                why = "has no config.json (poise runs DIR lists the runs below a folder)"
            if is_comparison(run.path):
                why = "is the folder of a comparison, which the command that began it goes on with"
            way = "; begin one without --resume" if resume else ""
            raise FileNotFoundError(f"there is no run in {run.path}: it {why}{way}")
        if resume and (run.path / "diagnose.json").exists():
            raise FileExistsError(f"{run.path} is a folder of poise diagnose, with nothing to resume")
        if resume:
            check_own(run.path / name for name in _OWN)
            for folder in (run.path, run._rollouts, run._tokens, run._checkpoints):
                remove_leftovers(folder)
            run._metrics.rewrite(lambda record: record)  # drops a torn last line
        return run

    def discard(self) -> None:
        """Remove the files of a run that never began, so that its folder can be used again."""
        for name in (*_OWN, "tensorboard", "wandb"):
            remove(self.path / name)
        with suppress(OSError):  # it is not empty, or a link, or where a disk is mounted
            self.path.rmdir()

    @property
    def config(self) -> dict[str, Any]:
        """The run's settings."""
        config = self.read_json("config.json")
        if not isinstance(config, dict):
            raise DamagedError(f"{self._config} holds no settings, which are a JSON object: {COPY}")
        return config

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the run's settings. Infinities stay as Python reads them, because a resumed run needs them."""
        with replacing(self._config) as file:
            file.write(json.dumps(dict(config), indent=2).encode("ascii") + b"\n")

    @cached_property
    def _origin(self) -> dict[str, Any]:
        """Identifies this run's checkpoints: its seed, and the settings that cannot change, as a manifest has them."""
        fixed = {key: value for key, value in _dotted(self.config) if key not in CHANGEABLE}
        return {"seed": self.config.get("seed"), "settings": loads(dumps(fixed))}

    def write_json(self, name: str, data: Any) -> None:
        """Write ``data`` to a file of the folder, atomically."""
        with replacing(self.path / name) as file:
            file.write(dumps(data, indent=2))

    def read_json(self, name: str) -> Any:
        """The data that ``write_json`` wrote; None if the file does not exist."""
        path = self.path / name
        try:
            return read_json(path) if path.exists() else None
        except ValueError:
            raise DamagedError(f"{path} cannot be read as JSON: {COPY}") from None

    def code_versions(self) -> list[Code]:
        """What the user's own code was made of when the run began, and after each edit that was accepted since."""
        if not (self.path / "code.json").exists():  # of a run without, or of an older version
            return []
        match self.read_json("code.json"):
            case [*versions] if versions and all(_is_version(each) for each in versions):
                return [version["code"] for version in versions]
        raise DamagedError(f"{self.path}/code.json does not hold hashes of code as poise writes them: {COPY}")

    # Metrics

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one step. NaN and infinities become null."""
        self._metrics.append(step, metrics)

    def log_more(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the line of a step that is logged already."""
        self._metrics.rewrite(lambda record: {**record, **metrics} if record["step"] == step else record)

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every step, one dict each, including "step"."""
        return self._metrics.records()

    # Rollouts

    def save_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write the responses of a step, one JSON object per line, compressed."""
        path = self._rollouts / f"{_name(step)}.jsonl.gz"
        with replacing(path) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
            for record in records:
                compressed.write(dumps(dict(record)))
        return path

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The responses that ``save_rollouts`` wrote for a step."""
        with gzip.open(self._rollouts / f"{_name(step)}.jsonl.gz") as file:
            text = file.read(LARGEST_ROLLOUTS + 1)
        if len(text) > LARGEST_ROLLOUTS:
            raise DamagedError(f"the responses of step {step} unpack to more than {LARGEST_ROLLOUTS:,} bytes")
        return [loads(line) for line in text.splitlines()]

    def recorded(self) -> list[int]:
        """The steps whose responses are recorded."""
        return _steps(self._rollouts, ".jsonl.gz")

    def save_tokens(self, step: int, arrays: Mapping[str, Tensor], texts: Mapping[int, str]) -> Path:
        """Write the tokens of those responses (``records.token_arrays``), and the text of each distinct token."""
        path = self.tokens_path(step)
        with replacing(path) as file:
            file.write(save(dict(arrays), {"texts": dumps({str(k): v for k, v in texts.items()}).decode("ascii")}))
        return path

    def tokens_path(self, step: int) -> Path:
        """The path of a step's tokens, whether or not it exists."""
        return self._tokens / f"{_name(step)}.safetensors"

    def tokens(self, step: int) -> tuple[dict[str, Tensor], dict[int, str]] | None:
        """The arrays and texts that ``save_tokens`` wrote for a step; None if there are none."""
        path = self.tokens_path(step)
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            texts = json.loads(file.metadata()["texts"])
            return {name: file.get_tensor(name) for name in file.keys()}, {int(k): v for k, v in texts.items()}  # noqa: SIM118

    # Checkpoints

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let ``write`` fill a folder, move it into place once it is on disk, then remove the oldest checkpoints."""
        folder = self._checkpoints / _name(step)
        temporary, old = folder.with_name(TEMPORARY + folder.name), folder.with_name(OLD + folder.name)
        try:
            remove(temporary)
            temporary.mkdir(parents=True)
            write(temporary)
            seal(temporary, {"step": step, **self._origin})
            self._metrics.sync()  # the metrics up to this step must survive a power cut as the checkpoint does
            if folder.exists():
                os.replace(folder, old)
            os.replace(temporary, folder)
            sync_folder(self._checkpoints)
        except BaseException as error:
            remove_leftovers(self._checkpoints)
            # safetensors and tokenizers, written in Rust, raise their own error types for a full disk.
            if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
                raise CheckpointError(self._write_failure(step, error)) from error
            raise
        remove(old)
        earlier = [s for s in self.checkpoints() if s < step]
        for s in earlier[: len(earlier) + 1 - self.keep]:
            remove(self._checkpoints / _name(s))
        return folder

    def load_checkpoint(
        self, read: Callable[[Path], T], *, say: Callable[[str], None] = complain
    ) -> tuple[int, T] | None:
        """Read the newest intact checkpoint: its step and the result of ``read``; None if there is no checkpoint yet.

        An unreadable checkpoint is reported to ``say``, and the one before it is tried. One that only the memory has no
        room for is not unreadable, and raises CheckpointError.
        """
        failures: list[str] = []
        others: list[OtherSettingsError] = []
        for step in reversed(self.checkpoints()):
            folder = self._checkpoints / _name(step)
            try:
                self.verify(step)
                loaded = read(folder)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error):
                    raise CheckpointError(
                        f"out of memory while reading {folder}, which is intact: is another process using the device? "
                        f"Then go on with: {self.resume_command}"
                    ) from error
                failures.append(f"checkpoint {folder} cannot be read: {str(error) or type(error).__name__}")
                others += [error] if isinstance(error, OtherSettingsError) else []
                cause = error
                continue
            if failures:
                say("\n".join([*failures, f"going on from the checkpoint of step {step}"]))
            return step, loaded
        if failures and len(others) == len(failures):
            raise CheckpointError(
                f"{self._config} was edited since the run began ({others[0].difference}): undo the changes there. What "
                f"a resumed run may change, write behind --resume: {', '.join(CHANGEABLE)}"
            ) from cause
        if failures:
            listed = "\n  ".join(failures)
            way = "put one of them back, or begin again in another run=DIR"
            raise CheckpointError(f"no checkpoint of {self.path} can be read:\n  {listed}\n{way}") from cause
        return None

    def verify(self, step: int, within: str = "") -> None:
        """Raise ValueError or OSError unless the checkpoint of a step is intact and belongs to this run."""
        about = verify(self._checkpoints / _name(step), within)
        if about.get("step", step) != step:
            raise ValueError(f"it belongs to step {about['step']}, but has another name")
        if about.get("seed", self._origin["seed"]) != self._origin["seed"]:
            raise ValueError(f"it belongs to a run with seed {about['seed']}; this one has seed {self._origin['seed']}")
        saved, now = about.get("settings", self._origin["settings"]), self._origin["settings"]
        for key in {**saved, **now} if isinstance(saved, dict) else ():
            if saved.get(key) != now.get(key):
                raise OtherSettingsError(f"{key} = {short(now.get(key))} instead of {short(saved.get(key))}")

    def newest(self) -> Path:
        """The folder of the newest checkpoint."""
        steps = self.checkpoints()
        if not steps:
            if (self.path / "summary.json").exists():
                raise CheckpointError(f"{self.path} is a finished run whose checkpoints were removed")
            raise CheckpointError(f"{self.path} has no checkpoint yet; go on with: {self.resume_command}")
        return self._checkpoints / _name(steps[-1])

    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        return _steps(self._checkpoints, "")

    def progress(self) -> tuple[int, int]:
        """The step of the newest checkpoint, 0 if there is none, and the tokens sampled until then."""
        step = max(self.checkpoints(), default=0)
        return step, max((line.get("tokens/total") or 0 for line in self.metrics() if line["step"] <= step), default=0)

    def rewind(self, step: int, *, say: Callable[[str], None] = complain) -> None:
        """Remove everything after ``step``, so that a run resumed there ends as if it was never interrupted.

        A later checkpoint, which could not be read, is renamed to ``set-aside-…`` instead. If the metrics do not have
        the steps 1 to ``step`` once each, ``say`` is told.
        """
        self._metrics.rewrite(lambda record: record if record["step"] <= step else None)
        logged = [record["step"] for record in self.metrics()]
        if len(logged) != step or logged != list(range(1, step + 1)):
            present = set(logged)
            first = next((s for s in range(1, step + 1) if s not in present), None)
            gap = step - sum(1 <= s <= step for s in present)
            what = f"has no line for {gap} steps, the first is {first}" if gap else "has steps twice, or unordered"
            say(f"{self._metrics.path} {what}: training goes on, curves stay like that; to mend it, stop and {COPY}")
        for later in [s for s in _steps(self._rollouts, ".jsonl.gz") if s > step]:
            remove(self._rollouts / f"{_name(later)}.jsonl.gz")
        for later in [s for s in _steps(self._tokens, ".safetensors") if s > step]:
            remove(self.tokens_path(later))
        for later in [s for s in self.checkpoints() if s > step]:
            aside = self._checkpoints / (ASIDE + _name(later))
            remove(aside)
            os.replace(self._checkpoints / _name(later), aside)

    def _write_failure(self, step: int, error: BaseException) -> str:
        intact = "there is no earlier one"
        for earlier in reversed([s for s in self.checkpoints() if s != step]):
            try:
                self.verify(earlier)
            except (OSError, ValueError):
                continue
            intact = f"the checkpoint of step {earlier} is intact"
            break
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
        remedy = f"{'free some space' if full else 'put that right'}, then {self.resume_command}"
        return f"checkpoint of step {step} could not be written: {error}; {intact}. {remedy}"

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        return resume_command(self.path)


def verify_model(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` is the model of a checkpoint and differs from what was saved.

    Any other model has no manifest beside it, and is not checked.
    """
    checkpoint = folder.resolve().parent
    run = RunFolder(checkpoint.parent.parent)
    own = checkpoint.parent.name == "checkpoints" and (run.path / "config.json").exists()
    step = re.fullmatch(_STEP, checkpoint.name)
    try:
        if own and step:
            run.verify(int(step[1]), folder.name)
        elif (checkpoint / MANIFEST).exists():
            verify(checkpoint, folder.name)
    except (ValueError, OSError) as error:
        others = [run._checkpoints / _name(s) for s in run.checkpoints() if own and _name(s) != checkpoint.name]
        way = f"; there is also {others[-1]}" if others else ""
        raise CheckpointError(f"checkpoint {checkpoint} cannot be used: {error}{way}") from error


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by the name of its folder; 0: it has another name."""
    found = re.fullmatch(_STEP, checkpoint.name)
    return int(found[1]) if found else 0


def _is_version(data: Any) -> bool:
    """Whether ``data``, read from ``code.json``, has the hashes of files by the path of the code."""
    code = data.get("code") if isinstance(data, dict) else None
    return isinstance(code, dict) and all(isinstance(files, dict) for files in code.values())


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _steps(folder: Path, suffix: str) -> list[int]:
    names = [path.name for path in folder.glob("step-*")]
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(_STEP + re.escape(suffix), name)))
