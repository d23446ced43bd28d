"""``poise reference``."""

from __future__ import annotations

from typing import Annotated

import typer

from poise.cli.common import fail


def reference(
    name: Annotated[str | None, typer.Argument(help="A setting, a metric, or a part of the name of several.")] = None,
) -> None:
    """Explain settings and metrics: meaning, type, default, and the module where they act.

    Without NAME it prints all of them as Markdown, the page docs/reference.md.

    Examples:

    - `poise reference optim.lr`
    - `poise reference reward/no_spread`
    - `poise reference evaluation`
    """
    from poise.reports import reference as made

    if name is None:
        print(made.page(), end="")
        return
    found = made.entries(name)
    if not found:
        fail(made.missing(name))
    print("\n\n".join(found))
