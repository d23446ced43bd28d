"""The last lines of a run: what was learned, what was not, and what to try next. All from the summary's numbers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

from poise import regulators
from poise.config.groups import HELD_OUT
from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.runs.warnings import RunWarning
from poise.training.accuracy import is_summary
from poise.training.warnings import TABLE, Progress

GAIN = 0.05  # a gain in accuracy that would matter


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
    if warnings and not any(change.way > 0 for change in changes):  # more of the same does not help
        commands = [*report, *(each.remedy for each in warnings)]
    return [*lines, "try next:", *(f"  {line}" for line in commands)]


def learned(summary: dict[str, Any]) -> list[str]:
    """What was learned and what was not; a line that explains the one before it is indented."""
    changes = _changes(summary)
    if _nothing_right(changes):
        return ["no held-out answer was right, before training or after it"]
    return [*_learned(changes), *_not_learned(changes, summary["after"]["n"])] if changes else []


@dataclass(frozen=True)
class Change:
    """What became of one measure."""

    name: str
    old: float
    new: float
    way: int  # 1: it rose, -1: it fell, 0: the 95 % intervals overlap
    most: float  # the upper end of the interval of the change, by Newcombe's method from the two intervals
    visible: float  # the smallest rise or fall with which such intervals would be apart

    @property
    def shown(self) -> str:
        """Both values."""
        return f"{self.name} {self.old:.3f} → {self.new:.3f}"


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
            up = hypot(new["high"] - new["value"], old["value"] - old["low"])
            rise = old["high"] - old["value"] + new["value"] - new["low"]
            visible = max(rise, old["value"] - old["low"] + new["high"] - new["value"])
            most = new["value"] - old["value"] + up
            found.append(Change(label, old["value"], new["value"], way, most, visible))
    return found


def _nothing_right(changes: Sequence[Change]) -> bool:
    return bool(changes) and all(change.old == change.new == 0 for change in changes)


def _learned(changes: Sequence[Change]) -> list[str]:
    rose = [f"{each.name} rose from {each.old:.3f} to {each.new:.3f}" for each in changes if each.way > 0]
    return [f"learned: {', '.join(rose)}, by more than the 95 % intervals"] if rose else []


def _not_learned(changes: Sequence[Change], problems: int) -> list[str]:
    lines = [
        f"worse than before: {each.name} fell from {each.old:.3f} to {each.new:.3f}" for each in changes if each.way < 0
    ]
    unclear = [each for each in changes if each.way == 0]
    if excluded := [each for each in unclear if each.most < GAIN]:
        listed = ", ".join(each.shown for each in excluded)
        lines.append(f"not learned: {listed} (by the 95 % intervals, no gain of {_points(GAIN)})")
    if open_ := [each for each in unclear if each.most >= GAIN]:
        listed, visible = ", ".join(each.shown for each in open_), max(each.visible for each in open_)
        lines.append(f"cannot tell: {listed} (the 95 % intervals overlap, and a gain of {_points(GAIN)} is possible)")
        shown = f"changes from about {_points(visible)} on" if visible < 0.5 else "hardly any change"
        needed = _round_up(round(problems * (visible / GAIN) ** 2))
        if needed > problems:
            so_many = "1 held-out problem shows" if problems == 1 else f"{problems} held-out problems show"
            lines.append(f"  {so_many} {shown}; for {_points(GAIN)} it takes about evaluation.problems={needed}")
    rose = [each.name for each in changes if each.way > 0]
    surer = rose and all(name.startswith("avg@") for name in rose)
    if surer and any(each.name == "greedy accuracy" and each.way >= 0 for each in changes):
        lines.append(
            "  so the samples came closer to what the model already answered greedily: it is surer, and there is no "
            "sign that it solves more problems"
        )
    return lines


def _points(share: float) -> str:
    return f"{100 * share:.0f} points"


def _round_up(count: int) -> int:
    """The count with two digits, rounded up: it is an estimate."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return int(-(-count // unit) * unit)


def _next(config: Config, folder: RunFolder, changes: Sequence[Change], summary: dict[str, Any]) -> list[str]:
    """Commands that can be pasted into a shell, each below what it is for."""
    place, settings = str(folder.path), str(folder.path / "config.json")
    other = "ar" if config.build_regulator() == regulators.Identity() else "grpo"
    spent = summary.get("tokens", 0)  # often more than the budget: a step is never cut
    more = f"budget={2 * max(config.budget, spent)}" if config.budget else f"steps={2 * summary['steps']}"
    rows = [("read the responses, token by token", shlex.join(["poise", "report", place]))]
    if any(change.way < 0 for change in changes):
        slower = [f"optim.lr={config.optim.lr / 4:.2g}", f"run={place}-slower"]
        rows.append(("smaller steps", shlex.join(["poise", "train", settings, *slower])))
    else:
        rows.append(("train on", f"{folder.resume_command} {more}"))
    words = [f"regulator={other}", f"run={place}-{other}"]
    rows.append(("another method", shlex.join(["poise", "train", settings, *words])))
    words = [f"regulator={config.regulator}; {other}", "seeds=6", f"run={place}-compare"]
    if config.evaluation.problems < HELD_OUT:
        words.append(f"evaluation.problems={HELD_OUT}")
    rows.append(("which one is better: one run cannot tell", shlex.join(["poise", "compare", settings, *words])))
    return [line for purpose, command in rows for line in (f"# {purpose}", command)]
