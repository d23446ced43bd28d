"""What the commands share: errors without a traceback, typed paths, consent, progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

Trust = Annotated[
    bool, typer.Option("--trust", help="Load code of your own that the run folder names: read docs/security.md.")
]


def fail(message: object) -> NoReturn:
    """Say what is wrong, without a traceback, and leave."""
    from poise.runs.console import visible

    print(f"poise: {visible(str(message))}", file=sys.stderr)
    raise typer.Exit(1)


def home(path: Any) -> Any:
    """Typed paths with ``~`` expanded, for ``callback=`` of an option: shells leave ``--out=~/x`` as it is."""
    from poise._lib.files import expand

    try:
        if isinstance(path, list):
            return [str(expand(each)) if each.startswith("~") else each for each in path]
        return type(path)(expand(path)) if str(path).startswith("~") else path
    except OSError as error:
        fail(error)


@contextmanager
def explained() -> Iterator[None]:
    """Errors that say what to do are shown as they are; any other is a bug and keeps its traceback."""
    from poise._lib.user_code import UserCodeError
    from poise.config.schema import ConfigError
    from poise.models.policy import ModelError
    from poise.runs.folder import CheckpointError, DamagedError
    from poise.runs.trackers import TrackerError
    from poise.tasks import RewardError, TaskError
    from poise.trainer import TrainError

    try:
        yield
    except (ConfigError, ModelError, CheckpointError, DamagedError, OSError) as error:
        fail(error)
    except (TaskError, RewardError, TrainError, TrackerError, UserCodeError) as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Something to say where things stand with: a line that changes on a terminal, plain lines elsewhere."""
    from rich.console import Console

    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with Console(stderr=True, markup=False, highlight=False).status("starting") as status:
        yield status.update
