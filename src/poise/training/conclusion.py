"""The last lines of a run: what was learned, what was not, and what to try next. All from the summary's numbers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from poise.config.arguments import arguments
from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.runs.warnings import RunWarning
from poise.training.accuracy import is_summary
from poise.training.warnings import TABLE, Progress

FEW_PROBLEMS = 200  # with fewer, an interval is wider than most gains


def conclusion(
    config: Config, folder: RunFolder, summary: dict[str, Any], warnings: Sequence[RunWarning] = ()
) -> list[str]:
    """The lines, without the table of results that stands before them."""
    lines, changes = learned(summary), _changes(summary)
    if warnings:
        names = ", ".join(f"{each.name} (step {each.step})" for each in warnings)
        lines.append(f"warnings: {names}; what they mean: docs/warnings.md")
    commands = _next(config, folder, changes, summary)
    report = commands[:2]
    if not warnings and _nothing_right(changes):  # the run may have been too short for a warning
        all_wrong = next(entry for entry in TABLE if entry.name == "all-wrong")
        commands = [*report, all_wrong.remedy(Progress(config))]
    if warnings and not any(way > 0 for *_, way in changes):  # more of the same does not help
        commands = [*report, *(each.remedy for each in warnings)]
    return [*lines, "try next:", *(f"  {line}" for line in commands)]


def learned(summary: dict[str, Any]) -> list[str]:
    """What was learned and what was not; a line that explains the one before it is indented."""
    changes = _changes(summary)
    if _nothing_right(changes):
        return ["no held-out answer was right, before training or after it"]
    return [*_learned(changes), *_not_learned(changes, summary)]


Change = tuple[str, float, float, int]  # measure, before, after; 1: it rose, -1: it fell, 0: the intervals overlap


def _changes(summary: dict[str, Any]) -> list[Change]:
    """What became of avg@k, greedy accuracy and pass@k. The 95 % intervals must be apart for a rise or a fall."""
    before: Any = summary.get("before")
    after: Any = summary.get("after")
    if not is_summary(before) or not is_summary(after):
        return []
    found, k = [], after["samples"]
    for name, label in ((f"avg@{k}", f"avg@{k}"), ("greedy", "greedy accuracy"), (f"pass@{k}", f"pass@{k}")):
        old, new = (when["table"].get(name) for when in (before, after))
        if old is not None and new is not None and not (k == 1 and name == "pass@1"):  # which is avg@1
            way = (new["low"] > old["high"]) - (new["high"] < old["low"])
            found.append((label, old["value"], new["value"], way))
    return found


def _nothing_right(changes: Sequence[Change]) -> bool:
    return bool(changes) and all(old == new == 0 for _, old, new, _ in changes)


def _learned(changes: Sequence[Change]) -> list[str]:
    rose = [f"{name} rose from {old:.3f} to {new:.3f}" for name, old, new, way in changes if way > 0]
    return [f"learned: {', '.join(rose)}, by more than the 95 % intervals"] if rose else []


def _not_learned(changes: Sequence[Change], summary: dict[str, Any]) -> list[str]:
    lines = [
        f"worse than before: {name} fell from {old:.3f} to {new:.3f}" for name, old, new, way in changes if way < 0
    ]
    unclear = [f"{name} {old:.3f} → {new:.3f}" for name, old, new, way in changes if way == 0]
    if unclear:
        lines.append(f"not learned: {', '.join(unclear)} (no clear change: the 95 % intervals overlap)")
    ways = {name: way for name, _, _, way in changes}
    rose = [name for name, way in ways.items() if way > 0]
    if rose == [name for name in rose if name.startswith("avg@")] and rose and "greedy accuracy" in ways:
        lines.append(
            "  so the samples came closer to what the model already answered greedily: it is surer, and there is no "
            "sign that it solves more problems"
        )
    if changes and not rose and summary["after"]["n"] < FEW_PROBLEMS:
        lines.append(f"  {summary['after']['n']} held-out problems show large gains only: raise evaluation.problems")
    return lines


def _next(config: Config, folder: RunFolder, changes: Sequence[Change], summary: dict[str, Any]) -> list[str]:
    """Commands that can be pasted into a shell, each below what it is for."""
    place = str(folder.path)
    other = "ar" if config.regulator == "grpo" else "grpo"
    more = f"budget={2 * config.budget}" if config.budget else f"steps={2 * summary['steps']}"
    smaller = f"optim.lr={config.optim.lr / 4:.2g}"
    rows = [("read the responses, token by token", shlex.join(["poise", "report", place]))]
    if not any(way < 0 for *_, way in changes):
        rows.append(("train on", f"{folder.resume_command} {more}"))
    elif words := arguments(config, ("optim.lr", "run")):
        rows.append(("smaller steps", shlex.join(["poise", "train", *words, smaller, f"run={place}-slower"])))
    if words := arguments(config, ("regulator", "run")):
        words += [f"regulator={other}", f"run={place}-{other}"]
        rows.append(("another method", shlex.join(["poise", "train", *words])))
    # A comparison has seeds of its own, and more held-out problems.
    if words := arguments(config, ("regulator", "run", "seed", "evaluation.problems")):
        words += [f"regulator={config.regulator}; {other}", "seeds=6", f"run={place}-compare"]
        rows.append(("which one is better: one run cannot tell", shlex.join(["poise", "compare", *words])))
    return [line for purpose, command in rows for line in (f"# {purpose}", command)]
