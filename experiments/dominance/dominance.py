"""The figures of dominance.md for a small pretrained model, on questions that it gets right now and then.

    python experiments/learning/smollm2.py models/smollm2
    python experiments/dominance/dominance.py models/smollm2 runs/diagnose-smollm2

SmolLM2-135M cannot do Knights & Knaves at all: all of 96 responses were scored alike, so there was no gradient to look
at; nor could it add two numbers. Which of two is larger it says right often enough for groups to differ. For the
embedded model no script is needed: poise diagnose embedded.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from poise.referee.diagnose import METHODS, diagnose
from poise.runs.folder import RunFolder
from poise.tasks import Problem, Score
from poise.training import config


@dataclass(frozen=True)
class Larger:
    """Is 27 larger than 45? Right when the first yes or no of the response is."""

    name: str = "larger"

    def problems(self, split: str, seed: int) -> Iterator[Problem]:
        """Without end."""
        rng = Random(f"{split} {seed}")
        while True:
            a, b = rng.sample(range(100), 2)
            prompt = f"Is {a} larger than {b}? Answer yes or no."
            yield Problem(f"{a}>{b}", prompt, "2 digits", {"answer": "yes" if a > b else "no"})

    def score(self, problem: Problem, text: str) -> Score:
        """1 or 0."""
        said = re.search(r"\b(yes|no)\b", text.lower())
        right = said is not None and said[1] == problem.data["answer"]
        return Score(float(right), right, {"answer": float(right)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("run")
    parser.add_argument("settings", nargs="*", help="key=value, as for poise train")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--method", action="append", help="a regulator; may be given several times")
    args = parser.parse_args()
    given = [f"model={args.model}", f"run={args.run}", "prompts=8", "optim.lr=1e-6"]
    given += ["rollout.max_tokens=24", "rollout.temperature=0.7"]
    settings = config.load("tiny", [*given, *args.settings])
    folder = RunFolder.create(args.run, settings.model_dump(mode="json"))
    start = time.perf_counter()
    found = diagnose(
        settings, folder, task=Larger(), methods=args.method or METHODS, batches=args.batches, warmup=args.warmup,
        say=lambda text: print(f"{time.perf_counter() - start:7.1f} s  {text}", flush=True),
    )  # fmt: skip
    print("\n".join(found["verdict"]))


if __name__ == "__main__":
    main()
