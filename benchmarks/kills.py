"""Kill training runs with SIGKILL at many moments, resume each, and hold its end against a run never interrupted.

    python benchmarks/kills.py --runs 100 --out experiments/reliability/kills.json

Half of the kills come at a random time. The others come at a *tick*: just before the run opens, renames or removes a
file, or begins to sample, evaluate, save and so on. A phase is drawn first, then a tick of it: short phases, such as
the removal of an old checkpoint, are hit as often as long ones. Every fourth run is killed once more while it resumes.
An end is identical if the folder holds the same files, with the same bytes, but for times and its own name. With
``--device cuda`` the runs are on the GPU; their ``deterministic=true`` changes nothing on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from poise import trainer
from poise.models.loading import load_policy
from poise.models.policy import Policy
from poise.runs import checkpoint_files
from poise.runs.checkpoint_files import CheckpointFiles
from poise.runs.folder import RunFolder
from poise.runs.subscribers.evaluation_schedule import EvaluationSchedule
from poise.trainer import Trainer
from poise.training import config as configs
from poise.training.checkpoints import Checkpoints

SETTINGS = [
    "steps=3", "prompts=2", "group=2", "task.people=2", "rollout.max_tokens=6", "evaluation.problems=1",
    "evaluation.samples=1", "evaluation.every=1", "checkpoint_every=1", "keep_checkpoints=1", "rollouts_every=1",
    "deterministic=true", "objective.entropy_coef=0.01", "optim.lr=1e-3",
]  # fmt: skip # the entropy term moves the weights of a model that never answers right
PHASES: dict[str, list[tuple[Any, str]]] = {  # what is under way, by the function that does it; the innermost counts
    "start": [(trainer, "train")],
    "sampling and update": [(Trainer, "step")],
    "evaluation": [(EvaluationSchedule, "measure")],
    "metrics": [(RunFolder, "log")],
    "records": [(RunFolder, "save_rollouts"), (RunFolder, "save_tokens")],
    "checkpoint": [(Checkpoints, "save")],
    "rotation": [(checkpoint_files, "remove")],
    "resuming": [(RunFolder, "open"), (RunFolder, "rewind"), (CheckpointFiles, "load")],
}
NAMES = list(PHASES)
FILES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


class Shared:
    """What a child process tells: the phase of each tick so far, in memory that outlives it."""

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, 1 << 16)  # how many, in 4 bytes, the phase that goes on, then one byte for each

    def clear(self) -> None:
        """Forget all ticks."""
        self._bytes[:8] = bytes(8)

    @property
    def count(self) -> int:
        """How many ticks there were."""
        return int.from_bytes(self._bytes[:4], "little")

    @property
    def phase(self) -> int:
        """The phase that goes on."""
        return self._bytes[4]

    def enter(self, phase: int) -> None:
        """Another phase begins."""
        self._bytes[4] = phase

    def tick(self) -> int:
        """Write a tick down; its number, from 1 on."""
        self._bytes[8 + self.count] = self.phase
        self._bytes[:4] = (self.count + 1).to_bytes(4, "little")
        return self.count

    def ticks(self) -> list[int]:
        """The phase of each tick."""
        return list(self._bytes[8 : 8 + self.count])


def watch(shared: Shared, folder: Path, kill_at: int | None) -> None:
    """Count the ticks of this process, and kill it at one of them."""

    def tick() -> None:
        if shared.tick() == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def within(phase: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            before = shared.phase
            shared.enter(phase)
            tick()
            try:
                return function(*args, **kwargs)
            finally:
                shared.enter(before)

        return entered

    for phase, places in enumerate(PHASES.values()):
        for owner, name in places:
            setattr(owner, name, within(phase, getattr(owner, name)))

    def heard(event: str, args: tuple[Any, ...]) -> None:
        # What is removed inside a folder is named relative to it.
        if event in FILES and (str(args[0]).startswith(str(folder)) or event in ("os.remove", "os.rmdir")):
            tick()

    sys.addaudithook(heard)


def in_child(work: Callable[[], object], said: Path, kill_after: float | None = None) -> int:
    """Run ``work`` in a forked process, and return its exit status; ``said`` gets what it writes."""
    pid = os.fork()
    if not pid:
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train(folder: Path, model: Path, shared: Shared, kill_at: int | None, device: str) -> None:
    """What a person does: begin the run, or go on with it where there is one."""
    config = configs.load("tiny", [*SETTINGS, f"model={model}", f"run={folder}", f"device={device}"])
    watch(shared, folder, kill_at)
    trainer.train(config, resume=(folder / "config.json").exists(), quiet=True)


def save_small_model(folder: Path) -> None:
    """A model of one layer with random weights, and the embedded model's tokenizer."""
    embedded = load_policy("embedded", device="cpu")
    shape = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = type(embedded.model)(type(embedded.model.config)(**embedded.model.config.to_dict() | shape | heads))
    Policy(model, embedded.tokenizer).save(folder)


def contents(folder: Path) -> dict[str, str]:
    """A hash for each file of a run, without what may differ: times, and the folder's name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b"a folder"
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in data.splitlines()]
            kept = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
            data = json.dumps(kept).encode()
        elif path.name in ("config.json", "summary.json", "environment.json"):
            starts = ("run", "began", "after_step", "earlier_starts")
            data = json.dumps({k: v for k, v in json.loads(data).items() if k not in starts}).encode()
        found[path.relative_to(folder).as_posix()] = hashlib.sha256(data).hexdigest()
    return found


class Trial:
    """Runs beside one that was never interrupted."""

    def __init__(self, place: Path, seed: int, device: str) -> None:
        self.place, self.draw, self.shared, self.device = place, random.Random(seed), Shared(), device
        self.model = place / "model"
        assert in_child(lambda: save_small_model(self.model), place / "said") == 0
        began = time.monotonic()
        assert self.go(place / "whole") == 0, (place / "said").read_text()
        self.seconds = time.monotonic() - began
        self.ticks = self.shared.ticks()
        self.expected = contents(place / "whole")
        assert all(line["optim/grad_norm"] > 0 for line in RunFolder(place / "whole").metrics())  # the weights do move
        self.killed_in: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()

    def go(self, folder: Path, kill_at: int | None = None, kill_after: float | None = None) -> int:
        """Begin the run in ``folder``, or go on with it; its exit status."""
        self.shared.clear()
        work = lambda: train(folder, self.model, self.shared, kill_at, self.device)  # noqa: E731
        return in_child(work, self.place / "said", kill_after)

    def kill(self, folder: Path, *, timed: bool) -> None:
        """Kill the run in ``folder``, which has not begun; again where a random time came after its end."""
        status = 0
        while status != -signal.SIGKILL:
            shutil.rmtree(folder, ignore_errors=True)
            if timed:
                status = self.go(folder, kill_after=self.draw.uniform(0, self.seconds))
            else:
                phase = self.draw.choice(sorted(set(self.ticks)))
                tick = self.draw.choice([at for at, of in enumerate(self.ticks, 1) if of == phase])
                status = self.go(folder, kill_at=tick)
            assert status in (0, -signal.SIGKILL), (self.place / "said").read_text()
        self.count("at a random time" if timed else "at a tick")

    def count(self, moment: str) -> None:
        """Write down that a kill came, and during what."""
        self.kills[moment] += 1
        self.killed_in[NAMES[self.shared.phase]] += 1

    def end(self, number: int) -> dict[str, list[str]]:
        """One run, killed and resumed: how its end differs from the other."""
        folder = self.place / f"run-{number}"
        self.kill(folder, timed=number % 2 == 0)
        if number % 4 == 3 and self.go(folder, kill_at=self.draw.randint(1, 40)) == -signal.SIGKILL:
            self.count("while resuming")  # whose ticks are the first
        assert self.go(folder) == 0, (self.place / "said").read_text()
        found = contents(folder)
        return {
            "too many": sorted(found.keys() - self.expected.keys()),
            "missing": sorted(self.expected.keys() - found.keys()),
            "other": sorted(k for k in found.keys() & self.expected.keys() if found[k] != self.expected[k]),
        }


def result(trial: Trial, ends: list[dict[str, list[str]]]) -> dict[str, Any]:
    """The counts over these ends."""
    return {
        "runs": len(ends),
        "kills": sum(trial.kills.values()),
        "kills_by_moment": dict(trial.kills),
        "kills_by_phase": {name: trial.killed_in[name] for name in NAMES},
        "identical_ends": sum(not any(end.values()) for end in ends),
        "differences": [end for end in ends if any(end.values())],
        "unreadable_checkpoints": (trial.place / "said").read_text().count("cannot be read"),
        "files_compared": len(trial.expected),
        "ticks_of_a_run": len(trial.ticks),
        "seconds_of_a_run": round(trial.seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cuda: each process starts CUDA by itself")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        trial, ends = Trial(Path(place), args.seed, args.device), list[dict[str, list[str]]]()
        for number in range(args.runs):
            ends.append(trial.end(number))
            if args.out:
                args.out.write_text(json.dumps(result(trial, ends), indent=1) + "\n")
            print(f"run {number + 1}: {'other bytes' if any(ends[-1].values()) else 'identical'}", flush=True)
        print(json.dumps(result(trial, ends), indent=1))


if __name__ == "__main__":
    main()
