"""Functions and options that the commands share: errors without a traceback, paths, consent, progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.status import Status

Settings = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the code that the folder's settings name; docs/security.md explains the risk."),
]

TrustChanged = Annotated[
    bool, typer.Option("--trust-changed", help="Continue even if your own code has changed, and record the change.")
]


def fail(message: object) -> NoReturn:
    """Print an error without a traceback, and exit with status 1."""
    from poise._lib.errors import visible

    print(f"poise: {visible(str(message))}", file=sys.stderr)
    raise typer.Exit(1)


def home(path: Any) -> Any:
    """Expand ``~`` in one path or several, as a typer callback: shells do not expand ``--out=~/x``."""
    from poise._lib.files import expand

    try:
        if isinstance(path, list):
            return [str(expand(each)) if each.startswith("~") else each for each in path]
        return type(path)(expand(path)) if str(path).startswith("~") else path
    except OSError as error:
        fail(error)


def check_no_comparison(folder: str | Path) -> None:
    """Exit with an error if ``folder`` holds a comparison, not a run."""
    from poise.runs.listing import is_comparison

    place, page = Path(folder), Path(folder) / "comparison.html"
    if (page.is_file() or is_comparison(place)) and not (place / "config.json").exists():
        name = "name one of its runs"
        fail(f"{folder} holds a comparison, not a run: {f'open {page}, or {name}' if page.is_file() else name}")


def _model(name: str) -> str:
    """Expand ``~``, and reject the folder of a comparison before anything is loaded."""
    path = str(home(name))
    check_no_comparison(path)
    return path


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        callback=_model,
        help="A hub id, a model folder, a run folder, 'embedded' or 'embedded-plain'.",
    ),
]


@contextmanager
def user_errors() -> Iterator[None]:
    """Print ``UserError`` and ``OSError`` without a traceback. Any other error is a bug and keeps its traceback."""
    from poise._lib.errors import UserError

    try:
        yield
    except (UserError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress: one changing line on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with _status("starting") as status:
        yield status.update


def loading(*, quiet: bool = False) -> AbstractContextManager[object]:
    """On a terminal, show a status line while torch and transformers are imported, which takes seconds."""
    return nullcontext() if quiet or not sys.stderr.isatty() else _status("loading torch and transformers")


def _status(text: str) -> Status:
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False).status(text)
