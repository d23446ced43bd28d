"""The training curve as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from poise._lib.files import replacing

# Okabe and Ito's colours, which colour-blind readers can distinguish; markers differ too, for black-and-white print.
BLUE = "#0072B2"
HELD_OUT = [("#D55E00", "o"), ("#009E73", "s"), ("#CC79A7", "^"), ("#E69F00", "D"), ("#56B4E9", "v")]

LARGEST = 1e300  # matplotlib cannot draw larger values

Points = list[tuple[float, float]]


def curve(path_png: str | Path, metrics: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plot reward, training accuracy and held-out accuracy by step; ``metrics`` are ``RunFolder.metrics()``.

    Training curves appear raw (faint) and smoothed (bold), held-out points (``eval/…avg@…``) raw.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, parse_math=False)
    left, right = figure.subplots(1, 2)
    _training(left, _points(metrics, "reward/mean"), "training reward")
    _training(right, _points(metrics, "reward/accuracy"), "training accuracy")
    keys = sorted({key for record in metrics for key in record if key.startswith("eval/") and "avg@" in key})
    for i, key in enumerate(keys):
        colour, marker = HELD_OUT[i % len(HELD_OUT)]
        label = "held-out " + key.removeprefix("eval/")
        right.plot(*_xy(_points(metrics, key)), color=colour, marker=marker, markersize=4, linewidth=1.2, label=label)
    for axes, name in ((left, "reward"), (right, "accuracy")):
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if axes.get_legend_handles_labels()[1]:
            for text in axes.legend(frameon=False, fontsize="small").get_texts():
                text.set_parse_math(False)
        else:
            axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color="0.5")
    right.set_ylim(-0.02, 1.02)
    with replacing(Path(path_png)) as file:
        figure.savefig(file, format="png", dpi=150)


def _training(axes: Any, points: Points, label: str) -> None:
    if points:
        axes.plot(*_xy(points), color=BLUE, alpha=0.25, linewidth=1)
        axes.plot(*_xy(smooth(points)), color=BLUE, linewidth=2, label=label)


def smooth(points: Points) -> Points:
    """Centred moving average over about a twentieth of the curve, with shorter windows at the ends."""
    half = len(points) // 40 + (len(points) >= 10)
    values = [y for _, y in points]
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(points))]
    return [(x, sum(window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]


def _points(metrics: Sequence[Mapping[str, Any]], key: str) -> Points:
    """(step, value) wherever ``key`` was measured and finite."""
    pairs: list[tuple[Any, Any]] = [(record["step"], record.get(key)) for record in metrics]
    return [(float(step), float(value)) for step, value in pairs if _drawable(step) and _drawable(value)]


def _drawable(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _xy(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
