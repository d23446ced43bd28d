"""Knights & Knaves for verl: parquet files of prompts, and the reward that verl imports from this file.

python examples/scale/verl_kk.py data/kk --train 4500 --test 500
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from poise.tasks import Problem
from poise.tasks.knights_knaves import KnightsKnaves

TASK = KnightsKnaves(people="3-7")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """The reward, as verl expects it: ``score`` is the reward, and verl logs all other entries."""
    problem = Problem(str((extra_info or {}).get("index", "")), "", data_source, json.loads(ground_truth))
    score = TASK.score(problem, solution_str)
    return {"score": score.reward, "acc": float(score.correct)}


def rows(split: Literal["train", "test"], count: int) -> list[dict[str, Any]]:
    """Problems with the columns that verl's data loader expects."""
    return [
        {
            "data_source": "kk",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(dict(problem.data))},
            "extra_info": {"index": problem.id, "split": split},
        }
        for problem in islice(TASK.problems(split, seed=0), count)
    ]


def main() -> None:
    """Write both splits. They share no puzzle, not even in other words."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=4500)
    parser.add_argument("--test", type=int, default=500)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    counts: dict[Literal["train", "test"], int] = {"train": args.train, "test": args.test}
    for split, count in counts.items():
        parquet.write_table(arrow.Table.from_pylist(rows(split, count)), args.folder / f"{split}.parquet")
        print(f"{args.folder / split}.parquet: {count} problems")


if __name__ == "__main__":
    main()
