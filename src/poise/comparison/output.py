"""Writes the results of a comparison: ``comparison.json``, two tables as CSV, a page, a picture, and the terminal.

comparison.json  everything
comparison.csv   one row for each arm
runs.csv         one row for each run that is compared
comparison.html  the page; it opens from disk and needs no network
comparison.png   the forest plot and the curves
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from poise._lib.files import dumps, replacing
from poise.comparison.analysis import Document, points, signed
from poise.comparison.arms import shown_rate
from poise.comparison.plots import picture
from poise.comparison.results import Arm
from poise.reports.html.page import data_element, frame
from poise.runs.console import Console
from poise.training.accuracy import LOST

Row = dict[str, Any]
SCRIPTS = ("draw.js", "comparison.js")


def write(folder: str | Path, document: Document, arms: Sequence[Arm]) -> None:
    """Write all files of the results into the comparison's folder. ``document`` is that of ``analyse(arms, …)``."""
    folder = Path(folder)
    with replacing(folder / "comparison.json") as file:
        file.write(dumps(document, indent=1))
    _write_csv(folder / "comparison.csv", [_arm_row(arm, document["baseline"]) for arm in document["arms"]])
    _write_csv(folder / "runs.csv", [row for arm in arms for row in _run_rows(arm)])
    write_page(folder / "comparison.html", document)
    picture(folder / "comparison.png", document)


def write_page(path: str | Path, document: Document) -> None:
    """Write the page of a comparison."""
    top, bottom = frame(live=False, scripts=SCRIPTS)
    with replacing(Path(path)) as file:
        file.write(top.encode() + data_element(document) + bottom.encode())


def show(document: Document, console: Console) -> None:
    """Print the results as a table, and the verdict. The page and the CSV have costs too."""
    console.table([_shown(arm) for arm in document["arms"]])
    for sentence in document["verdict"]:
        console.note(sentence)


def _shown(arm: Mapping[str, Any]) -> Row:
    found, greedy = arm["difference"], arm["scores"].get("greedy")
    return {
        "arm": arm["name"],
        "seeds": len(arm["seeds"]),
        "accuracy": _with_interval(arm["accuracy"], arm["interval"], points),
        "difference": "baseline" if found is None else _with_interval(found["mean"], found["interval"], signed),
        "p": "" if found is None else "–" if found["mean"] is None else f"{found['p_adjusted']:.2g}",
        "greedy": "–" if greedy is None else points(greedy["mean"]),
        **{f"{name.replace('_', ' ')}, %": _before_and_after(arm["scores"].get(name)) for name in LOST},
    }


def _before_and_after(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "–"
    return " → ".join("–" if score[when] is None else points(score[when]) for when in ("before", "mean"))


def _with_interval(value: float | None, interval: Sequence[float] | None, text: Callable[[float], str]) -> str:
    if value is None:
        return "–"
    return text(value) + (f" [{text(interval[0])}, {text(interval[1])}]" if interval else "")


def _arm_row(arm: Mapping[str, Any], baseline: str) -> Row:
    found: Mapping[str, Any] = arm["difference"] or {}
    low, high = arm["interval"] or (None, None)
    difference_low, difference_high = found.get("interval") or (None, None)
    return {
        "arm": arm["name"],
        **_settings(arm["settings"]),
        "baseline": baseline,
        "seeds": len(arm["seeds"]),
        "missing": len(arm["missing"]),
        "diverged": len(arm["diverged"]),
        "accuracy": arm["accuracy"],
        "accuracy_low": low,
        "accuracy_high": high,
        "difference": found.get("mean"),
        "difference_low": difference_low,
        "difference_high": difference_high,
        "interval_by": found.get("method"),
        "p": found.get("p"),
        "p_adjusted": found.get("p_adjusted"),
        "detectable": found.get("detectable"),
        **{name: score["mean"] for name, score in arm["scores"].items()},
        **{f"{name}_before": arm["scores"][name]["before"] for name in LOST if name in arm["scores"]},
        "collapsed": arm["stability"]["collapsed"],
        **arm["cost"],
    }


def _settings(settings: Mapping[str, Any]) -> Row:
    """With a prefix, since a setting such as ``steps`` has the name of a result. A chosen rate is as it was typed."""
    shown = {key: shown_rate(value) if isinstance(value, float) else value for key, value in settings.items()}
    return {f"settings.{key}": value for key, value in shown.items()}


def _run_rows(arm: Arm) -> list[Row]:
    return [
        {
            "arm": arm.name,
            **_settings(arm.settings),
            "seed": seed,
            "state": run.state,
            "steps": run.steps,
            **run.scores,
            **asdict(run.cost),
            "folder": run.folder,
        }
        for seed, run in sorted(arm.runs.items())
    ]


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode("utf-8", "backslashreplace"))
