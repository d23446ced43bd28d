"""What the commands share: errors without a traceback, typed paths, consent, progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from poise._lib.imports import quick_imports

if TYPE_CHECKING:
    from rich.status import Status

Settings = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run code that the folder's settings name; docs/security.md says why this asks.")
]

TrustChanged = Annotated[
    bool, typer.Option("--trust-changed", help="Go on although your own code was edited since; it is written down.")
]


def fail(message: object) -> NoReturn:
    """Print what is wrong, without a traceback, and exit with status 1."""
    from poise.runs.console import visible

    print(f"poise: {visible(str(message))}", file=sys.stderr)
    raise typer.Exit(1)


def home(path: Any) -> Any:
    """A callback that expands ``~`` in a path or several: shells leave ``--out=~/x`` as it is."""
    from poise._lib.files import expand

    try:
        if isinstance(path, list):
            return [str(expand(each)) if each.startswith("~") else each for each in path]
        return type(path)(expand(path)) if str(path).startswith("~") else path
    except OSError as error:
        fail(error)


def check_no_comparison(folder: str | Path) -> None:
    """Stop with a message if this is the folder of a comparison, where one of its runs is meant."""
    page = os.path.join(folder, "comparison.html")
    if os.path.isfile(page) and not os.path.exists(os.path.join(folder, "config.json")):
        fail(f"{folder} is the folder of a comparison: open {page}, or name runs in it")


def _model(name: str) -> str:
    """``home``; and the folder of a comparison is refused before anything is loaded."""
    found = str(home(name))
    check_no_comparison(found)
    return found


Model = Annotated[str, typer.Argument(callback=_model, help="A hub id, a model folder, a run folder, or 'embedded'.")]


@contextmanager
def explained() -> Iterator[None]:
    """Print errors that tell the user what to do as they are; any other is a bug and keeps its traceback."""
    from poise.config.documents import ConfigError

    try:
        yield
    except typer.Exit:
        raise
    except (ConfigError, OSError) as error:
        fail(error)
    except Exception as error:
        if isinstance(error, _kinds_that_explain()):
            fail(error)
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _kinds_that_explain() -> tuple[type[Exception], ...]:
    """The errors of the rooms below. They are imported once there is one: most of them need torch."""
    with quick_imports():
        from poise._lib.user_code import UserCodeError
        from poise.models.places import ModelError
        from poise.runs.folder import CheckpointError, DamagedError
        from poise.runs.trackers import TrackerError
        from poise.tasks import RewardError, TaskError
        from poise.tasks.data import DataError
        from poise.training.resume import TrainError
    return (
        ModelError, CheckpointError, DamagedError, DataError, TaskError, RewardError, TrainError, TrackerError,
        UserCodeError,
    )  # fmt: skip


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows progress: one changing line on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with _status("starting") as status:
        yield status.update


def loading(*, quiet: bool = False) -> AbstractContextManager[object]:
    """Say on a terminal that torch and transformers are being imported, which takes seconds; the line goes away."""
    return nullcontext() if quiet or not sys.stderr.isatty() else _status("loading torch and transformers")


def _status(text: str) -> Status:
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False).status(text)


def check_folder_is_free(place: Path, remedy: str) -> None:
    """Stop with a message unless ``place`` is a new or an empty folder, or can be one."""
    if file := next((path for path in place.parents if path.is_file()), None):
        fail(f"{file} is a file, and no folder can be in it: {remedy}")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        fail(f"{place} {'is not empty' if place.is_dir() else 'is a file'}: {remedy}")
