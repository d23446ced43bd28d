"""``poise compare``."""

from __future__ import annotations

from typing import Annotated

import typer

from poise._lib.imports import quick_imports
from poise.cli.common import explained


def compare(
    args: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and a forecast, and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result, no progress.")] = False,
) -> None:
    """Compare methods over several seeds: train every arm with every seed, side by side, and test the differences.

    RECIPE is a shipped recipe or a YAML file, as for `poise train`. A setting with several values is an axis, and axes
    multiply out to arms. `;` separates values; in plain settings `,` does too (a value that is a list is written in
    brackets, `optim.betas="[0.9,0.99]; [0.9,0.999]"`). The first arm is the baseline.

    Settings of the comparison: `seeds` (10: seeds 0 to 9; or 20-29), `run` (its folder), `baseline` (an arm), `tune`
    (so many other seeds choose a learning rate for each arm among those of `optim.lr`), `jobs` (runs side by side),
    `threads` (of a run on a CPU: 1), `hours` (then no more runs are started), `retries` (of a run that fails: 0),
    `keep` (`models`, or only `results`: without checkpoints, of which each takes 14 to 16 bytes for a parameter).

    The same command goes on after Ctrl-C or a kill, and with more arms or seeds; nothing is done twice. docs/compare.md
    says how a comparison is made fair.

    Examples:

    - `poise compare demo regulator="grpo; grpo(passes=2); ar; lopti; ar | lopti" seeds=10 run=runs/cmp`
    - `poise compare demo regulator="grpo; ar" optim.lr=5e-5,1e-4,2e-4 tune=3 run=runs/tuned`
    - `poise compare demo regulator="grpo; ar" objective.clip_high=0.2,0.28 baseline="grpo, objective.clip_high=0.2"`
    - `poise compare demo regulator="grpo; lopti" seeds=10 hours=2 --dry-run`
    - `poise compare my-comparison.yaml seeds=20`
    """
    from poise.cli.train import split_arguments

    with quick_imports():
        from poise.comparison import command

    recipe, overrides = split_arguments(args or [])
    with explained():
        code = command.compare(recipe, overrides, dry_run=dry_run, quiet=quiet)
    if code:
        raise typer.Exit(code)
