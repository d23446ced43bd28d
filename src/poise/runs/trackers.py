"""Trackers: TensorBoard, W&B and trackio. Each is imported only if the settings name it.

The API that poise uses of each, so that a change on their side is easy to find:

- TensorBoard: ``torch.utils.tensorboard.SummaryWriter(log_dir, purge_step=)``; ``add_scalar``, ``add_text``, ``close``
- W&B: ``wandb.init(project=, config=, dir=)``, which returns a run; ``run.log(metrics, step=)``, ``run.finish()``
- trackio: ``trackio.init(project=, config=)``, ``trackio.log(metrics, step=)``, ``trackio.finish()``
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from poise._lib.errors import how_to_install, unknown

PROJECT = "poise"
PACKAGES = {  # module, and what it must have: a folder of its name, such as wandb/, can be imported too
    "tensorboard": ("torch.utils.tensorboard", "SummaryWriter"),
    "wandb": ("wandb", "init"),
    "trackio": ("trackio", "init"),
}


class TrackerError(ImportError):
    """A tracker is not installed. The message says how to install it."""


class Tracker(Protocol):
    """A destination for metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""

    def close(self) -> None:
        """Finish writing; no ``log`` follows."""


class TensorBoard:
    """Event files in ``tensorboard/`` of the run folder: ``tensorboard --logdir RUN``."""

    def __init__(self, folder: Path, config: dict[str, Any], start_step: int) -> None:
        writer = _import("tensorboard").SummaryWriter
        # A resumed run repeats some steps: hide their earlier values.
        self._writer = writer(str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else None)
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=2, default=str)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out and close the event file."""
        self._writer.close()


class WandB:
    """A run of the W&B project "poise"; its local files go to ``wandb/`` of the run folder."""

    def __init__(self, folder: Path, config: dict[str, Any], start_step: int) -> None:  # noqa: ARG002
        self._run = _import("wandb").init(project=PROJECT, config=config, dir=str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of history."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload the rest and finish the run."""
        self._run.finish()


class Trackio:
    """A run of the trackio project "poise". Trackio keeps its own data folder."""

    def __init__(self, folder: Path, config: dict[str, Any], start_step: int) -> None:  # noqa: ARG002
        self._trackio = _import("trackio")
        self._trackio.init(project=PROJECT, config=config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of history."""
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


TRACKERS: dict[str, Callable[[Path, dict[str, Any], int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise TrackerError unless the packages of these trackers can be imported."""
    for name in names:
        _import(name)


def open_trackers(names: Sequence[str], folder: Path, config: dict[str, Any], *, start_step: int = 0) -> list[Tracker]:
    """Open the trackers of these names for the run in ``folder``; a name given twice is opened once.

    ``start_step`` is the step that a resumed run continues from. W&B and trackio show a resumed run as a new one.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(unknown("tracker", str(name), TRACKERS))
    opened: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            opened.append(TRACKERS[name](folder, config, start_step))
    except BaseException as error:
        for tracker in opened:
            tracker.close()
        if isinstance(error, Exception) and not isinstance(error, TrackerError):  # each has errors of its own
            why = f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
            raise TrackerError(
                f"tracker {name!r} cannot be started ({why}); mend it, or leave tracking= out"
            ) from error
        raise
    return opened


def _import(name: str) -> Any:
    """The package of a tracker."""
    module, needed = PACKAGES[name]
    try:
        package = import_module(module)
    except ImportError as error:
        raise TrackerError(f"tracker {name!r} cannot be imported ({error}); {how_to_install(name)}") from error
    if not hasattr(package, needed):
        raise TrackerError(f"tracker {name!r} is not installed; {how_to_install(name)}")
    return package
