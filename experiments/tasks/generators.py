"""Every generator of reasoning-gym through the bridge: does it run, how fast, and what do gold and nonsense score?

    python experiments/tasks/generators.py            # all of them, a line for each that has something to say
    python experiments/tasks/generators.py chain_sum  # only these

Questions are also made in another process, with another hash seed: where they differ, a run cannot be resumed bit for
bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from itertools import islice

COUNT = 4


def questions(name: str) -> list[str]:
    """Two questions, made by the generator itself."""
    import reasoning_gym

    try:
        data = reasoning_gym.create_dataset(name, size=64, seed=0)
        return [str(data[number]["question"]) for number in (6, 12)]
    except Exception as error:
        return [str(error)]


def examine(name: str) -> list[str]:
    """What is worth saying of a generator."""
    from poise.tasks.reasoning_gym import NONSENSE, reasoning_gym

    start = time.perf_counter()
    task = reasoning_gym(name)()
    made = time.perf_counter()
    problems = list(islice(task.problems("train", 0), COUNT))
    each = (time.perf_counter() - made) / COUNT
    notes = [f"{made - start:.1f} s to begin"] if made - start > 1 else []
    notes += [f"{each:.2f} s a problem"] if each > 0.1 else []
    gold = [task._entry(problem.data["number"])["answer"] for problem in problems]
    if not all(isinstance(answer, str) for answer in gold):
        notes.append("no gold answer")
    else:
        right = [task.score(p, f"<answer>{a}</answer>").reward for p, a in zip(problems, gold, strict=True)]
        notes += [f"gold answers score {right}"] if set(right) != {1.0} else []
    for answer in (NONSENSE, "", "1", "[1]", "yes"):
        got = [task.score(p, f"<answer>{answer}</answer>").reward for p in problems]
        fair = [a != answer and r > 0 for a, r in zip(gold, got, strict=True)]
        notes += [f"{answer!r} scores {got}"] if any(fair) else []
    raw = [task._ask(NONSENSE, task._entry(problem.data["number"])) for problem in problems]
    notes += [f"its own scorer gives nonsense {max(raw):g}"] if max(raw) > 0 else []
    return notes


def elsewhere(names: list[str]) -> dict[str, list[str]]:
    """The questions that another process makes."""
    command = [sys.executable, __file__, "--questions", *names]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    from poise.tasks.reasoning_gym import _generators

    asked = [name for name in sys.argv[1:] if not name.startswith("-")]
    names = asked or sorted(_generators())
    if "--questions" in sys.argv:
        print("\n" + json.dumps({name: questions(name) for name in names}))
        return
    others, ran = elsewhere(names), 0
    for name in names:
        try:
            notes = examine(name)
            ran += 1
        except Exception as error:
            notes = [f"does not run: {error}"]
        if questions(name) != others[name]:
            notes.append("another process makes other questions")
        if notes:
            print(f"{name}: {'; '.join(notes)}", flush=True)
    print(f"{ran} of {len(names)} run")


if __name__ == "__main__":
    main()
