"""Collect the curves of finished runs: python experiments/miniature/collect.py PLAN FOLDER of poise compare.

Those of plan.yaml go into raw.json, those of tuned.yaml into tuned.json. Runs that are there already stay as they are;
a run with other settings than the plan's is refused. A run is named by its regulator, rate and seed; what is kept of
every step is what the page needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from poise.referee.compare.plan import read_plan
from poise.training.config.run_settings import differences

HERE = Path(__file__).parent
DATA = {"plan.yaml": HERE / "raw.json", "tuned.yaml": HERE / "tuned.json"}
STEPS = ("reward/accuracy", "rollout/length", "rollout/finished", "rollout/entropy", "tokens/sampled",
         "reg/low/weight_mean", "reg/first/weight_mean", "reg/all/weight_mean")  # fmt: skip
CURVE = "eval/sums/greedy"


def run(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """A finished run's measurements, by its name; empty for another run."""
    summary = folder / "summary.json"
    if not summary.exists():
        return {}
    config, ended = (json.loads(path.read_text()) for path in (folder / "config.json", summary))
    if others := other_settings(config, plan):
        sys.exit(f"{folder}: {', '.join(others)}: not the plan's")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    greedy = {0: ended["before"]["greedy"]} | {line["step"]: line[CURVE] for line in lines if CURVE in line}
    greedy[ended["steps"]] = ended["after"]["greedy"]
    measured = {
        "regulator": config["regulator"], "lr": config["optim"]["lr"], "seed": config["seed"], "greedy": greedy,
        "cut_off": [ended[when]["greedy_cut_off"] for when in ("before", "after")],
        "problems": config["evaluation"]["problems"],
        "steps": {key: [round(line[key], 4) for line in lines] for key in STEPS if key in lines[0]},
    }  # fmt: skip
    return {name_of(config): measured}


def name_of(config: dict[str, Any]) -> str:
    """A run's name in the data."""
    return f"{config['regulator']} @ {config['optim']['lr']:g}, seed {config['seed']}"


def planned(plan: str) -> dict[str, Any]:
    """The configs of a plan's runs, by name."""
    configs = [each.config.model_dump(mode="json") for each in read_plan(str(HERE / plan), []).all_runs()]
    return {name_of(config): config for config in configs}


def other_settings(config: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """The settings of a run that are not the plan's."""
    if (wanted := plan.get(name_of(config))) is None:
        return [name_of(config)]
    return [key for key, _, _ in differences(config | {"run": ""}, wanted | {"run": ""})]


def main() -> None:
    plan, *roots = sys.argv[1:]
    data, configs = DATA[Path(plan).name], planned(Path(plan).name)
    kept = json.loads(data.read_text()) if data.exists() else {}
    for folder in sorted(place for root in roots for place in Path(root).glob("arms/*/seed-*")):
        kept = run(folder, configs) | kept
    data.write_text(json.dumps(kept, indent=None, sort_keys=True).replace('}, "', '},\n"') + "\n")
    print(f"{len(kept)} runs in {data}")


if __name__ == "__main__":
    main()
