"""Do ten steps of training still give the same numbers? Keeps the metrics of a few runs, and compares with kept ones.

    python benchmarks/unchanged.py before.json     # writes the file
    (change the code)
    python benchmarks/unchanged.py before.json     # compares with it, on the same machine

Every metric of every step must be the same to the last bit, times aside. Runs use seed 0, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poise import tasks, trainer
from poise.tasks import Message, Problem, Score, Split
from poise.training import config

STEPS = 10
SMALL = ("device=cpu", "seed=0", f"steps={STEPS}", "evaluation.problems=8", "evaluation.samples=2")
GAME = ("prompts=4", "rollout.max_tokens=48", f"task={{name: '{Path(__file__)}:Twice'}}")
RUNS = {
    "tiny": (),
    "lopti": ("regulator=lopti", "prompts=4"),
    "nthr with KL": ("regulator=nthr", "prompts=4", "objective.kl_coef=0.001"),
    "LoRA": ("lora.rank=4", "prompts=4", "optim.lr=1e-3"),
    "two mini-batches": ("optim.mini_batch=16", "prompts=4"),
    "several turns": (*GAME, "algorithm=grpo"),
    "RLTR": ("algorithm=rltr(transfer=0.5)", "prompts=4"),
    "ERL": (*GAME, "algorithm=erl(memory=true, reflection_tokens=32)"),
}


@dataclass(frozen=True)
class Twice:
    """Two turns, with rewards that the embedded model gets for some attempts and not for others."""

    name: str = "twice"

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Knights & Knaves puzzles."""
        return tasks.get("kk", people=2).problems(split, seed)

    def episode(self, problem: Problem) -> Asked:
        """An attempt."""
        return Asked(problem)


@dataclass
class Asked:
    """Asks for a puzzle's solution, then whether that is certain."""

    problem: Problem
    replies: list[str] = field(default_factory=list)

    def start(self) -> list[Message]:
        """The puzzle."""
        return [{"role": "user", "content": self.problem.prompt}]

    def step(self, reply: str) -> list[Message]:
        """Ask again, once."""
        self.replies.append(reply)
        return [{"role": "user", "content": "Are you sure?"}] if len(self.replies) == 1 else []

    def score(self) -> Score:
        """By the number of knights that both replies name."""
        knights = sum(reply.count("knight") for reply in self.replies)
        return Score(float(knights), correct=knights % 3 == 0)

    def feedback(self) -> str:
        """Something for a reflection to read."""
        return f"You named {len(self.replies)} times."


def metrics(overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        trainer.train(config.load("tiny", [*SMALL, *overrides, f"run={run}"]), quiet=True)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    found = {}
    for name, overrides in RUNS.items():
        print(f"{name}: {STEPS} steps", flush=True)
        found[name] = metrics(overrides)
    if not file.exists():
        file.write_text(json.dumps(found, indent=1))
        print(f"kept in {file}")
        return
    kept = json.loads(file.read_text())
    different = [
        f"{name}, step {old['step']}: {key} was {old.get(key)}, is {new.get(key)}"
        for name, lines in found.items()
        for old, new in zip(kept[name], lines, strict=True)
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    count = sum(len(line) for lines in found.values() for line in lines)
    print("\n".join(different[:40]) or f"{count} numbers, all the same to the last bit")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
