"""Shows a run's progress in a notebook: a live bar and a live curve below the cell.

Bar and curve are plain HTML and PNG, updated in place (``display_id``), so that Jupyter, VS Code and Colab show them
without widgets. Text that the run prints appears below the curve.
"""

from __future__ import annotations

import io
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

PATIENCE = 20  # drawing takes at most 1/20 of the time


class Notebook:
    """The bar and the curve of one run."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._lines: list[dict[str, Any]] = []
        self._drawn = 0  # steps in the drawn curve
        self._next = 0.0  # the earliest time to draw again
        self._bar = display(_bar("", 0.0), raw=True, display_id=True)
        self._curve = display({"text/plain": ""}, raw=True, display_id=True)

    def step(self, step: int, share: float, text: str, metrics: Mapping[str, float | None]) -> None:
        """Show a finished step: the run's progress ``share``, from 0 to 1, and its numbers as text."""
        self._bar.update(_bar(text, share), raw=True)
        self._lines.append({"step": step, **metrics})
        if time.monotonic() >= self._next:
            self._draw()

    def picture(self, path: Path) -> None:
        """Show the finished curve."""
        self._show(path.read_bytes())

    def close(self) -> None:
        """Draw the curve again if it lacks the latest steps."""
        if self._drawn < len(self._lines):
            self._draw()

    def _draw(self) -> None:
        from poise.runs.plots import draw  # imports matplotlib

        start, file = time.monotonic(), io.BytesIO()
        draw(self._lines, "").savefig(file, format="png", dpi=80)
        self._show(file.getvalue())
        self._drawn, self._next = len(self._lines), start + (time.monotonic() - start) * PATIENCE

    def _show(self, png: bytes) -> None:
        self._curve.update({"image/png": b64encode(png).decode("ascii"), "text/plain": "the curve"}, raw=True)


def notebook_display() -> Callable[..., Any] | None:
    """The function that displays objects below the running cell; None outside a notebook."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is None:  # a terminal
        return None
    from IPython.display import display

    show: Callable[..., Any] = display
    return show


def _bar(text: str, share: float) -> dict[str, str]:
    bar = f'<progress value="{share:.4f}" max="1" style="width: 20em"></progress>'
    return {"text/html": f"<div>{bar} <code>{escape(text)}</code></div>", "text/plain": text}
