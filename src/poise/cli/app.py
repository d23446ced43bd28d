"""The command line: a table of commands. Each command is a function in another file of this folder."""

from __future__ import annotations

from typing import Annotated

import typer

from poise import __version__
from poise.cli import inspect, measure, publish, train


def _version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Reinforcement learning with verifiable rewards, token by token."""


def _group(about: str, **settings: bool) -> typer.Typer:
    return typer.Typer(
        help=about,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,  # type: ignore[arg-type]
    )


def build() -> typer.Typer:
    """Build the command-line app."""
    app = _group("Reinforcement learning with verifiable rewards, token by token.", no_args_is_help=True)
    app.callback()(_main)
    app.command("train", context_settings=train.OTHER_OPTIONS)(train.train)
    app.command("compare", context_settings=train.OTHER_OPTIONS)(train.compare)
    app.command("eval")(measure.evaluate)
    app.command("diagnose")(measure.diagnose)
    app.command("report")(inspect.report)
    app.command("runs")(inspect.runs)
    app.command("export")(publish.export)
    app.command("push")(publish.push)
    about_tasks = _group("List the tasks, or show one problem of a task.", invoke_without_command=True)
    about_tasks.callback()(inspect.list_tasks)
    about_tasks.command("show")(inspect.show)
    app.add_typer(about_tasks, name="tasks")
    about_frameworks = _group("Check whether poise works inside verl.", no_args_is_help=True)
    about_frameworks.command("verl")(inspect.verl)
    app.add_typer(about_frameworks, name="doctor")
    return app


app = build()
