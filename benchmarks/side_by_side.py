"""Runs an hour on one device, side by side against one after another: the same command with different ``jobs``.

    python benchmarks/side_by_side.py side.json --jobs 1,16 --seeds 2,16 model=runs/models/kk-w1 steps=20

Each is a whole ``poise compare`` of two arms in a folder of its own, imports and the accuracy before training included,
so the ratio is that of what a user waits for. ``--seeds`` has the seeds for each of ``--jobs``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ARMS = "regulator=grpo; ar"


def measure(jobs: int, seeds: int, settings: list[str], folder: Path) -> dict[str, Any]:
    """One comparison: its runs, and the seconds it took."""
    command = [sys.executable, "-m", "poise", "compare", "tiny", ARMS, f"seeds={seeds}", f"jobs={jobs}", *settings]
    start = time.monotonic()
    subprocess.run([*command, f"run={folder}", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    runs = len(list(folder.glob("arms/*/seed-*/summary.json")))
    return {"jobs": jobs, "runs": runs, "seconds": seconds, "runs_an_hour": 3600 * runs / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value, as for poise compare")
    parser.add_argument("--jobs", default="1,16")
    parser.add_argument("--seeds", default="2,16")
    options = parser.parse_intermixed_args()
    found: dict[str, Any] = {"settings": options.settings, "arms": ARMS, "measured": []}
    pairs = zip(options.jobs.split(","), options.seeds.split(","), strict=True)
    with tempfile.TemporaryDirectory() as place:
        for jobs, seeds in pairs:
            row = measure(int(jobs), int(seeds), options.settings, Path(place) / jobs)
            found["measured"].append(row)
            first = found["measured"][0]
            ratio = row["runs_an_hour"] / first["runs_an_hour"]
            print(f"jobs={jobs}: {row['runs']} runs in {row['seconds']:.1f} s, {ratio:.1f} times jobs={first['jobs']}")
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
