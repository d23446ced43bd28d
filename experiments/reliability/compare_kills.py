"""Kill a comparison with SIGKILL at random moments, go on each time, and hold its table against one never interrupted.

    python experiments/reliability/compare_kills.py --kills 10 --out experiments/reliability/compare_kills.json

The comparison has two arms and three seeds of the embedded model. It is killed once its command has run for a random
time, and the same command is given again at once, until so many kills have come; then it may end. What runs in other
processes must end with it. Two tables are equal if every run has the same scores, entropies and gradient norms, bit for
bit, and no run was finished twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from poise.referee.compare.results import RunResult
from poise.runs.folder import RunFolder

SETTINGS = [
    "steps=6", "prompts=2", "group=2", "task.people=2", "rollout.max_tokens=16", "evaluation.problems=4",
    "evaluation.samples=1", "evaluation.every=2", "checkpoint_every=1", "rollouts_every=0", "device=cpu",
    "objective.entropy_coef=0.01", "seeds=3", "jobs=2", "regulator=grpo; tr-grpo",
]  # fmt: skip # the entropy term moves the weights, though replies are too short to be right


def start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Give the command."""
    with log.open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "poise", "compare", "tiny", *SETTINGS, f"run={folder}"], stdout=said, stderr=said
        )


def table(folder: Path) -> dict[str, Any]:
    """What every run has come to, without times."""
    found = {}
    for path in sorted(folder.glob("arms/*/seed-*")):
        run, files = RunResult.read(path), RunFolder(path)
        scores = [dict(point.scores) for point in run.curve]
        norms = [line["optim/grad_norm"] for line in files.metrics()]
        problems = files.read_json("problems.json")
        found[f"{path.parent.name}/{path.name}"] = [run.state, scores, problems, run.entropy, norms]
    return found


def finished(folder: Path) -> dict[str, int]:
    """When each finished run wrote its results."""
    return {str(path): path.stat().st_mtime_ns for path in folder.glob("arms/*/*/summary.json")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as place:
        whole, killed, log = Path(place) / "whole", Path(place) / "killed", Path(place) / "log"
        begin = time.monotonic()
        assert start(whole, log).wait() == 0, log.read_text()
        seconds = time.monotonic() - begin
        kills, moments, redone, restarts = 0, [], 0, 0
        before: dict[str, int] = {}
        while True:
            began, fresh = time.monotonic(), not killed.exists()
            process = start(killed, log)
            wait = draw.uniform(0.2, 1.0) * seconds if kills < args.kills else None
            try:
                assert process.wait(wait) == 0, log.read_text()
                ended = True
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                kills, ended = kills + 1, False
                moments.append({"seconds": round(wait or 0.0, 1), "finished_runs": len(finished(killed))})
            now = finished(killed)
            redone += sum(now.get(path) != when for path, when in before.items())
            before = now
            if ended and kills >= args.kills:
                break
            if ended:  # it ended before its kills had all come: from the beginning
                seconds = min(seconds, time.monotonic() - began) if fresh else seconds  # the machine may be less busy
                assert table(killed) == table(whole)
                shutil.rmtree(killed)
                before, restarts = {}, restarts + 1
        result = {
            "kills": kills,
            "moments": moments,
            "same_table": table(killed) == table(whole),
            "runs": len(table(whole)),
            "runs_finished_twice": redone,
            "comparisons": restarts + 1,
            "seconds_uninterrupted": round(seconds, 1),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
