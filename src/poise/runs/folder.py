"""The run folder: the files that a run writes and from which it resumes.

    config.json, data.json         the run's settings; the fingerprint of its dataset, if it has one
    code.json                      the hashes of the user's own code, for each version that the run used
    metrics.jsonl                  one line per step, append-only
    environment.json, models.json  versions and hardware at every start; the checkpoints of runs that serve as models
    rollouts/step-000010.jsonl.gz  the responses of a step, with their scores
    tokens/step-000010.safetensors the tokens of these responses, with log-probabilities, weights and more
    checkpoints/step-000010/       the state from which a resumed run continues (``poise.runs.checkpoint_files``)
    before.json, summary.json      held-out accuracy before training; the final results
    problems.json, diverged.json   the final results by problem; the step at which the gradient was not finite
    warnings.json                  reasons why the run does not learn (``poise.runs.subscribers.warnings``)
    owner.json                     the process that is training here, if any (``poise.runs.lock``)

A kill at any moment leaves only complete files, except that the last line of metrics.jsonl may be torn; readers ignore
a torn last line. One process writes to a run at a time; any number of processes may read.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from poise._lib.errors import UserError, check_range, complain
from poise._lib.files import check_own, dumps, expand, loads, read_json, remove, remove_leftovers, replacing
from poise._lib.user_code import Code
from poise.runs.axes import drawable
from poise.runs.listing import is_comparison, is_run
from poise.runs.lock import check_free, resume_command

__all__ = ["CheckpointError", "DamagedError", "RunFolder", "step_of"]

Record = dict[str, Any]  # the metrics of one step, and its number as "step"
_STEP = r"step-(\d{6,})"
_OWN = (
    *("config.json", "data.json", "metrics.jsonl", "environment.json", "before.json", "summary.json", "problems.json"),
    *("models.json", "code.json", "diverged.json", "warnings.json", "curve.png", "rollouts", "tokens", "checkpoints"),
)
LAST_STEP = 10**12 - 1
LARGEST_ROLLOUTS = 2**30  # uncompressed bytes of a step's responses; a hostile 10 MB file can unpack to 10 GB
ASIDE = "set-aside-"  # prefix of an unreadable checkpoint that a resumed run skipped
COPY = "put the file back from a copy"


class DamagedError(UserError, ValueError):
    """A file of a run was changed or damaged. The message names the file and says what to do."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be written, or none could be read. The message says what to do."""


class RunFolder:
    """One run's folder. Use ``create`` or ``open``; ``keep`` is the number of checkpoints to keep."""

    def __init__(self, path: str | Path, *, keep: int = 2) -> None:
        check_range("RunFolder", "keep", keep, low=1)
        self.path = expand(path)
        self.keep = keep
        self._config = self.path / "config.json"
        self._metrics = self.path / "metrics.jsonl"
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

        Resuming removes half-written files of a killed process.
        """
        run = cls(path, keep=keep)
        if not run._config.is_file():
            why = "is a file" if run.path.is_file() else "does not exist"
            if run.path.is_dir():
                why = "has no config.json (poise runs DIR lists the runs below a folder)"
            if is_comparison(run.path):
                why = "is the folder of a comparison; to continue the comparison, run its command again"
            way = "; begin one without --resume" if resume else ""
            if is_run(there := Path("runs") / run.path):  # ``poise report demo``
                way = f"; did you mean {there}?"
            raise FileNotFoundError(f"there is no run in {run.path}: it {why}{way}")
        if resume and (run.path / "diagnose.json").exists():
            raise FileExistsError(f"{run.path} was written by poise diagnose: there is nothing to resume")
        if resume:
            check_own(run.path / name for name in _OWN)
            for folder in (run.path, run._rollouts, run._tokens, run._checkpoints):
                remove_leftovers(folder)
            run._rewrite_metrics(lambda record: record)  # drops a torn last line
        return run

    def discard(self) -> None:
        """Remove the files of a run that never began, so that its folder can be used again."""
        for name in (*_OWN, "tensorboard", "wandb"):
            remove(self.path / name)
        with suppress(OSError):  # the folder is not empty, is a link, or is a mount point
            self.path.rmdir()

    @property
    def config(self) -> dict[str, Any]:
        """The run's settings."""
        config = self.read_json("config.json")
        if not isinstance(config, dict):
            raise DamagedError(f"{self._config} does not contain settings as a JSON object: {COPY}")
        return config

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the run's settings.

        Infinities are written in Python's JSON syntax (``Infinity``), so that a resumed run can read them.
        """
        with replacing(self._config) as file:
            file.write(json.dumps(dict(config), indent=2).encode("ascii") + b"\n")

    def write_json(self, name: str, data: Any) -> None:
        """Write ``data`` to a file of the folder, atomically."""
        with replacing(self.path / name) as file:
            file.write(dumps(data, indent=2))

    def read_json(self, name: str) -> Any:
        """Read the data that ``write_json`` wrote; None if the file does not exist."""
        path = self.path / name
        try:
            return read_json(path) if path.exists() else None
        except ValueError:
            raise DamagedError(f"{path} cannot be read as JSON: {COPY}") from None

    def code_versions(self) -> list[Code]:
        """The hashes of the user's own code at the run's start and after each accepted edit."""
        if not (self.path / "code.json").exists():  # the run names no code
            return []
        match self.read_json("code.json"):
            case [*versions] if versions and all(_is_version(each) for each in versions):
                return [version["code"] for version in versions]
        raise DamagedError(f"{self.path}/code.json does not hold hashes of code as poise writes them: {COPY}")

    def began(self) -> datetime:
        """The time when the run began, from ``environment.json``; the current time if it has not begun."""
        try:
            return datetime.fromisoformat(self.read_json("environment.json")["began"])
        except (TypeError, KeyError, ValueError):
            return datetime.now()

    # Metrics

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one step. NaN and infinities become null."""
        if "step" in metrics:
            raise ValueError("metrics: the name 'step' is reserved for the step's number")
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        line = dumps({"step": step, **numbers})
        with self._metrics.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:  # disk full: remove the incomplete line
                os.truncate(self._metrics, before)
                raise

    def log_more(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the line of a step that is already logged."""
        self._rewrite_metrics(lambda record: {**record, **metrics} if record["step"] == step else record)

    def metrics(self) -> list[Record]:
        """The metrics of every step, one dict per step, including "step". Values that no curve can show become None."""
        records = (record for _, record in self._metrics_lines())
        return [{key: value if drawable(value) else None for key, value in record.items()} for record in records]

    def sync_metrics(self) -> None:
        """Wait until the metrics are on the disk."""
        if self._metrics.exists():
            with self._metrics.open("r+b") as file:
                os.fsync(file.fileno())

    def _rewrite_metrics(self, change: Callable[[Record], Record | None]) -> None:
        """Replace each record by ``change(record)``; None removes it. A torn last line is removed too."""
        changed = ((line, record, change(record)) for line, record in self._metrics_lines())
        text = b"".join(line if new is old else dumps(new) for line, old, new in changed if new is not None)
        if self._metrics.exists() and self._metrics.read_bytes() != text:
            with replacing(self._metrics) as file:
                file.write(text)

    def _metrics_lines(self) -> Iterator[tuple[bytes, Record]]:
        if self._metrics.exists() and not self._metrics.is_file():  # reading a pipe could block forever
            raise DamagedError(f"{self._metrics} is not a file")
        text = self._metrics.read_bytes() if self._metrics.exists() else b""
        *lines, torn = text.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = dict(loads(line))
                record = {**record, "step": int(record["step"])}
            except (ValueError, TypeError, KeyError, OverflowError):
                # A power cut may leave a last line of the right length with wrong bytes.
                if number == len(lines) and not torn:
                    return
                why = f"this is not a JSON object with a step: {line[:60]!r}"
                raise DamagedError(f"{self._metrics}, line {number}: {why}; remove the line, or {COPY}") from None
            if not 0 <= record["step"] <= LAST_STEP:
                why = f"the step is not between 0 and {LAST_STEP:,}"
                raise DamagedError(f"{self._metrics}, line {number}: {why}; remove the line, or {COPY}")
            yield line + b"\n", record

    # Rollouts

    def save_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write the responses of a step, one JSON object per line, compressed."""
        path = self.rollouts_path(step)
        with replacing(path) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
            for record in records:
                compressed.write(dumps(dict(record)))
        return path

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Read the responses that ``save_rollouts`` wrote for a step."""
        with gzip.open(self.rollouts_path(step)) as file:
            text = file.read(LARGEST_ROLLOUTS + 1)
        if len(text) > LARGEST_ROLLOUTS:
            raise DamagedError(f"the responses of step {step} unpack to more than {LARGEST_ROLLOUTS:,} bytes")
        return [loads(line) for line in text.splitlines()]

    def rollouts_path(self, step: int) -> Path:
        """The path of a step's responses, whether or not it exists."""
        return self._rollouts / f"{_name(step)}.jsonl.gz"

    def recorded(self) -> list[int]:
        """The steps whose responses are recorded."""
        return _steps(self._rollouts, ".jsonl.gz")

    def save_tokens(self, step: int, arrays: Mapping[str, Tensor], texts: Mapping[int, str]) -> Path:
        """Write the tokens of a step's responses (``recorder.token_arrays``), and the text of each distinct token."""
        path = self.tokens_path(step)
        with replacing(path) as file:
            file.write(save(dict(arrays), {"texts": dumps({str(k): v for k, v in texts.items()}).decode("ascii")}))
        return path

    def tokens_path(self, step: int) -> Path:
        """The path of a step's tokens, whether or not it exists."""
        return self._tokens / f"{_name(step)}.safetensors"

    def tokens(self, step: int) -> tuple[dict[str, Tensor], dict[int, str]] | None:
        """Read the arrays and texts that ``save_tokens`` wrote for a step; None if the file does not exist."""
        path = self.tokens_path(step)
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            texts = json.loads(file.metadata()["texts"])
            return {name: file.get_tensor(name) for name in file.keys()}, {int(k): v for k, v in texts.items()}  # noqa: SIM118

    # Checkpoints

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint, whether or not it exists."""
        return self._checkpoints / _name(step)

    def newest(self) -> Path:
        """The folder of the newest checkpoint."""
        steps = self.checkpoints()
        if not steps:
            if (self.path / "summary.json").exists():
                raise CheckpointError(f"{self.path} is a finished run whose checkpoints were removed")
            raise CheckpointError(f"{self.path} has no checkpoint yet; continue with: {self.resume_command}")
        return self.checkpoint(steps[-1])

    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        return _steps(self._checkpoints, "")

    def progress(self) -> tuple[int, int]:
        """The step of the newest checkpoint (0 if there is none), and the tokens sampled up to that step."""
        step = max(self.checkpoints(), default=0)
        return step, max((line.get("tokens/total") or 0 for line in self.metrics() if line["step"] <= step), default=0)

    def rewind(self, step: int, *, say: Callable[[str], None] = complain) -> None:
        """Remove all records after ``step``, so that a run resumed there ends as if it had never been interrupted.

        A later checkpoint, which could not be read, is renamed to ``set-aside-…`` instead. If the metrics lack or
        repeat one of the steps 1 to ``step``, ``say`` gets a message.
        """
        self._rewrite_metrics(lambda record: record if record["step"] <= step else None)
        logged = [record["step"] for record in self.metrics()]
        if len(logged) != step or logged != list(range(1, step + 1)):
            present = set(logged)
            first = next((s for s in range(1, step + 1) if s not in present), None)
            gap = step - sum(1 <= s <= step for s in present)
            what = f"has no line for {gap} steps, the first is {first}" if gap else "has repeated or unordered steps"
            remedy = f"training continues, and the curves stay as they are; to repair the file, stop and {COPY}"
            say(f"{self._metrics} {what}: {remedy}")
        for later in [s for s in _steps(self._rollouts, ".jsonl.gz") if s > step]:
            remove(self.rollouts_path(later))
        for later in [s for s in _steps(self._tokens, ".safetensors") if s > step]:
            remove(self.tokens_path(later))
        for later in [s for s in self.checkpoints() if s > step]:
            aside = self._checkpoints / (ASIDE + _name(later))
            remove(aside)
            os.replace(self.checkpoint(later), aside)

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        return resume_command(self.path)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from the name of its folder; 0 if the folder is not a checkpoint."""
    match = re.fullmatch(_STEP, checkpoint.name)
    return int(match[1]) if match else 0


def _is_version(data: Any) -> bool:
    """Whether ``data``, read from ``code.json``, maps each path of code to the hashes of its files."""
    code = data.get("code") if isinstance(data, dict) else None
    return isinstance(code, dict) and all(isinstance(files, dict) for files in code.values())


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _steps(folder: Path, suffix: str) -> list[int]:
    names = [path.name for path in folder.glob("step-*")]
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(_STEP + re.escape(suffix), name)))
