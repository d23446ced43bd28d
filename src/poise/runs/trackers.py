"""Trackers: TensorBoard, W&B and trackio. Each package is imported only if the settings name it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from poise._lib.errors import UserError, how_to_install

PROJECT = "poise"  # the project in W&B and trackio
TRACKERS = {  # name: module and a required attribute, because a folder such as wandb/ can be imported too
    "tensorboard": ("torch.utils.tensorboard", "SummaryWriter"),
    "wandb": ("wandb", "init"),
    "trackio": ("trackio", "init"),
}


class TrackerError(UserError, ImportError):
    """A tracker is not installed or cannot be started. The message says what to do."""


@dataclass(frozen=True)
class Tracker:
    """A destination for metrics: ``log(step, metrics)`` after each step, ``close()`` at the end."""

    log: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]

    def on_step(self, result: Any) -> None:
        """Send the metrics of a step (a ``training.steps.StepResult``)."""
        self.log(result.state.step, result.metrics)


def check_trackers(names: Sequence[str]) -> None:
    """Raise TrackerError unless the packages of these trackers can be imported."""
    for name in names:
        _import(name)


@contextmanager
def tracking(
    names: Sequence[str], folder: Path, config: dict[str, Any], *, start_step: int = 0
) -> Iterator[list[Tracker]]:
    """Open the named trackers for the run in ``folder``; close them at the end. A repeated name opens one tracker.

    ``start_step`` is the step after which a resumed run continues. W&B and trackio continue their existing run.
    """
    with ExitStack() as stack:  # closes the open trackers if a later one fails
        trackers = []
        for name in dict.fromkeys(names):
            trackers.append(_open(name, _import(name), folder, config, start_step))
            stack.callback(trackers[-1].close)
        yield trackers


def _open(name: str, package: Any, folder: Path, config: dict[str, Any], start_step: int) -> Tracker:
    try:
        if name == "wandb":
            own = folder / "wandb" / "run-id"
            known = own.read_text().strip() if start_step and own.is_file() else None
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            run = package.init(
                project=project, name=folder.name, id=known, resume="allow", config=config, dir=str(folder)
            )
            own.parent.mkdir(exist_ok=True)
            own.write_text(run.id)
            return Tracker(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)
        if name == "trackio":
            package.init(project=PROJECT, name=folder.name, resume="allow" if start_step else "never", config=config)
            return Tracker(lambda step, metrics: package.log(dict(metrics), step=step), package.finish)
        # A resumed run repeats some steps; purge_step hides the earlier values.
        hidden = start_step + 1 if start_step else None
        writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=hidden)
        writer.add_text("config", f"```\n{json.dumps(config, indent=2, default=str)}\n```")
        return Tracker(
            lambda step, metrics: [writer.add_scalar(key, value, step) for key, value in metrics.items()], writer.close
        )
    except Exception as error:  # each package raises its own errors
        why = f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
        raise TrackerError(f"tracker {name!r} cannot be started ({why}); fix it, or remove tracking=") from error


def _import(name: str) -> Any:
    """Import the package of a tracker."""
    module, needed = TRACKERS[name]
    try:
        package = import_module(module)
    except ImportError as error:
        raise TrackerError(f"tracker {name!r} cannot be imported ({error}); {how_to_install(name)}") from error
    if not hasattr(package, needed):
        raise TrackerError(f"tracker {name!r} is not installed; {how_to_install(name)}")
    return package
