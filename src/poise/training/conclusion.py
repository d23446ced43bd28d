"""The last lines of a run: which measures rose or fell, and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.runs.warnings import RunWarning
from poise.training.accuracy import is_summary
from poise.training.warnings import TABLE, Progress

ROSE, FELL, UNCLEAR = "rose", "fell", "no clear change, the 95 % intervals overlap"


def conclusion(
    config: Config, folder: RunFolder, summary: dict[str, Any], warnings: Sequence[RunWarning] = ()
) -> list[str]:
    """The lines below the table of results."""
    changes, lines = _changes(summary), learned(summary)
    if warnings:
        names = ", ".join(f"{each.name} (step {each.step})" for each in warnings)
        lines.append(f"warnings: {names}; what they mean: docs/warnings.md")
    if _nothing_right(summary) and not warnings:  # the run may have been too short for a warning
        all_wrong = next(entry for entry in TABLE if entry.name == "all-wrong")
        advice = [all_wrong.remedy(Progress(config))]
    elif warnings and not changes[ROSE]:  # more of the same does not help
        advice = [each.remedy for each in warnings]
    elif changes[FELL]:
        advice = [f"smaller steps: begin again with optim.lr={config.optim.lr / 4:.2g}"]
    else:
        spent = summary.get("tokens", 0)  # often more than the budget: a step is never cut
        more = f"budget={2 * max(config.budget, spent)}" if config.budget else f"steps={2 * summary['steps']}"
        advice = ["# train on", f"{folder.resume_command} {more}"]
    report = shlex.join(["poise", "report", str(folder.path)])
    advice = ["# read the responses, token by token", report, *advice]
    advice.append("whether another method is better takes several seeds: poise compare (docs/compare.md)")
    return [*lines, "try next:", *(f"  {line}" for line in advice)]


def learned(summary: dict[str, Any]) -> list[str]:
    """Which measures rose, fell, or neither: a rise or a fall needs 95 % intervals that are apart."""
    if _nothing_right(summary):
        return ["no held-out answer was right, before training or after it"]
    return [f"{way}: {', '.join(shown)}" for way, shown in _changes(summary).items() if shown]


def _measures(summary: dict[str, Any]) -> list[tuple[str, dict[str, float], dict[str, float]]]:
    """The rows of avg@k, greedy accuracy and pass@k, before and after; none if accuracy was not measured."""
    before, after = summary.get("before"), summary.get("after")
    if not is_summary(before) or not is_summary(after):
        return []
    k = after["samples"]
    names = (f"avg@{k}", "greedy", f"pass@{k}") if k > 1 else ("avg@1", "greedy")  # pass@1 is avg@1
    tables = before["table"], after["table"]
    return [(name, tables[0][name], tables[1][name]) for name in names if all(name in table for table in tables)]


def _changes(summary: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {ROSE: [], FELL: [], UNCLEAR: []}
    for name, old, new in _measures(summary):
        way = ROSE if new["low"] > old["high"] else FELL if new["high"] < old["low"] else UNCLEAR
        found[way].append(f"{name} {old['value']:.3f} → {new['value']:.3f}")
    return found


def _nothing_right(summary: dict[str, Any]) -> bool:
    measures = _measures(summary)
    return bool(measures) and all(old["value"] == new["value"] == 0 for _, old, new in measures)
