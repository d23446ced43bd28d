"""The end of a run: its result as a table, its curve as a picture, where both are, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poise.config.schema import Config
from poise.runs import warnings
from poise.runs.console import Console
from poise.runs.folder import RunFolder
from poise.training.accuracy import is_summary, without_repeats
from poise.training.conclusion import conclusion
from poise.training.evaluate import read_before


def show(config: Config, summary: dict[str, Any], console: Console) -> None:
    """Print accuracy before and after training, draw ``curve.png``, and say what was learned and what to try next."""
    from poise.runs.plots import curve  # imports matplotlib

    folder = RunFolder.open(config.run, resume=False)
    measured = summary["before"] is not None and summary["after"] is not None
    if measured:
        console.table(_rows(summary))
    else:
        console.note("accuracy was not measured (evaluation=off); measure the model with poise eval")
    for when in ("before", "after") if measured else ():
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
    curve(picture, lines, title, "tokens" if config.budget else "step")
    console.picture(picture)
    console.note(f"curve: {picture}   summary: {folder.path / 'summary.json'}   model: {folder.newest()}/model")
    for line in conclusion(config, folder, summary, warnings.read(folder)):
        console.note(line, wrap=not line.startswith("  poise "))  # a command is there to be copied


def finished(config: Config, folder: RunFolder, *, quiet: bool = False) -> dict[str, Any] | None:
    """The contents of ``summary.json``, shown again, if the run in the folder is at its end; None: there is work left.

    A run whose files are damaged is not at its end: the trainer says what is wrong.
    """
    done, evaluated = max(folder.checkpoints(), default=0), bool(config.evaluation.problems)
    try:
        summary = folder.read_json("summary.json")
        if not done or not isinstance(summary, dict) or summary.get("steps") != done:
            return None
        folder.verify(done)
    except (ValueError, OSError):
        return None
    tokens, after = summary.get("tokens"), summary.get("after", {})
    spent = config.budget is not None and type(tokens) is int and tokens >= config.budget
    complete = is_summary(after) if evaluated else after is None
    logged = max((line["step"] for line in folder.metrics()), default=0)
    if not complete or logged != done or (done < config.steps and not spent):
        return None
    summary |= {"before": read_before(folder, done) if evaluated else None, "run": str(folder.path)}
    ending = "budget" if spent else "steps"
    with Console(0, quiet=quiet) as console:
        console.note(f"already at step {done}: nothing to train; to go on, raise {ending}=")
        if not quiet:
            show(config, summary, console)
    return summary


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


def _rows(summary: dict[str, Any]) -> list[dict[str, str]]:
    """Each measure before and after training, with its 95 % interval."""
    before, after = (without_repeats(summary[when]["table"]) for when in ("before", "after"))
    return [
        {
            "": name,
            "before": _cell(before[name]),
            "after": _cell(after[name]),
            "change": f"{after[name]['value'] - before[name]['value']:+.3f}",
        }
        for name in before
        if name in after
    ]


def _cell(row: dict[str, float]) -> str:
    return f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
