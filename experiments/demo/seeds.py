"""Accuracy before and after training, of several seeds: a JSON file of it, and its table for demo.md.

python experiments/demo/seeds.py first.json RUN…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from poise.runs.folder import RunFolder


def measured(run: Path) -> dict[str, Any]:
    """What ``summary.json`` says of a run, without its parts by difficulty, and its mean seconds a step."""
    summary, config = (json.loads((run / f"{name}.json").read_text()) for name in ("summary", "config"))
    lines = RunFolder.open(str(run), resume=False).metrics()
    found = {"seed": config["seed"], "seconds a step": sum(line["time/step"] for line in lines) / len(lines)}
    kept = ("n", "samples", "temperature", "cut_off", "greedy_cut_off", "unreadable", "greedy_unreadable")
    for when in ("before", "after"):
        table = {name: row for name, row in summary[when]["table"].items() if "/" not in name}
        found[when] = {name: summary[when][name] for name in kept if name in summary[when]} | {"table": table}
    return found | {"change": summary["change"]}


def row(run: dict[str, Any]) -> str:
    """A line of the table."""
    before, after = (run[when]["table"] for when in ("before", "after"))
    cells = [str(run["seed"])]
    for name in ("greedy", f"avg@{run['before']['samples']}"):
        cells += ["{value:.3f} [{low:.3f}, {high:.3f}]".format(**side[name]) for side in (before, after)]
        cells.append(f"{after[name]['value'] - before[name]['value']:+.3f}")
    for when in ("before", "after"):
        cells.append(f"{run[when]['greedy_cut_off']} of {run[when]['n']}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    runs = [measured(Path(run)) for run in sys.argv[2:]]
    Path(sys.argv[1]).write_text(json.dumps(runs, indent=1) + "\n")
    print(*map(row, runs), sep="\n")


if __name__ == "__main__":
    main()
