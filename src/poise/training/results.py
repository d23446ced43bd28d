"""The end of a run: its result as a table, its curve as a picture, where both are, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poise.config.schema import Config
from poise.runs import warnings
from poise.runs.console import Console
from poise.runs.folder import RunFolder
from poise.training.accuracy import is_summary
from poise.training.conclusion import conclusion


def show(config: Config, summary: dict[str, Any], console: Console) -> None:
    """Print accuracy before and after training, draw ``curve.png``, and say what was learned and what to try next."""
    from poise.runs.plots import curve  # imports matplotlib

    folder = RunFolder.open(config.run, resume=False)
    console.before_after_table(_rows(summary))
    for when in ("before", "after"):
        found = summary[when]
        count = found["n"] * found["samples"]
        if failed := found.get("failed"):
            console.note(f"{when} training, {failed} of {count} samples got no verdict, and count as wrong")
        if cut := found.get("cut_off"):
            limit = f"rollout.max_tokens={config.rollout.max_tokens}"
            console.note(f"{when} training, {cut} of {count} samples were cut off at {limit}")
    picture = folder.path / "curve.png"
    lines = with_ends(folder.metrics(), config.task.name, summary["before"], summary["after"])
    title = f"{folder.path}: {config.regulator}"
    curve(picture, {str(folder.path): lines}, title, "tokens" if config.budget else "step")
    console.picture(picture)
    console.note(f"curve: {picture}   summary: {folder.path / 'summary.json'}   model: {folder.newest()}/model")
    for line in conclusion(config, folder, summary, warnings.read(folder)):
        console.note(line)


def with_ends(lines: Sequence[dict[str, Any]], task: str, before: Any, after: Any) -> list[dict[str, Any]]:
    """The metrics of a run, with the evaluations before and after training as records of their own.

    ``before`` and ``after`` may be anything: what is no evaluation is left out.
    """
    ends = [(0, before), (lines[-1]["step"] if lines else 0, after)]
    first, last = (
        [{"step": step, _key(lines, task, found["samples"]): found["accuracy"]}] if is_summary(found) else []
        for step, found in ends
    )
    return [*first, *lines, *last]


def _key(lines: Sequence[dict[str, Any]], task: str, samples: int) -> str:
    """The metric that an evaluation's accuracy belongs to."""
    measure = f"avg@{samples}"
    known = (key for line in lines for key in line if key.startswith("eval/") and key.endswith(f"/{measure}"))
    return next(known, f"eval/{task}/{measure}")


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    before, after = summary["before"]["table"], summary["after"]["table"]
    return [
        {
            "name": name,
            "before": before[name]["value"],
            "before_ci": (before[name]["low"], before[name]["high"]),
            "after": after[name]["value"],
            "after_ci": (after[name]["low"], after[name]["high"]),
            "change": after[name]["value"] - before[name]["value"],
        }
        for name in before
        if name in after
    ]
