"""What scripted experts and random policies reach in the games: the table of experiments/tasks/README.md.

    python scripts/environments.py --episodes 2000

Held-out problems, one attempt each. A random policy names a move at random; in search-qa it searches once for a name in
the question and answers with a random thing of the passages it found.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from itertools import islice
from random import Random
from typing import Any

from poise import tasks
from poise.tasks import Problem
from poise.tasks.grid import DIRECTIONS

Policy = Callable[[Any, Random], str]


def expert(episode: Any, _: Random) -> str:
    return str(episode.expert())


def random_moves(episode: Any, rng: Random) -> str:
    return " ".join(rng.choice(list(DIRECTIONS)) for _ in range(episode.actions))


def random_search(episode: Any, rng: Random) -> str:
    if not episode.replies:
        call = {"name": "search", "arguments": {"query": rng.choice(episode.problem.data["start"].split())}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    found = re.findall(r"\d+|[A-Z]\w+(?: [A-Z]\w+)?", episode.results[-1]) or ["0"]
    return f"<answer>{rng.choice(found)}</answer>"


GAMES: list[tuple[str, dict[str, Any], Policy]] = [
    ("frozenlake", {}, random_moves),
    ("frozenlake", {"side": 4}, random_moves),
    ("frozenlake", {"side": 4, "slippery": True, "turns": 16}, random_moves),
    ("sokoban", {}, random_moves),
    ("search-qa", {}, random_search),
]


def play(task: Any, problem: Problem, policy: Policy, rng: Random) -> tuple[bool, int]:
    """Whether the attempt is right, and how many replies it took."""
    episode = task.episode(problem)
    said = episode.start()
    while said:
        said = episode.step(policy(episode, rng))
    return episode.score().correct, len(episode.replies)


def line(name: str, settings: dict[str, Any], who: str, results: list[tuple[bool, int]]) -> str:
    right, turns = (sum(part) / len(results) for part in zip(*results, strict=True))
    written = " ".join(f"{key}={value}" for key, value in settings.items())
    return f"| `{name}` {written} | {who} | {right:.3f} | {turns:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=2000)
    count = parser.parse_args().episodes
    print("| task | policy | right | replies |\n|---|---|---|---|")
    for name, settings, blind in GAMES:
        task = tasks.get(name, **settings)
        problems = list(islice(task.problems("test", 0), count))
        for who, policy in (("expert", expert), ("random", blind)):
            rng = Random(0)
            print(line(name, settings, who, [play(task, problem, policy, rng) for problem in problems]), flush=True)


if __name__ == "__main__":
    main()
