"""The results of a comparison of which only a part of the folder is left: the other runs from what the command printed.

    python benchmarks/printed_comparison.py runs/main/kk-w1 printed.txt main-w1

``poise compare`` prints a line for every run that ends, with its accuracy (three digits) and tokens. Curves, costs,
greedy and other scores are those of ``comparison.json`` in the folder, over the runs that it knew. Writes
``main-w1.json`` and ``main-w1.png``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from poise.comparison.analysis import analyse
from poise.comparison.plots import picture
from poise.comparison.results import ACCURACY, Arm, Cost, Point, RunResult, result_of

LINE = re.compile(
    r"\] (?P<arm>.+), optim\.lr=(?P<rate>\S+), seed (?P<seed>\d+): "
    r"accuracy (?P<before>[\d.]+) → (?P<after>[\d.]+), (?P<tokens>[\d,]+) tokens"
)
TUNING = 10_000  # the first tuning seed
FOLDER_ONLY = ("scores", "stability", "cost", "curve")  # of the runs that the folder has


def main() -> None:
    folder, printed, out = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    known = json.loads((folder / "comparison.json").read_text())
    steps = known["settings"].get("steps", 80)
    arms = []
    lines = [found for line in printed.read_text().splitlines() if (found := LINE.search(line))]
    for row in known["arms"]:
        name, rate = row["name"], row["settings"]["optim.lr"]
        runs: dict[int, RunResult] = {}
        for found in lines:
            seed = int(found["seed"])
            if found["arm"] == name and float(found["rate"]) == rate and seed < TUNING:
                cost = Cost(tokens=float(found["tokens"].replace(",", "")))
                curve = tuple(
                    Point(step, cost, {ACCURACY: float(found[when])})
                    for step, when in ((0, "before"), (steps, "after"))
                )
                runs[seed] = RunResult(seed, "finished", steps, steps, curve, cost)
        for place in (folder / "arms").glob("*/seed-*"):
            settings = json.loads((place / "config.json").read_text())
            same = settings["regulator"] == row["settings"]["regulator"] and settings["optim"]["lr"] == rate
            if same and (result := result_of(place)) and result.seed < TUNING:
                runs[result.seed] = result
        arms.append(Arm(name, row["settings"], dict(sorted(runs.items()))))
    document = analyse(arms, known["baseline"], range(10))
    for row, of_folder, arm in zip(document["arms"], known["arms"], arms, strict=True):
        row |= {name: of_folder[name] for name in FOLDER_ONLY}
        row["from_print"] = [seed for seed, run in arm.runs.items() if not run.folder]
    document |= {name: known[name] for name in ("tuning", "settings")}
    last = printed.read_text().rpartition("\narm ")[2].splitlines()
    document["verdict"] = last[len(arms) + 1 : -1]
    Path(f"{out}.json").write_text(json.dumps(document, indent=1) + "\n")
    picture(f"{out}.png", document)


if __name__ == "__main__":
    main()
