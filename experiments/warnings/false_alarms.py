"""Replay the warnings over finished runs: which would have been said, and when?

    python experiments/warnings/false_alarms.py runs/demo runs/cmp   # runs, and folders of runs

Without arguments: the curves of the studies beside this one. Those hold only some metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from poise.runs.folder import RunFolder
from poise.runs.subscribers.warnings import Entry, Progress, holding
from poise.training import config as configs
from poise.training.config.schema import restore

STUDIES = Path(__file__).parents[1]


def recorded() -> Iterator[tuple[str, Progress]]:
    """The curves of two studies; settings that they do not tell are those of recipe tiny."""
    config = configs.load("tiny")
    for name, study in json.loads((STUDIES / "learning/learning.json").read_text())["studies"].items():
        yield name, Progress(config, study["curve"])
    for arm, seeds in json.loads((STUDIES / "rltr/rltr.json").read_text())["runs"].items():
        for seed, run in seeds.items():
            rows = zip(*run["metrics"].values(), strict=True)
            yield f"{arm} {seed}", Progress(config, [dict(zip(run["metrics"], row, strict=True)) for row in rows])


def in_folders(paths: list[str]) -> Iterator[tuple[str, Progress]]:
    """All runs in these folders that have metrics."""
    for path in sorted(file for place in paths for file in Path(place).rglob("metrics.jsonl")):
        folder = RunFolder.open(path.parent, resume=False)
        config = restore(folder.config, source=str(folder.path))
        yield str(folder.path), Progress(config, folder.metrics())


def replay(run: Progress) -> list[tuple[int, Entry]]:
    """The warnings that a finished run would have had, each with the number of steps after which."""
    said: list[tuple[int, Entry]] = []
    for step in range(len(run.lines) + 1):
        new = holding(replace(run, lines=run.lines[:step]), [entry.name for _, entry in said])
        said += [(step, entry) for entry in new]
    return said


def main() -> None:
    """Print every warning, and the number of runs with one."""
    runs = list(in_folders(sys.argv[1:]) if sys.argv[1:] else recorded())
    warned = 0
    for name, run in runs:
        said = replay(run)
        warned += bool(said)
        for step, entry in said:
            print(f"{name}, step {step}: {entry.name}")
    print(f"{warned} of {len(runs)} runs have a warning")


if __name__ == "__main__":
    main()
