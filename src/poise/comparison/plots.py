"""The forest plot and the curves of a comparison as a PNG, for a README or a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from poise._lib.files import replacing
from poise.runs.plots import COLOURS, MARKERS

LINES = ("-", "--", ":", "-.")
STYLES = [(*each, line) for line in LINES for each in zip(COLOURS, MARKERS, strict=True)]  # colour, marker, line
BELOW = 0.25  # of a row, where the dots of the seeds are
LONGEST = 40  # characters of a name
COLUMNS = 3  # of the legend


def picture(path_png: str | Path, document: Mapping[str, Any]) -> None:
    """Draw the differences to the baseline with their intervals, and the mean curves with bands, both in points."""
    arms: Sequence[Mapping[str, Any]] = document["arms"]
    lines = ceil(len(arms) / COLUMNS)  # of the legend, which would cover the curves if it was beside them
    figure = Figure(figsize=(11, 1.6 + 0.34 * max(6, len(arms)) + 0.22 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _forest(left, document, [(i, arm) for i, arm in enumerate(arms) if arm["difference"]])
    for i, arm in enumerate(arms):
        _curve(right, arm["curve"], *STYLES[i % len(STYLES)], _name(arm))
    right.set_xlabel("step")
    right.set_ylabel("held-out accuracy, points")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if arms:
        shown = right.get_legend_handles_labels()
        legend = figure.legend(*shown, loc="outside lower center", ncols=COLUMNS, frameon=False, fontsize="small")
        for text in legend.get_texts():
            text.set_parse_math(False)
    with replacing(Path(path_png)) as file:
        figure.savefig(file, format="png", dpi=150)


def _forest(axes: Any, document: Mapping[str, Any], rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    for height, (i, arm) in enumerate(rows):
        found, (colour, marker, _) = arm["difference"], STYLES[i % len(STYLES)]
        if found["mean"] is None:
            continue
        seeds = [100 * value for value in found["values"]]
        axes.plot(seeds, [height + BELOW] * len(seeds), ".", color="0.45", ms=6)
        if found["interval"]:
            dashes = "--" if found["method"] == "student" else "-"
            axes.plot([100 * end for end in found["interval"]], [height, height], dashes, color=colour, linewidth=2)
        axes.plot([100 * found["mean"]], [height], marker, color=colour)
    axes.axvline(0, color="0.2", linewidth=1)
    if document["detectable"] is not None:
        for side in (-1, 1):
            axes.axvline(side * 100 * document["detectable"], color="0.6", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), [_name(arm) for _, arm in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"points against {document['baseline'][:LONGEST]}", parse_math=False)


def _curve(axes: Any, curve: Mapping[str, Any], colour: str, marker: str, line: str, label: str) -> None:
    steps, style = curve["steps"], {"color": colour, "marker": marker, "linestyle": line}
    axes.plot(steps, [100 * y for y in curve["mean"]], markersize=4, label=label, **style)
    if steps and None not in curve["low"]:
        low, high = ([100 * y for y in curve[side]] for side in ("low", "high"))
        axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)


def _name(arm: Mapping[str, Any]) -> str:
    name: str = arm["name"].encode("utf-8", "backslashreplace").decode()
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
