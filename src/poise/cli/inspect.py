"""``poise runs``, ``poise report``, ``poise tasks`` and ``poise doctor``: they only look."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poise.cli.common import Settings, check_no_comparison, explained, fail, home, progress

if TYPE_CHECKING:
    from poise.runs.listing import Listed


def runs(
    folder: Annotated[Path, typer.Argument(callback=home, help="The folder that holds the runs.")] = Path("runs"),
) -> None:
    """List the runs in a folder and below it, newest first: state, settings, steps, held-out accuracy before → after.

    A run is training, finished, stopped (go on with `poise train --resume DIR`), diverged, or damaged.

    Examples:

    - `poise runs`
    - `poise runs runs/cmp`
    """
    from poise.runs.console import Console, visible
    from poise.runs.listing import find_runs

    if not folder.is_dir():
        fail(f"{folder}: there is no such folder; name the one that holds your runs: poise runs DIR")
    try:
        found = find_runs(folder)
    except OSError as error:
        fail(error)
    if not found:
        print(visible(f"no runs in {folder}; begin one with: poise train {shlex.quote(f'run={folder}/first')}"))
        return
    with Console(0) as console:
        console.table([_row(run) for run in found])


def _row(run: Listed) -> dict[str, Any]:
    return {
        "run": str(run.folder),
        "state": run.state,
        "steps": f"{run.steps}/{run.planned}" if run.planned else str(run.steps),
        "held-out": f"{_share(run.before)} → {_share(run.after)}",
        "model": run.model,
        "task": run.task,
        "regulator": run.regulator,
        "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)),
    }


def _share(accuracy: float | None) -> str:
    return "–" if accuracy is None else f"{accuracy:.3f}"


def list_tasks(context: typer.Context) -> None:
    """List the tasks and their settings."""
    if context.invoked_subcommand is not None:
        return
    from poise import tasks

    rows = [(name, maker, ", ".join(tasks.settings_of(name))) for name, maker in tasks.TASKS.items()]
    rows += [(f"{prefix}/NAME", maker, "those of NAME") for prefix, maker in tasks.PREFIXES.items()]
    width = max(len(name) for name, *_ in rows)
    for name, maker, settings in rows:
        about = (maker.__doc__ or "").strip().partition("\n")[0]
        print(f"{name:{width}s} {about}\n{'':{width}s} settings: {settings}")


def show(
    args: Annotated[list[str] | None, typer.Argument(metavar="[TASK] [KEY=VALUE]...")] = None,
) -> None:
    """Show a problem: its prompt, and the right answer where the task knows it.

    TASK is a name from `poise tasks`, or `file.py:Class`. Settings of the task are written as everywhere else, with
    `task.` in front. `seed` (0) chooses the problem; `split` is `train` or `test`.

    Examples:

    - `poise tasks show kk task.people=4 seed=0`
    - `poise tasks show kk task.people=3 task.phrasing=plain split=test`
    """
    from poise import tasks
    from poise.config.run_settings import task_to_show

    with explained():
        task, seed, split = task_to_show(args or [])
        try:
            (problem,) = tasks.draw(task, split, seed, 1)  # type: ignore[arg-type]
        except ValueError as error:
            fail(error)
        print(f"{problem.id} (difficulty {problem.difficulty}, {split})")
        for message in tasks.begin(task, problem).start():
            print(
                f"\n{message['content']}"
                if message["role"] == "user"
                else f"\n[{message['role']}] {message['content']}"
            )
        if (gold := tasks.gold_answer(task, problem)) is not None:
            print(f"\n--- the right answer\n{gold}")


def verl(
    args: Settings = None,
    config_path: Annotated[Path | None, typer.Option(callback=home, help="A folder with your configurations.")] = None,
    config_name: Annotated[str, typer.Option(help="The configuration in that folder.")] = "ppo_trainer",
) -> None:
    """Check whether verl has loaded poise, which verl does not show; with settings, whether verl can train them.

    Examples:

    - `poise doctor verl`
    - `poise doctor verl trainer.v1.trainer_mode=poise_sync +trainer.v1.poise_sync.regulator=lopti ...`
    - `poise doctor verl --config-path examples/scale --config-name verl-8gpu`
    """
    from poise.integrations import doctor

    if not doctor.verl(print, args or [], config_path, config_name):
        raise typer.Exit(1)


def report(
    runs: Annotated[list[str], typer.Argument(callback=home, help="Run folders; several are compared.")],
    out: Annotated[Path | None, typer.Option(callback=home, help="The file to write; default: report.html.")] = None,
    x: Annotated[str, typer.Option("--x", help="What curves are drawn over: step, tokens or seconds.")] = "step",
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report on this machine and keep it up to date.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --watch; 0: any free port.")] = 0,
) -> None:
    """Write a run, or several side by side, as one HTML file that opens from disk and needs no network.

    `--x` is what curves are drawn over when the page opens; the reader can change it there.

    Examples:

    - `poise report runs/demo`
    - `poise report runs/grpo runs/ar --out comparison.html --x tokens`
    - `poise report --watch runs/demo`
    """
    from poise._lib.errors import unknown
    from poise.reports.html import serve, write_report
    from poise.runs.console import visible
    from poise.runs.metrics_file import AXES

    with explained():
        if x not in AXES:
            fail(unknown("--x", x, AXES))
        for run in map(Path, runs):
            check_no_comparison(run)
        try:
            if watch:
                server = serve(runs, port, x=x)
                print(f"http://127.0.0.1:{server.server_port}  (stop with Ctrl-C)", flush=True)
                with server:
                    server.serve_forever()
                return
            place = _place(runs, out)
            with progress() as say:
                write_report(
                    runs, place, x=x, progress=lambda done, total: say(f"{done:,} of {total:,} responses written")
                )
        except (ValueError, RecursionError) as error:  # poise writes the files of a run whole
            fail(f"a file of the run is damaged: {error}")
    print(visible(f"report: {place}"))


def _place(runs: list[str], out: Path | None) -> Path:
    """The file to write."""
    place = out or (Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html"))
    if out is None and place.is_symlink():  # the author of the run chose its target
        fail(f"{place} is a link to another file: name the file to write with --out")
    if place.is_dir():
        fail(f"--out {place} is a folder: name a file, such as {place / 'report.html'}")
    return place
