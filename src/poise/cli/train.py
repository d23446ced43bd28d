"""``poise train`` and ``poise compare``."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from poise._lib.imports import quick_imports
from poise.cli.common import Trust, TrustChanged, fail, loading, user_errors
from poise.runs.listing import is_run

if TYPE_CHECKING:
    from poise.training.config.schema import Config

LONGEST_STEP = 1e6  # seconds; a longer one is damage
# A step takes equally long whatever these settings are.
SAME_TIME = ("run", "steps", "budget", "seed", "tracking", "evaluation", "checkpoint_every", "keep_checkpoints")
OTHER_OPTIONS = {"ignore_unknown_options": True}  # ``split_arguments`` refuses them and says how settings are written


def train(
    args: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue a run: --resume DIR; steps=N and budget=N may extend it."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every setting with its value, and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result, no progress.")] = False,
    trust: Trust = False,
    trust_changed: TrustChanged = False,
) -> None:
    """Train a model. Without a recipe, train the demo: poise's own small model, on any laptop.

    RECIPE is the name of a shipped recipe or a YAML file. If you name a model but no recipe, poise uses defaults for
    pretrained models, and you must name the task: `task.name=…` (see `poise tasks`), `data=FILE reward=…`, or
    `environment=file.py:Class`. Without `run=DIR`, the recipe names the folder; if that folder already has a run, this
    one goes to the next free folder, such as `runs/demo-2`.

    Examples:

    - `poise train`
    - `poise train ar model=Qwen/Qwen2.5-0.5B-Instruct task.people=3-5 run=runs/ar`
    - `poise train demo regulator="ar(alpha=0.3) | lopti(threshold=0.5)" seed=1 run=runs/both`
    - `poise train demo algorithm="rltr(transfer=0.5)" budget=2e6 run=runs/rltr`
    - `poise train model=Qwen/Qwen2.5-0.5B-Instruct data=questions.jsonl reward=math run=runs/mine`
    - `poise train model=Qwen/Qwen2.5-0.5B-Instruct task.name=my_tasks.py:Mine run=runs/mine`
    - `poise train --resume runs/ar` (or `--resume run=runs/ar`)
    - `poise train --resume runs/ar steps=200`
    """
    with quick_imports():
        from poise._lib.errors import complain, visible
        from poise._lib.files import expand
        from poise.runs.lock import check_free, free_folder, owned
        from poise.runs.subscribers.console import Console
        from poise.training import config as configs

    recipe, overrides = split_arguments(args or [], resume=resume)
    with user_errors():
        with quick_imports():  # checking a setting may import torch
            config = _resumed(recipe, overrides, trust or trust_changed) if resume else configs.load(recipe, overrides)
        if dry_run:
            settings = configs.dump(config)
            print(visible(settings) if resume else settings)  # the settings of a run folder are untrusted
            print(visible(f"# memory: {_memory(config)}"))
            if hours := _hours(config, resume=resume):
                print(visible(f"# time: {hours}"))
            return
        if not resume:
            if not any(item.partition("=")[0].strip() == "run" for item in overrides):
                config = config.model_copy(update={"run": free_folder(config.run, complain)})
            with owned(expand(config.run), make=False):  # raises an error if the folder is in use
                check_free(expand(config.run))
        with loading(quiet=quiet), quick_imports():
            import poise.trainer
            from poise.runs.subscribers.summary import show

        result = poise.train(
            recipe=config,
            resume=config.run if resume else None,
            quiet=quiet,
            renumber=False,
            trust_changed=trust_changed,
        )
        if quiet:
            show(config, result.summary, Console(0))


def _hours(config: Config, *, resume: bool) -> str:
    """Estimate the time of the steps to train from those in the run's folder; empty if none has these settings."""
    from poise._lib.errors import counted
    from poise._lib.files import expand
    from poise.runs.folder import DamagedError, RunFolder
    from poise.runs.subscribers.console import duration
    from poise.training.config.run_settings import differences

    place = expand(config.run)
    if not is_run(place):
        return ""
    try:
        folder = RunFolder.open(place, resume=False)
        rows, others = folder.metrics(), differences(folder.config, config.model_dump(mode="json"))
    except DamagedError:
        return ""  # training says more about it
    seconds = [row["time/step"] for row in rows if 0 < (row.get("time/step") or 0) < LONGEST_STEP]
    if not seconds or not all(key.startswith(SAME_TIME) for key, _, _ in others):
        return ""
    done, tokens = rows[-1]["step"] or 1, rows[-1].get("tokens/total") or 0
    left = config.steps - (done if resume else 0)
    if config.budget and tokens > 0:
        left = min(left, ceil((config.budget - (tokens if resume else 0)) * done / tokens))
    left, step = max(0, left), median(seconds)
    took = f"a step took {step:.3g} s (median of {len(seconds)} in {config.run})"
    return f"{took}: {counted(left, 'step')} may take {duration(left * step)}, without evaluations and checkpoints"


def _memory(config: Config) -> str:
    """The memory that training needs, for a dry run. A model that is not on this machine is not downloaded."""
    with quick_imports():
        from poise.models.loading import resolve_device
        from poise.models.location import ModelError, locate
        from poise.models.policy import busy_tokens
        from poise.training.memory import footprint

    try:
        here = Path(locate(config.model)).is_dir()
        memory = footprint(config, config.model_name, passes=True) if here else None
    except ModelError as error:
        return str(error)
    if memory is None:
        return "known after the model is downloaded"
    tokens = config.optim.micro_tokens or busy_tokens(resolve_device(config.device), memory.parameters)
    return f"at least {memory}; {memory.passes(tokens)}"


def _resumed(recipe: str | None, overrides: list[str], trust: bool) -> Config:
    """Read the settings of the run to resume. Its folder is ``run=DIR``, or the one argument that is not a setting."""
    from poise.runs.checkpoint_files import CHANGEABLE
    from poise.training.config.documents import split_overrides
    from poise.training.config.run_settings import of_run

    if recipe is not None and any(item.startswith("run=") for item in overrides):
        fail(f"--resume takes its settings from the run folder: remove {recipe}")
    if extra := sorted({item.partition("=")[0].strip() for item in overrides} - CHANGEABLE.keys()):
        fail(f"--resume uses the run's own settings; {extra[0]}= cannot be changed. These can: {', '.join(CHANGEABLE)}")
    changes = split_overrides(overrides)
    changes.setdefault("run", recipe)
    if changes["run"] is None:
        fail("--resume needs a run: poise train --resume DIR (or run=DIR)")
    return of_run(str(changes["run"]), changes, trust=trust)


def split_arguments(args: list[str], *, resume: bool = False) -> tuple[str | None, list[str]]:
    """Split the arguments into a recipe or None, and the settings.

    With ``resume``, the first item is a run folder. The name of a run folder may contain ``=``.
    """
    if unknown := next((arg for arg in args if arg.startswith("-")), None):
        name = unknown.partition("=")[0]
        fail(f"there is no option {name}; settings have no dashes: {name.lstrip('-')}=VALUE")
    recipes = [arg for arg in args if "=" not in arg or (resume and is_run(arg))]
    if resume and len(recipes) > 1:
        fail(f"--resume takes one run and no recipe, got {' and '.join(recipes)}; write: poise train --resume DIR")
    if len(recipes) > 1:
        fail(f"one recipe at a time, got {' and '.join(recipes)}; settings are written key=value")
    return (recipes[0] if recipes else None), [arg for arg in args if arg not in recipes]


def compare(
    args: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and a forecast, and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result, no progress.")] = False,
    trust_changed: TrustChanged = False,
    register: Annotated[
        bool, typer.Option("--register", help="Freeze the plan before its first run, and stop.")
    ] = False,
) -> None:
    """Compare methods over several seeds: train every arm with every seed, in parallel, and test the differences.

    RECIPE is a shipped recipe or a YAML file, as for `poise train`. A setting with several values is an axis, and every
    combination of values is an arm. Separate values by `;` or, in plain settings, by `,`. Put a value that is a list in
    brackets: `optim.betas="[0.9,0.99]; [0.9,0.999]"`. The first arm is the baseline.

    Settings of the comparison:

    - `seeds`: the number of seeds (10: seeds 0 to 9), or a range (20-29)
    - `run`: the folder of the comparison
    - `baseline`: the arm that the others are compared with
    - `tune`: the number of extra seeds that choose each arm's learning rate from the values of `optim.lr`
    - `controls`: `auto` adds arms that may explain a method's gain
    - `measure`: `speed` also measures how fast each arm learns relative to the baseline. The baseline then runs
      `longer`=2 times as many steps, and speeds within `margin` count as equal
    - `jobs`: how many runs train in parallel
    - `threads`: CPU threads of each run (1)
    - `hours`: no run starts after this time
    - `retries`: how often a failed run is repeated (0)
    - `keep`: `models` keeps each run's newest checkpoint (14 to 16 bytes per parameter), `results` keeps none

    After Ctrl-C or a kill, run the same command again to continue; add arms or seeds if you like. No run is repeated.
    docs/compare.md explains what makes a comparison fair.

    Examples:

    - `poise compare demo regulator="grpo; grpo(passes=2); ar; lopti; ar | lopti" seeds=10 run=runs/cmp`
    - `poise compare demo regulator="grpo; ar" optim.lr=5e-5,1e-4,2e-4 tune=3 run=runs/tuned`
    - `poise compare demo regulator="grpo; ar" objective.clip_high=0.2,0.28 baseline="grpo, objective.clip_high=0.2"`
    - `poise compare demo regulator="grpo; lopti" seeds=10 hours=2 --dry-run`
    - `poise compare my-comparison.yaml seeds=20`
    """

    with quick_imports():
        from poise.referee.compare import command

    recipe, overrides = split_arguments(args or [])
    with user_errors():
        code = command.compare(
            recipe, overrides, dry_run=dry_run, quiet=quiet, trust_changed=trust_changed, register=register
        )
    if code:
        raise typer.Exit(code)
