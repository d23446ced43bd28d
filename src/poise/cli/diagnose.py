"""``poise diagnose``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poise._lib.imports import quick_imports
from poise.cli.common import Model, Settings, Trust, check_folder_is_free, explained, fail, home, progress

if TYPE_CHECKING:
    from poise.config.schema import Config
    from poise.diagnostics.dominance import Intervals


def diagnose(
    model: Model,
    args: Settings = None,
    regulator: Annotated[
        list[str] | None,
        typer.Option(help="A method to measure; may be repeated. The others are compared with the first."),
    ] = None,
    intervals: Annotated[str, typer.Option(help="Edges between the intervals of probability.")] = "0.25,0.5,0.75",
    batches: Annotated[int, typer.Option(min=1, help="Batches to measure; error bars are over them.")] = 8,
    warmup: Annotated[int, typer.Option(min=1, help="Batches that only feed the optimizer's second moments.")] = 1,
    out: Annotated[
        Path | None, typer.Option(callback=home, help="A new folder for figures, responses and report.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Measure which tokens drive an update of a model, and what each method would change about it. Nothing is trained.

    Settings are those of `poise train`. A run is measured with its own settings; a model with a `warmstart.yaml`, and
    the embedded one, on the task it learned. For any other model, name the task.

    Examples:

    - `poise diagnose embedded`
    - `poise diagnose runs/demo --batches 4`
    - `poise diagnose Qwen/Qwen2.5-0.5B-Instruct task.name=kk task.people=2-3 prompts=16 rollout.max_tokens=512`
    - `poise diagnose embedded --regulator grpo --regulator "ar(alpha=0.3)" --intervals 0.1,0.9`
    """
    with quick_imports():
        from poise.config.run_settings import to_diagnose
        from poise.reports.diagnose import METHODS, table
        from poise.reports.html import write_report
        from poise.runs.console import Console, visible
        from poise.runs.listing import is_run

    with explained():
        cuts = _intervals(intervals)
        config = to_diagnose(model, args or [], trust=trust)
        place = out or (Path(model) / "diagnose" if is_run(model) else Path("runs") / f"diagnose-{Path(model).name}")
        check_folder_is_free(place, "choose another folder with --out")
        measured = _measure(config, model, place, regulator or METHODS, cuts, batches, warmup)
        page = write_report([place], place / "report.html")
    with Console(0) as console:
        console.table(table(measured["mean"], measured["intervals"]))
    print("\n".join(f"- {sentence}" for sentence in measured["verdict"]))
    print(f"cut off at {config.rollout.max_tokens} tokens: {measured['cut_off']} of {measured['responses']} responses")
    print(visible(f"\nfigures: {place / 'diagnose.json'}   report: {page}"))


def _intervals(edges: str) -> Intervals:
    from poise.diagnostics.dominance import Intervals

    try:
        return Intervals.cut([float(edge) for edge in edges.split(",")])
    except ValueError as error:
        fail(f"--intervals {edges}: {error}")


def _measure(
    config: Config, model: str, place: Path, methods: Sequence[str], cuts: Intervals, batches: int, warmup: int
) -> dict[str, Any]:
    """Print the conditions and measure; the folder is removed again if that fails."""
    from poise.config.run_settings import describe_sampling, describe_task
    from poise.models.layers import OutOfMemoryError
    from poise.reports.diagnose import diagnose as run
    from poise.runs.console import visible
    from poise.runs.folder import RunFolder
    from poise.training.update import NotFiniteError

    folder = RunFolder.create(place, config.model_dump(mode="json"))
    print(visible(f"{model} on task {describe_task(config)}, split train:"))
    sampling = describe_sampling(config, config.rollout.temperature)
    print(f"{batches} batches of {config.prompts} problems × {config.group} responses at {sampling}", flush=True)
    try:
        with progress() as say:
            return run(config, folder, methods=methods, intervals=cuts, batches=batches, warmup=warmup, say=say)
    except BaseException as error:
        folder.discard()
        if isinstance(error, ValueError | TypeError | NotFiniteError | OutOfMemoryError):
            fail(error)
        raise
