"""Draws training curves as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from poise._lib.files import replacing
from poise.runs.axes import AXES, drawable, x_values

# Okabe and Ito's colours, which colour-blind readers can distinguish; markers differ too, for black-and-white print.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255"]  # the last: Tol's
MARKERS = "os^DvPX*"

Metrics = Sequence[Mapping[str, Any]]  # RunFolder.metrics()
Points = list[tuple[float, float]]


def curve(path: Path, metrics: Metrics, title: str, x: str = "step") -> None:
    """Draw a run's curves and write them to a PNG file."""
    with replacing(path) as file:
        draw(metrics, title, x).savefig(file, format="png", dpi=150)


def draw(metrics: Metrics, title: str, x: str = "step") -> Figure:
    """Plot reward, training accuracy and held-out accuracy of a run over steps, sampled tokens or seconds.

    Training curves appear raw (faint) and smoothed (bold); held-out accuracy (``eval/…avg@…``) appears raw.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, parse_math=False)
    left, right = figure.subplots(1, 2)
    _training(left, _points(metrics, "reward/mean", x), "training reward")
    _training(right, _points(metrics, "reward/accuracy", x), "training accuracy")
    keys = sorted({key for record in metrics for key in record if key.startswith("eval/") and "avg@" in key})
    for i, key in enumerate(keys):
        style = {"color": COLOURS[(i + 1) % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        label = "held-out " + key.removeprefix("eval/")
        right.plot(*_xy(_points(metrics, key, x)), label=label, markersize=4, linewidth=1.2, **style)
    for axes, quantity in ((left, "reward"), (right, "accuracy")):
        labelled(axes, AXES[x], quantity)
        _finish(axes)
    right.set_ylim(-0.02, 1.02)
    return figure


def labelled(axes: Any, x: str, y: str = "") -> None:
    """Label the axes, and draw a faint grid."""
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _finish(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if axes.get_legend_handles_labels()[1]:
        for text in axes.legend(frameon=False, fontsize="small").get_texts():
            text.set_parse_math(False)
    else:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color="0.5")


def _training(axes: Any, points: Points, label: str) -> None:
    if points:
        axes.plot(*_xy(points), color=COLOURS[0], alpha=0.25, linewidth=1)
        axes.plot(*_xy(smooth(points)), color=COLOURS[0], linewidth=2, label=label)


def smooth(points: Points) -> Points:
    """Return the centred moving average over about 1/20 of the curve, with shorter windows at the ends."""
    half = len(points) // 40 + (len(points) >= 10)
    values = [y for _, y in points]
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(points))]
    return [(x, sum(window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]


def _points(metrics: Metrics, key: str, x: str) -> Points:
    """The points (x, value) of the records where ``key`` is finite."""
    pairs = zip(x_values(metrics, x) or [], (record.get(key) for record in metrics), strict=False)
    return [(float(at), float(value)) for at, value in pairs if drawable(at) and drawable(value)]


def _xy(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
