"""The curves of runs as a PNG, with held-out accuracy before and after training at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poise.reports.recorded import read_json, read_metrics
from poise.runs.axes import AXES, x_values
from poise.runs.folder import RunFolder
from poise.runs.plots import curve
from poise.training.accuracy import is_summary


def write_picture(paths: Sequence[str | Path], out: str | Path, x: str = "step") -> Path:
    """Draw the curves of these run folders over ``x`` (``runs.axes.AXES``) into ``out``."""
    folders = [RunFolder.open(path, resume=False) for path in paths]
    lines = {str(folder.path): read_metrics(folder) for folder in folders}
    for path, metrics in lines.items():
        if metrics and x_values(metrics, x) is None:
            raise FileNotFoundError(f"{path}/metrics.jsonl has no {AXES[x]}: choose another --x (step is always there)")
    runs = {str(folder.path): _with_ends(folder, lines[str(folder.path)]) for folder in folders}
    title = ", ".join(f"{folder.path}: {_settings(folder).get('regulator')}" for folder in folders[:3])
    curve(out, runs, title + (" …" if len(folders) > 3 else ""), x)
    return Path(out)


def _with_ends(folder: RunFolder, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics, with the evaluations before and after training as records of their own."""
    summary = read_json(folder, "summary.json")
    before, after = read_json(folder, "before.json"), summary.get("after") if isinstance(summary, dict) else None
    ends = [(0, before), (lines[-1]["step"] if lines else 0, after)]
    first, last = (
        [{"step": step, _key(folder, lines, found): found["accuracy"]}] if is_summary(found) else []
        for step, found in ends
    )
    return [*first, *lines, *last]


def _key(folder: RunFolder, lines: list[dict[str, Any]], evaluation: dict[str, Any]) -> str:
    """The metric that an evaluation's accuracy belongs to."""
    measure = f"avg@{evaluation['samples']}"
    known = [key for line in lines for key in line if key.startswith("eval/") and key.endswith(f"/{measure}")]
    task = _settings(folder).get("task")
    return known[0] if known else f"eval/{task.get('name') if isinstance(task, dict) else ''}/{measure}"


def _settings(folder: RunFolder) -> dict[str, Any]:
    settings = read_json(folder, "config.json")
    return settings if isinstance(settings, dict) else {}
