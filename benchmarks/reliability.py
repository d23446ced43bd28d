"""Signals, full disks and damaged files: what a run does, counted; and the figure of docs/reliability.md.

python benchmarks/reliability.py --out experiments/reliability/reliability.json    # full disks need root, for a tmpfs
python benchmarks/reliability.py --draw docs/figures/reliability.png        # from kills.json and reliability.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kills import SETTINGS, contents, in_child, save_small_model

from poise import trainer
from poise.runs.checkpoint_files import CheckpointFiles, verify_model
from poise.runs.folder import CheckpointError, RunFolder
from poise.training import config as configs
from poise.training import preflight
from poise.training.interrupts import SIGNALS

RESULTS = Path(__file__).parents[1] / "experiments" / "reliability"


def train(folder: Path, model: Path, *overrides: str) -> None:
    config = configs.load("tiny", [*SETTINGS, f"model={model}", f"run={folder}", *overrides])
    trainer.train(config, resume=(folder / "config.json").exists(), quiet=True)


def by_signal(place: Path, model: Path, each: int) -> list[dict[str, Any]]:
    """Each signal, at random times of a run that saves only at its end: the steps done, and those that were saved."""
    draw, found = random.Random(0), []
    for number in SIGNALS:
        for trial in range(each):
            folder = place / f"{number.name}-{trial}"
            pid = os.fork()
            if not pid:
                handle = os.open(place / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(handle, 2)
                with contextlib.suppress(KeyboardInterrupt):
                    train(folder, model, "steps=10000", "checkpoint_every=0", "evaluation.every=0", "rollouts_every=0")
                os._exit(0)
            while not (folder / "metrics.jsonl").exists():
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 1))
            os.kill(pid, number)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            run = RunFolder.open(folder, resume=False)
            done, saved = run.metrics()[-1]["step"], max(run.checkpoints(), default=0)
            found.append({"signal": number.name, "done": done, "saved": saved, "ended_cleanly": status == 0})
    return found


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def explained(folder: Path, model: Path) -> None:
    """Train; where that ends in an error that the command line shows as a sentence, end with status 2."""
    preflight.check_disk = lambda *_: None  # which would refuse a small disk before it fills up
    try:
        train(folder, model)
    except (CheckpointError, OSError) as error:
        print(str(error).replace(str(folder), "RUN"), file=sys.stderr, flush=True)
        os._exit(2)


def by_disk(place: Path, model: Path, sizes: int) -> list[dict[str, Any]]:
    """Runs on disks that fill up ever later; then the disk grows, and each goes on to the end."""
    whole, said = place / "whole", place / "said"
    assert in_child(lambda: train(whole, model), said) == 0, said.read_text()
    expected, found = contents(whole), []
    used = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    for trial in range(sizes):
        size = int(used * (0.2 + 1.8 * trial / sizes)) // 4096 * 4096
        with small_disk(place / f"disk-{trial}", size) as disk:
            said.write_text("")
            status = in_child(lambda at=disk: explained(at / "run", model), said)  # type: ignore[misc]
            message = (said.read_text().strip().splitlines() or [""])[-1]
            subprocess.run(["mount", "-o", f"remount,size={10 * used}", str(disk)], check=True)
            again = in_child(lambda at=disk: train(at / "run", model), said)  # type: ignore[misc]
            same = again == 0 and contents(disk / "run") == expected
            told = {"stopped": status != 0, "explained": status == 2, "message": message if status else ""}
            found.append({"bytes": size, **told, "identical_end": same})
    return found


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "a bit flipped": flip,
    "half of it": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "gone": lambda path, _: path.unlink(),
}


def by_damage(place: Path, each: int) -> list[dict[str, Any]]:
    """Every file of a checkpoint, damaged in every way: whether resuming, and measuring the model, notice."""
    draw, found = random.Random(0), []
    whole = RunFolder.open(place / "whole", resume=False)
    names = [path.relative_to(whole.newest()) for path in whole.newest().rglob("*") if path.is_file()]
    for name in names:
        for what, damage in DAMAGE.items():
            for _ in range(each if what == "a bit flipped" else 1):
                copy = RunFolder(shutil.copytree(whole.path, place / "copy"))
                damage(copy.newest() / name, draw)
                noticed = {"resuming": raises(lambda run=copy: CheckpointFiles(run).verify(max(run.checkpoints())))}  # type: ignore[misc]
                if name.parts[0] == "model":
                    noticed["measuring"] = raises(lambda run=copy: verify_model(run.newest() / "model"))  # type: ignore[misc]
                found.append({"file": str(name), "damage": what, **noticed})
                shutil.rmtree(copy.path)
    return found


def raises(work: Callable[[], object]) -> bool:
    try:
        work()
    except (ValueError, OSError, RuntimeError):
        return True
    return False


def measure(out: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = place / "model"
        assert in_child(lambda: save_small_model(model), place / "said") == 0
        result = {
            "full_disk": by_disk(place, model, 12),
            "damage": by_damage(place, 5),
            "signals": by_signal(place, model, 3),
        }
    out.write_text(json.dumps(result, indent=1) + "\n")


def rows() -> list[tuple[str, int, int]]:
    """What was tried, how often, and how often it came out right."""
    kills = json.loads((RESULTS / "kills.json").read_text())
    found = json.loads((RESULTS / "reliability.json").read_text())
    signals, disks, damage = found["signals"], found["full_disk"], found["damage"]
    noticed = [all(value for key, value in each.items() if key in ("resuming", "measuring")) for each in damage]
    stopped = [each for each in disks if each["stopped"]]
    return [
        (f"{kills['kills']} SIGKILLs in {kills['runs']} runs: same end", kills["runs"], kills["identical_ends"]),
        ("signals that ask to stop: no step lost", len(signals), sum(e["done"] == e["saved"] for e in signals)),
        (
            "full disks: a sentence, then the same end",
            len(stopped),
            sum(e["explained"] and e["identical_end"] for e in stopped),
        ),
        ("damaged checkpoint files: noticed", len(damage), sum(noticed)),
    ]


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    listed = rows()[::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3), width_ratios=[1.2, 1], layout="constrained")
    labels = [label for label, _, _ in listed]
    left.barh(labels, [tried for _, tried, _ in listed], color="#d9d9d9", label="tried")
    left.barh(labels, [right for _, _, right in listed], color="#2a7f62", height=0.5, label="came out right")
    for at, (_, tried, good) in enumerate(listed):
        left.text(tried, at, f" {good} of {tried}", va="center")
    left.set(xlim=(0, 1.25 * max(tried for _, tried, _ in listed)), title="What was tried")
    left.legend(loc="center right", frameon=False)
    phases = json.loads((RESULTS / "kills.json").read_text())["kills_by_phase"]
    right.barh(list(phases)[::-1], list(phases.values())[::-1], color="#2a7f62")
    right.set(title="What the kills interrupted", xlabel="kills")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path)
    args = parser.parse_args()
    if args.out:
        measure(args.out)
    if args.draw:
        draw(args.draw)


if __name__ == "__main__":
    main()
