"""The commands that show what happened: diagnose, report, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from poise.cli.common import Trust, explained, fail, home, progress


@contextmanager
def _looking() -> Iterator[None]:
    """What a run folder holds was written whole; a file that cannot be read all the same was damaged since."""
    with explained():
        try:
            yield
        except (ValueError, RecursionError) as error:
            fail(f"a file of the run is damaged: {error}")


def diagnose(
    model: Annotated[str, typer.Argument(callback=home, help="A hub id, a model folder, a run folder, or 'embedded'.")],
    args: Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...")] = None,  # noqa: UP045
    task: Annotated[Optional[str], typer.Option(help="The task; of a run: its own.")] = None,  # noqa: UP045
    regulator: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="A method to measure; may be given several times. The first is what others are held against."
        ),
    ] = None,
    intervals: Annotated[str, typer.Option(help="Edges between the intervals of probability.")] = "0.25,0.5,0.75",
    batches: Annotated[int, typer.Option(min=1, help="Batches that are measured; error bars are over them.")] = 2,
    warmup: Annotated[int, typer.Option(min=1, help="Batches that only feed the optimizer's second moments.")] = 1,
    out: Annotated[
        Path | None, typer.Option(callback=home, help="A new folder for figures, responses and report.")
    ] = None,
    trust: Trust = False,
) -> None:
    """See which tokens drive an update of a model, and what each method would change about it. Nothing is trained.

    Settings are those of `poise train`. A run is measured with its own.

    Examples:

    - `poise diagnose embedded --task kk`
    - `poise diagnose runs/demo --batches 4`
    - `poise diagnose Qwen/Qwen2.5-0.5B-Instruct --task kk task.people=2-3 prompts=16 rollout.max_tokens=512`
    - `poise diagnose embedded --regulator grpo --regulator "ar(alpha=0.3)" --intervals 0.1,0.9`
    """
    from poise.config.run_settings import describe_sampling, describe_task, is_run
    from poise.diagnostics.intervals import Intervals
    from poise.models.memory import OutOfMemoryError
    from poise.reports.diagnose import METHODS
    from poise.reports.diagnose import diagnose as run
    from poise.reports.html import write_report
    from poise.runs.console import visible
    from poise.runs.folder import RunFolder
    from poise.training.update import NotFiniteError

    with explained():
        try:
            cuts = Intervals.cut([float(edge) for edge in intervals.split(",")])
        except ValueError as error:
            fail(f"--intervals {intervals}: {error}")
        config = _settings(model, task, args or [], trust)
        place = out or (Path(model) / "diagnose" if is_run(model) else Path("runs") / f"diagnose-{Path(model).name}")
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            why = "is not empty" if place.is_dir() else "is a file"
            fail(f"{place} {why}: choose another folder with --out")
        folder = RunFolder.create(place, config.model_dump(mode="json"))
        print(visible(f"{model} on task {describe_task(config)}, split train:"))
        sampling = describe_sampling(config, config.rollout.temperature)
        print(f"{batches} batches of {config.prompts} problems × {config.group} responses at {sampling}", flush=True)
        try:
            with progress() as say:
                found = run(
                    config,
                    folder,
                    methods=regulator or METHODS,
                    intervals=cuts,
                    batches=batches,
                    warmup=warmup,
                    say=say,
                )
        except BaseException as error:
            folder.discard()
            if isinstance(error, ValueError | TypeError | NotFiniteError | OutOfMemoryError):
                fail(error)
            raise
        page = write_report([place], place / "report.html")
    print("\n".join(f"- {sentence}" for sentence in found["verdict"]))
    print(f"cut off at {config.rollout.max_tokens} tokens: {found['cut_off']} of {found['responses']} responses")
    print(visible(f"\nfigures: {place / 'diagnose.json'}   report: {page}"))


def _settings(model: str, task: str | None, args: list[str], trust: bool) -> Any:
    """The settings of a run; for a model, those of the demo or of the baseline recipe, with small batches."""
    from poise import config as configs
    from poise.config.documents import split_overrides
    from poise.config.run_settings import of_run, run_of
    from poise.runs.folder import RunFolder

    named = [f"task.name={task}"] if task else []
    if (run := run_of(model)) is not None:
        changes, regulated = split_overrides([*named, *args])
        if regulated:
            fail("methods are given with --regulator")
        RunFolder.open(run, resume=False).newest()  # says so where there is none
        return of_run(run, {**changes, "model": model}, trust=trust, regulator=False)
    if model == "embedded":  # within a minute on a laptop
        return configs.load("demo", ["prompts=6", *named, *args])
    small = [f"model={model}", "prompts=8", "rollout.max_tokens=512"]
    return configs.load("grpo", [*small, *named, *args])


def report(
    runs: Annotated[list[str], typer.Argument(callback=home, help="Run folders; several are compared.")],
    out: Annotated[
        Path | None, typer.Option(callback=home, help="The file; by default report.html in the run.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve it on this machine, and keep it up to date.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="For --watch; 0: any that is free.")] = 0,
) -> None:
    """Write a run, or several side by side, as one HTML file that opens from disk and needs no network.

    Examples:

    - `poise report runs/demo`
    - `poise report runs/grpo runs/ar --out comparison.html`
    - `poise report --watch runs/demo`
    """
    from poise.reports.html import serve, write_report
    from poise.runs.console import visible

    with _looking():
        if watch:
            server = serve(runs, port)
            print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
            try:
                server.serve_forever()
            finally:
                server.server_close()
            return
        place = out or (Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html"))
        if out is None and place.is_symlink():  # whoever made the run chose where it leads
            fail(f"{place} is a link to another file: name the file to write with --out")
        if place.is_dir():
            fail(f"--out {place} is a folder: name a file, such as {place / 'report.html'}")
        with progress() as say:
            write_report(runs, place, progress=lambda done, total: say(f"{done:,} of {total:,} responses written"))
    print(visible(f"report: {place}"))


def tokens(
    run: Annotated[str, typer.Argument(callback=home, help="A run folder.")],
    step: Annotated[Optional[int], typer.Option(help="A recorded step; by default the last.")] = None,  # noqa: UP045
    by: Annotated[
        str, typer.Option(help="probability, weight, advantage, gradient, entropy, nthr or change.")
    ] = "weight",
    response: Annotated[int, typer.Option(min=0, help="Which response of the step, the first being 0.")] = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="How many responses from there on.")] = 1,
    top: Annotated[int, typer.Option(min=0, help="List so many tokens with the most extreme values.")] = 8,
) -> None:
    """Show responses token by token, shaded by weight, probability and so on.

    Examples:

    - `poise tokens runs/demo --step 10 --by weight`
    - `poise tokens runs/demo --by gradient --response 5 --n 3`
    """
    from rich.console import Console as Rich

    from poise._lib.errors import unknown
    from poise.reports.recorded import read_step
    from poise.reports.terminal import available, extremes, shaded
    from poise.runs.console import Console, visible
    from poise.runs.folder import RunFolder

    with _looking():
        folder = RunFolder.open(run, resume=False)
        steps = [s for s in folder.recorded() if folder.tokens_path(s).exists()]
        if not steps:
            fail(f"{run} has no recorded tokens; train with rollouts_every=10, say")
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            fail(f"step {chosen} was not recorded; recorded are {', '.join(map(str, steps))}")
        records, arrays, texts = read_step(folder, chosen)
        if by not in available(arrays):
            fail(unknown("shading", by, available(arrays)))
        rich = Rich(markup=False, highlight=False, emoji=False)
        if response >= len(records):
            fail(f"--response {response}: step {chosen} has {len(records)} responses, from 0 on")
        for i in range(response, min(response + n, len(records))):
            record, (begin, end) = records[i], arrays["start"][i : i + 2].tolist()
            one = {name: values[begin:end] for name, values in arrays.items() if name != "start"}
            verdict = "correct" if record["correct"] else "wrong"
            verdict += "" if record.get("finished", True) else ", cut off"
            rich.print(f"step {chosen}, response {i}: {verdict}, reward {record['reward']}; shaded by {by}")
            rich.print(visible(record["prompt"]), style="dim")
            rich.print(shaded(one, texts, by, record.get("environment", [])))
            with Console(0) as console:
                console.table(extremes(one, texts, by, top))
