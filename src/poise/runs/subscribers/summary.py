"""The end of a run: ``summary.json``, a table of results, a picture of the curve, and advice."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from poise._lib.files import SEAL, sealed, was_changed
from poise.runs.checkpoint_files import CheckpointFiles
from poise.runs.folder import RunFolder
from poise.runs.lock import resume_command
from poise.runs.subscribers.console import Console
from poise.runs.subscribers.warnings import TABLE, Progress, RunWarning, read
from poise.training.accuracy import LOST, Interval, changes, is_summary, lost_shares, much, without_repeats
from poise.training.config.schema import Config
from poise.training.resume import TrainError

if TYPE_CHECKING:  # these import transformers, which a report does not need
    from poise.runs.subscribers.evaluation_schedule import EvaluationSchedule
    from poise.training.steps import State

ROSE, FELL, UNCLEAR = WAYS = ("rose", "fell", "no clear change")


class Change(NamedTuple):
    """A measure before and after training, and the 95 % interval of its change over problems."""

    name: str
    old: float
    new: float
    interval: Interval

    def __str__(self) -> str:
        return f"{self.name} {self.old:.3f} → {self.new:.3f}"

    @property
    def way(self) -> str:
        """Whether the measure rose, fell or did not clearly change."""
        low, high = self.interval
        return ROSE if low > 0 else FELL if high < 0 else UNCLEAR


class Summary:
    """Writes ``summary.json`` at the end of a run, and ``problems.json`` if the run has evaluations."""

    def __init__(self, folder: RunFolder, evaluations: EvaluationSchedule) -> None:
        self.folder, self.evaluations = folder, evaluations
        self.contents: dict[str, Any] = {}

    def on_end(self, state: State) -> None:
        """Write the files."""
        before, after = self.evaluations.before, self.evaluations.after
        contents: dict[str, Any] = {"steps": state.step, "tokens": state.tokens, "before": None, "after": None}
        if after is not None:
            by_problem = after.by_problem()
            contents |= {"before": shown_before(before), "after": after.summary()}
            known = (before or {}).get("by_problem")
            contents["change"] = changes(known, by_problem) if known else {}
            self.folder.write_json("problems.json", by_problem)
        self.contents = sealed(contents | {"run": str(self.folder.path)})
        self.folder.write_json("summary.json", self.contents)


def show(config: Config, summary: dict[str, Any], console: Console) -> None:
    """Print accuracy before and after training, what was learned and what to try next; draw ``curve.png``."""
    from poise.runs.plots import curve  # imports matplotlib

    folder = RunFolder.open(config.run, resume=False)
    measured = summary["before"] is not None and summary["after"] is not None
    if measured:
        console.table(accuracy_rows(summary, f"cut off at rollout.max_tokens={config.rollout.max_tokens}"))
    else:
        console.note("accuracy was not measured (evaluation=off); measure the model with poise eval")
    for when in ("before", "after") if measured else ():
        accuracy = summary[when]
        if failed := accuracy.get("failed"):
            count = accuracy["n"] * accuracy["samples"]
            console.note(f"{when} training, {failed} of {count} samples got no verdict, and count as wrong")
    picture = folder.path / "curve.png"
    lines = with_ends(folder.metrics(), config.task.name, summary["before"], summary["after"])
    title = f"{folder.path}: {config.regulator}"
    curve(picture, lines, title, "tokens" if config.budget else "step")
    console.picture(picture)
    console.note(f"curve: {picture}   summary: {folder.path / 'summary.json'}   model: {folder.newest()}/model")
    for line in conclusion(config, folder, summary, read(folder)):
        console.note(line, wrap=not line.startswith("  poise"))  # so that a command can be copied


def finished(config: Config, folder: RunFolder, *, quiet: bool = False) -> dict[str, Any] | None:
    """If the run in the folder is finished, show its result again and return ``summary.json``; otherwise return None.

    A run with damaged files counts as unfinished; the trainer then reports the damage.
    """
    step, evaluated = max(folder.checkpoints(), default=0), bool(config.evaluation.problems)
    try:
        summary = folder.read_json("summary.json")
        if was_changed(summary):
            with Console(0, quiet=quiet) as console:
                console.note(f"{folder.path}/summary.json was changed after the run wrote it: evaluating again")
        if not step or not isinstance(summary, dict) or summary.get("steps") != step or was_changed(summary):
            return None
        CheckpointFiles(folder).verify(step)
    except (ValueError, OSError):
        return None
    tokens, after = summary.get("tokens"), summary.get("after", {})
    spent = config.budget is not None and type(tokens) is int and tokens >= config.budget
    complete = is_summary(after) if evaluated else after is None
    logged = max((line["step"] for line in folder.metrics()), default=0)
    if not complete or logged != step or (step < config.steps and not spent):
        return None
    before = read_before(folder, step) if evaluated else None
    summary |= {"before": shown_before(before), "run": str(folder.path)}
    ending = "budget" if spent else "steps"
    with Console(0, quiet=quiet) as console:
        console.note(f"already at step {step}: nothing to train; to continue, raise {ending}=")
        if not quiet:
            show(config, summary, console)
    return summary


def read_before(folder: RunFolder, step: int) -> dict[str, Any] | None:
    """Read the accuracy before training from ``before.json``; None if it has not been measured yet.

    After the first step, the accuracy before training can no longer be measured, so a missing file is an error.
    """
    before: dict[str, Any] | None = folder.read_json("before.json")
    if before is None and step:
        raise TrainError(
            f"{folder.path}/before.json is missing: it holds the accuracy before training, which cannot be measured "
            f"any more at step {step}; put it back, or begin again in another run=DIR"
        )
    if before is not None and (not is_summary(before) or was_changed(before)):
        raise TrainError(
            f"{folder.path}/before.json does not hold the accuracy before training as poise wrote it: put the file "
            "back from a copy, or begin again in another run=DIR"
        )
    return before


def shown_before(before: dict[str, Any] | None) -> dict[str, Any] | None:
    """The contents of ``before.json`` without the results by problem and the seal, for ``summary.json``."""
    return before and {key: value for key, value in before.items() if key not in ("by_problem", SEAL)}


def with_ends(lines: Sequence[dict[str, Any]], task: str, before: Any, after: Any) -> list[dict[str, Any]]:
    """Add the evaluations before and after training to a run's metrics, as separate records.

    ``before`` and ``after`` come from files; a value that is not an evaluation is ignored.
    """

    def record(step: int, end: Any) -> list[dict[str, Any]]:
        if not is_summary(end):
            return []
        ending = f"/avg@{end['samples']}"
        known = (key for line in lines for key in line if key.startswith("eval/") and key.endswith(ending))
        return [{"step": step, next(known, f"eval/{task}{ending}"): end["accuracy"]}]

    return [*record(0, before), *lines, *record(lines[-1]["step"] if lines else 0, after)]


def accuracy_rows(summary: dict[str, Any], cut_off: str = "cut off") -> list[dict[str, str]]:
    """Return one row per measure, before and after training, with 95 % intervals.

    The last rows are the shares of samples that were cut off or unreadable. ``cut_off`` is the name of the first share.
    """
    temperature = summary["after"].get("temperature")
    before, after = (without_repeats(summary[when]["table"], temperature) for when in ("before", "after"))
    within = {each.name: each.interval for each in measured_changes(summary)}
    rows = [
        {
            "": name,
            "before": _cell(before[name]),
            "after": _cell(after[name]),
            "change": f"{after[name]['value'] - before[name]['value']:+.3f}"
            + ("" if name not in within else " [{:+.3f}, {:+.3f}]".format(*within[name])),
        }
        for name in before
        if name in after
    ]
    words = dict(zip(LOST, (cut_off, "unreadable"), strict=True))
    old, new = (lost_shares(summary[when]) for when in ("before", "after"))
    for name in (name for name in LOST if name in old and name in new):
        change = f"{new[name] - old[name]:+.3f}"
        rows.append({"": words[name], "before": f"{old[name]:.3f}", "after": f"{new[name]:.3f}", "change": change})
    return rows


def _cell(row: dict[str, float]) -> str:
    """Format a measure with its interval."""
    return f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def conclusion(
    config: Config, folder: RunFolder, summary: dict[str, Any], warnings: Sequence[RunWarning] = ()
) -> list[str]:
    """Return the lines below the table of results."""
    changes, lines = measured_changes(summary), learned(summary)
    ways = {each.way for each in changes}
    if warnings:
        names = ", ".join(f"{each.name} (step {each.step})" for each in warnings)
        lines.append(f"warnings: {names}; what they mean: docs/warnings.md")
    if _nothing_right(changes) and not warnings:  # a short run may have no warning
        cut_off = lost_shares(summary["after"]).get("cut_off", 0.0) >= 0.5
        why = next(entry for entry in TABLE if entry.name == ("cut-off" if cut_off else "all-wrong"))
        advice = [why.remedy(Progress(config))]
    elif warnings and ROSE not in ways:  # longer training does not help
        advice = [each.remedy for each in warnings]
    elif FELL in ways:
        advice = [f"smaller steps: begin again with optim.lr={config.optim.lr / 4:.2g}"]
    else:
        spent = summary.get("tokens", 0)  # often more than the budget, because a step is never cut
        steps = max(2 * summary["steps"], config.steps)  # a callback may have ended the run early, even before step 1
        more = f"budget={2 * max(config.budget, spent)}" if config.budget else f"steps={steps}"
        if config.stop_at is not None and summary["steps"] < config.steps and spent < (config.budget or inf):
            more = "stop_at=null"  # the goal is reached, and would end the run again
        advice = ["# train on", resume_command(folder.path, more)]
    report = shlex.join(["poise", "report", str(folder.path)])
    advice = ["# read the responses, token by token", report, *advice]
    advice.append("to compare methods, train several seeds: poise compare (docs/compare.md)")
    return [*lines, "try next:", *(f"  {line}" for line in advice)]


def learned(summary: dict[str, Any]) -> list[str]:
    """Report which measures rose, fell or did not clearly change, and the effect of cut-off or unreadable answers."""
    changes = measured_changes(summary)
    if _nothing_right(changes):
        return ["no held-out answer was right, before training or after it"]
    lines = [
        f"{way}: {', '.join(told)}" for way in WAYS if (told := [str(each) for each in changes if each.way == way])
    ]
    ends = [summary[when].get("problems") for when in ("before", "after") if is_summary(summary.get(when))]
    if None not in ends and len({*ends}) > 1:  # rollout.max_prompt was raised meanwhile
        lines.append("before and after were measured on different problems, which may explain a change")
    if changes and changes[0].way != UNCLEAR:
        name, old, new, _ = changes[0]
        lost = [sum(lost_shares(summary[when]).values()) for when in ("before", "after")]
        if part := much(old, new, *lost):
            lines.append(f"of the change of {name}, {part}: learning to stop is not learning to solve")
    return lines


def measured_changes(summary: dict[str, Any]) -> list[Change]:
    """The changes of avg@k, greedy accuracy and pass@k; empty if accuracy was not measured.

    If the results before and after cannot be paired, because their problems differ, an interval contains all changes
    that the intervals before and after allow.
    """
    before, after, paired = summary.get("before"), summary.get("after"), summary.get("change")
    if not is_summary(before) or not is_summary(after):
        return []
    k = after["samples"]
    names = [f"avg@{k}", "greedy", f"pass@{k}"] if k > 1 else ["avg@1", "greedy"]  # pass@1 is avg@1
    if after.get("temperature") == 0:  # then avg@1 is greedy accuracy too
        names = ["greedy"]
    found = []
    for name in (name for name in names if name in before["table"] and name in after["table"]):
        old, new = before["table"][name], after["table"][name]
        match paired.get(name) if isinstance(paired, dict) else None:
            case {"low": int() | float() as low, "high": int() | float() as high}:
                interval = low, high
            case _:
                interval = new["low"] - old["high"], new["high"] - old["low"]
        found.append(Change(name, old["value"], new["value"], interval))
    return found


def _nothing_right(changes: Sequence[Change]) -> bool:
    return bool(changes) and all(each.old == each.new == 0 for each in changes)
