"""Writes the results of a comparison to its folder, and prints them.

comparison.json  all results
comparison.csv   one row per arm
runs.csv         one row per run
comparison.html  the page, which opens from disk and needs no network
comparison.png   the forest plot and the curves
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from poise._lib.files import dumps, replacing
from poise.referee.compare.arms import rate_text
from poise.referee.compare.results import Arm
from poise.referee.compare.verdict import points, signed
from poise.referee.report.html.page import data_element, frame
from poise.runs.plots import COLOURS, MARKERS, labelled
from poise.runs.subscribers.console import Console
from poise.training.accuracy import LOST
from poise.training.config.documents import Document

Row = dict[str, Any]
SCRIPTS = ("draw.js", "comparison.js")
LINES = ("-", "--", ":", "-.")
STYLES = [(*each, line) for line in LINES for each in zip(COLOURS, MARKERS, strict=True)]  # colour, marker, line
BELOW = 0.25  # the offset of the seeds' dots, in rows
LONGEST = 40  # the most characters of an arm's name
COLUMNS = 3  # columns of the legend


def write(folder: Path, document: Document, arms: Sequence[Arm]) -> None:
    """Write all result files into the comparison's folder. ``document`` is the result of ``analyse(arms, …)``."""
    with replacing(folder / "comparison.json") as file:
        file.write(dumps(document, indent=1))
    rows = [(arm, False) for arm in document["arms"]] + [(arm, True) for arm in document.get("exploratory", ())]
    _write_csv(folder / "comparison.csv", [_arm_row(arm, document["baseline"], later) for arm, later in rows])
    _write_csv(folder / "runs.csv", [row for arm in arms for row in _run_rows(arm)])
    write_page(folder / "comparison.html", document)
    picture(folder / "comparison.png", document)


def write_page(path: Path, document: Document) -> None:
    """Write the page of a comparison."""
    top, bottom = frame(live=False, scripts=SCRIPTS)
    with replacing(path) as file:
        file.write(top.encode() + data_element(document) + bottom.encode())


def show(document: Document, console: Console) -> None:
    """Print a table of results and the verdict. The costs are only on the page and in the CSV file."""
    later = [{**arm, "name": f"{arm['name']} (exploratory)"} for arm in document.get("exploratory", ())]
    rows = [_table_row(arm, speed=document["cut"] is not None) for arm in (*document["arms"], *later)]
    if document.get("settings", {}).get("evaluation", {}).get("temperature") == 0:
        rows = [{key: value for key, value in row.items() if key != "greedy"} for row in rows]  # same as accuracy
    console.table(rows)
    for sentence in document["verdict"]:
        console.note(sentence)


def _table_row(arm: Mapping[str, Any], *, speed: bool) -> Row:
    result, greedy, faster = arm["difference"], arm["scores"].get("greedy"), arm["speed"]
    return {
        "arm": arm["name"] + (" (control)" if arm["control"] else ""),
        "seeds": len(arm["seeds"]),
        "accuracy": _with_interval(arm["accuracy"], arm["interval"], points),
        "difference": "baseline" if result is None else _with_interval(result["mean"], result["interval"], signed),
        "p": _p(result),
        **({"speed": "1" if faster is None else faster["text"], "p (speed)": _p(faster)} if speed else {}),
        "greedy": "–" if greedy is None else points(greedy["mean"]),
        **{f"{name.replace('_', ' ')}, %": _before_and_after(arm["scores"].get(name)) for name in LOST},
    }


def _p(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    return "–" if result["mean"] is None or result["p_adjusted"] is None else f"{result['p_adjusted']:.2g}"


def _before_and_after(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "–"
    return " → ".join("–" if score[when] is None else points(score[when]) for when in ("before", "mean"))


def _with_interval(value: float | None, interval: Sequence[float] | None, text: Callable[[float], str]) -> str:
    if value is None:
        return "–"
    return text(value) + (f" [{text(interval[0])}, {text(interval[1])}]" if interval else "")


def _arm_row(arm: Mapping[str, Any], baseline: str, exploratory: bool) -> Row:
    result: Mapping[str, Any] = arm["difference"] or {}
    speed: Mapping[str, Any] = arm["speed"] or {}
    return {
        "arm": arm["name"],
        **_settings(arm["settings"]),
        "baseline": baseline,
        "control": arm["control"],
        "exploratory": exploratory,
        "seeds": len(arm["seeds"]),
        "missing": len(arm["missing"]),
        "diverged": len(arm["diverged"]),
        **_with_ends("accuracy", arm["accuracy"], arm["interval"]),
        **_with_ends("difference", result.get("mean"), result.get("interval")),
        "interval_by": result.get("method"),
        **{key: result.get(key) for key in ("p", "p_adjusted", "detectable")},
        **_with_ends("speed", speed.get("mean"), speed.get("interval")),
        "speed_beyond": len(speed.get("beyond", ())),
        **{f"speed_{key}": speed.get(key) for key in ("p", "p_adjusted")},
        **{name: score["mean"] for name, score in arm["scores"].items()},
        **{f"{name}_before": arm["scores"][name]["before"] for name in LOST if name in arm["scores"]},
        "collapsed": arm["stability"]["collapsed"],
        **arm["cost"],
    }


def _with_ends(name: str, value: float | None, interval: Sequence[float] | None) -> Row:
    low, high = interval or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _settings(settings: Mapping[str, Any]) -> Row:
    """The settings as CSV columns. The prefix separates a setting such as ``steps`` from a result of that name."""
    texts = {key: rate_text(value) if isinstance(value, float) else value for key, value in settings.items()}
    return {f"settings.{key}": value for key, value in texts.items()}


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


def picture(path: Path, document: Mapping[str, Any]) -> None:
    """Plot the differences to the baseline with intervals, and the mean curves with bands, in percentage points."""
    arms: Sequence[Mapping[str, Any]] = document["arms"]
    lines = ceil(len(arms) / COLUMNS)  # lines of the legend, which is below the curves
    figure = Figure(figsize=(11, 1.6 + 0.34 * max(6, len(arms)) + 0.22 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _forest(left, document, [(i, arm) for i, arm in enumerate(arms) if arm["difference"]])
    for i, arm in enumerate(arms):
        _curve(right, arm["curve"], *STYLES[i % len(STYLES)], _name(arm))
    if document["cut"] is not None:
        right.axvline(document["cut"], color="0.6", linewidth=1, linestyle=":")
    labelled(left, f"points against {document['baseline'][:LONGEST]}")
    labelled(right, "step", "held-out accuracy, points")
    if arms:
        handles = right.get_legend_handles_labels()
        legend = figure.legend(*handles, loc="outside lower center", ncols=COLUMNS, frameon=False, fontsize="small")
        for text in legend.get_texts():
            text.set_parse_math(False)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def _forest(axes: Any, document: Mapping[str, Any], rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    for height, (i, arm) in enumerate(rows):
        result, (colour, marker, _) = arm["difference"], STYLES[i % len(STYLES)]
        if result["mean"] is None:
            continue
        seeds = [100 * value for value in result["values"]]
        axes.plot(seeds, [height + BELOW] * len(seeds), ".", color="0.45", ms=6)
        if result["interval"]:
            dashes = "--" if result["method"] == "student" else "-"
            axes.plot([100 * end for end in result["interval"]], [height, height], dashes, color=colour, linewidth=2)
        axes.plot([100 * result["mean"]], [height], marker, color=colour)
    axes.axvline(0, color="0.2", linewidth=1)
    if document["detectable"] is not None:
        for side in (-1, 1):
            axes.axvline(side * 100 * document["detectable"], color="0.6", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), [_name(arm) for _, arm in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _curve(axes: Any, curve: Mapping[str, Any], colour: str, marker: str, line: str, label: str) -> None:
    steps, style = curve["steps"], {"color": colour, "marker": marker, "linestyle": line}
    axes.plot(steps, [100 * y for y in curve["mean"]], markersize=4, label=label, **style)
    if steps and None not in curve["low"]:
        low, high = ([100 * y for y in curve[side]] for side in ("low", "high"))
        axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)


def _name(arm: Mapping[str, Any]) -> str:
    name: str = arm["name"].encode("utf-8", "backslashreplace").decode()
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
