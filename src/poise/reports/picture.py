"""The curves of runs as a PNG, with held-out accuracy before and after training at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poise.reports.recorded import read_json, read_metrics
from poise.runs.axes import AXES, x_values
from poise.runs.folder import RunFolder
from poise.runs.plots import curve
from poise.training.results import with_ends


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
    summary, task = read_json(folder, "summary.json"), _settings(folder).get("task")
    after = summary.get("after") if isinstance(summary, dict) else None
    name = str(task.get("name")) if isinstance(task, dict) else ""
    return with_ends(lines, name, read_json(folder, "before.json"), after)


def _settings(folder: RunFolder) -> dict[str, Any]:
    settings = read_json(folder, "config.json")
    return settings if isinstance(settings, dict) else {}
