"""Collect the curves of finished runs into raw.json: python experiments/miniature/collect.py FOLDER of poise compare.

Runs that are there already stay as they are; a run with other settings than the plan's is refused. A run is named by
its arm and seed; what is kept of every step is what the page needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from poise.referee.compare.plan import read_plan

RAW = Path(__file__).with_name("raw.json")
STEPS = ("reward/accuracy", "rollout/length", "rollout/finished", "rollout/entropy", "tokens/sampled",
         "reg/low/weight_mean", "reg/first/weight_mean", "reg/all/weight_mean")  # fmt: skip
CURVE = "eval/sums/greedy"
# The settings that every run shares; and those of optim, except lr
SAME = ("model", "prompts", "group", "algorithm", "advantage", "drop_equal_groups", "dtype", "task", "rollout",
        "objective", "evaluation")  # fmt: skip


def run(folder: Path) -> dict[str, Any] | None:
    """What a run measured; None unless it is finished."""
    summary = folder / "summary.json"
    if not summary.exists():
        return None
    config, ended = (json.loads((folder / name).read_text()) for name in ("config.json", "summary.json"))
    for key in other_settings(config):
        sys.exit(f"{folder}: {key} is not the plan's")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    greedy = {0: ended["before"]["greedy"]} | {line["step"]: line[CURVE] for line in lines if CURVE in line}
    greedy[ended["steps"]] = ended["after"]["greedy"]
    return {
        "regulator": config["regulator"], "lr": config["optim"]["lr"], "seed": config["seed"], "greedy": greedy,
        "cut_off": [ended[when]["greedy_cut_off"] for when in ("before", "after")],
        "problems": config["evaluation"]["problems"],
        "steps": {key: [round(line[key], 4) for line in lines] for key in STEPS if key in lines[0]},
    }  # fmt: skip


def other_settings(config: dict[str, Any]) -> list[str]:
    """The settings that differ from the plan's, apart from those of an arm."""
    plan = read_plan(str(RAW.with_name("plan.yaml")), []).baseline.variants[0].config.model_dump(mode="json")
    optim = [f"optim.{key}" for key in plan["optim"] if key != "lr" and config["optim"][key] != plan["optim"][key]]
    return [key for key in SAME if config[key] != plan[key]] + optim


def main() -> None:
    kept = json.loads(RAW.read_text()) if RAW.exists() else {}
    for folder in sorted(place for root in sys.argv[1:] for place in Path(root).glob("arms/*/seed-*")):
        found = run(folder)
        if found:
            kept.setdefault(f"{found['regulator']} @ {found['lr']:g}, seed {found['seed']}", found)
    RAW.write_text(json.dumps(kept, indent=None, sort_keys=True).replace('}, "', '},\n"') + "\n")
    print(f"{len(kept)} runs in {RAW}")


if __name__ == "__main__":
    main()
