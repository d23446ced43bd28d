"""``poise runs``, ``poise report``, ``poise tasks`` and ``poise doctor``: no command here changes a run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from poise._lib.imports import quick_imports
from poise.cli.common import Settings, check_no_comparison, fail, home, progress, user_errors

if TYPE_CHECKING:
    from poise.runs.listing import Listed
    from poise.tasks import Episode
    from poise.training.config.schema import Config


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", callback=home, help="The folder with the runs.")] = Path(
        "runs"
    ),
) -> None:
    """List the runs in a folder and below it, newest first: state, settings, steps, held-out accuracy before → after.

    A run is training, finished, stopped (continue with `poise train --resume DIR`), diverged, or damaged. *(edited)*
    means that the run's before.json or summary.json was changed after the run wrote it.

    Examples:

    - `poise runs`
    - `poise runs runs/cmp`
    """
    from poise._lib.errors import visible
    from poise.runs.listing import find_runs
    from poise.runs.subscribers.console import Console

    if not folder.is_dir():
        fail(f"{folder}: there is no such folder; name the folder with your runs: poise runs DIR")
    with user_errors():
        listing = find_runs(folder)
    if not listing:
        print(visible(f"no runs in {folder}; start one with: poise train {shlex.quote(f'run={folder}/first')}"))
        return
    with Console(0) as console:
        console.table([_row(run) for run in listing])


def _row(run: Listed) -> dict[str, Any]:
    return {
        "run": str(run.folder),
        "state": run.state,
        "steps": f"{run.steps}/{run.planned}" if run.planned else str(run.steps),
        "held-out": f"{_share(run.before)} → {_share(run.after)}{' (edited)' if run.edited else ''}",
        **run.settings,
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
    rows += [(f"{prefix}/NAME", maker, "the settings of NAME") for prefix, maker in tasks.PREFIXES.items()]
    width = max(len(name) for name, *_ in rows)
    for name, maker, settings in rows:
        about = (maker.__doc__ or "").strip().partition("\n")[0]
        print(f"{name:{width}s} {about}\n{'':{width}s} settings: {settings}")


def show(
    args: Annotated[list[str] | None, typer.Argument(metavar="[TASK] [KEY=VALUE]...")] = None,
) -> None:
    """Show a problem: its prompt, and the right answer if the task knows it.

    TASK is a name from `poise tasks`, or `file.py:Class`. Task settings begin with `task.`, as everywhere.
    `seed` (0) chooses the problem; `split` is `train` or `test`. With `model=`, show the prompt exactly as the
    model reads it: with chat template, system message, tools, `task.prefill` and control tokens.

    Examples:

    - `poise tasks show kk task.people=4 seed=0`
    - `poise tasks show kk task.people=3 task.phrasing=plain split=test`
    - `poise tasks show kk model=embedded "task.prefill=<think>"`
    """
    from poise import tasks
    from poise._lib.errors import visible
    from poise.training.config.run_settings import task_to_show

    with user_errors():
        config, split = task_to_show(args or [])
        task = config.task.build()
        try:
            (problem,) = tasks.draw(task, split, config.seed, 1)  # type: ignore[arg-type]
        except ValueError as error:
            fail(error)
        print(f"{problem.id} (difficulty {problem.difficulty}, {split})")
        episode = tasks.begin(task, problem)
        if "model" in config.model_fields_set:
            print(f"\n{visible(_read_by_model(config, episode))}")
        else:
            for message in episode.start():
                role = "" if message["role"] == "user" else f"[{message['role']}] "
                print(f"\n{role}{message['content']}")
        if (gold := tasks.gold_answer(task, problem)) is not None:
            print(f"\n--- the right answer\n{gold}")


def _read_by_model(config: Config, episode: Episode) -> str:
    """Decode the token ids that the model reads as the episode's prompt, and mark where its reply begins."""
    from poise._lib.errors import counted
    from poise.models.loading import load_tokenizer
    from poise.models.prompts import encode, encode_prefill, opened, tools_of

    tokenizer, ends = load_tokenizer(config.model_name, remote_code=config.remote_code, template=config.template)
    prefill = config.task.prefill
    ids = [*encode(tokenizer, episode.start(), ends, tools_of(episode)), *encode_prefill(tokenizer, prefill)]
    controls = [token for token in dict.fromkeys(ids) if token in tokenizer.all_special_ids or token in ends]
    names = ", ".join(f"{tokenizer.decode([token])} × {ids.count(token)}" for token in controls) or "none"
    begun = (opened(tokenizer) + prefill).strip()
    scored = f"; the scored reply begins with {begun}" if begun else ""
    return (
        f"--- what {config.model} reads ({counted(len(ids), 'token')}; control tokens: {names})\n"
        f"{tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)}"
        f"▶ the model writes from here{scored}"
    )


def verl(
    args: Settings = None,
    config_path: Annotated[Path | None, typer.Option(callback=home, help="A folder with your configurations.")] = None,
    config_name: Annotated[str, typer.Option(help="The name of a configuration in that folder.")] = "ppo_trainer",
) -> None:
    """Check whether verl has loaded poise, and, if you pass settings, whether poise can train with them.

    Examples:

    - `poise doctor verl`
    - `poise doctor verl trainer.v1.trainer_mode=poise_sync +trainer.v1.poise_sync.regulator=lopti ...`
    - `poise doctor verl --config-path examples/scale --config-name verl-8gpu`
    """
    from poise.integrations import doctor

    if not doctor.verl(print, args or [], config_path, config_name):
        raise typer.Exit(1)


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", callback=home, help="Run folders or token files; several appear side by side."),
    ],
    out: Annotated[Path | None, typer.Option(callback=home, help="The file to write; default: report.html.")] = None,
    x: Annotated[Literal["step", "tokens", "seconds"], typer.Option("--x", help="The x axis of the curves.")] = "step",
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report on this machine and keep it up to date.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --watch; 0: any free port.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(callback=home, help="The model whose tokenizer decodes a token file.")
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or several side by side. It opens from disk and needs no network.

    `--x` is the x axis of the curves when the page opens; the reader can change it. A token file, or a folder of
    token files, records a run of another trainer: TRL or verl with poise's `export`, or prime-rl's token exports.

    Examples:

    - `poise report runs/demo`
    - `poise report runs/grpo runs/ar --out comparison.html --x tokens`
    - `poise report --watch runs/demo`
    - `poise report tokens.jsonl`
    - `poise report outputs/token_exports --tokenizer Qwen/Qwen3-0.6B`
    """
    from poise._lib.errors import visible
    from poise.referee.report.html import serve, write_report

    with user_errors():
        for run in map(Path, runs):
            check_no_comparison(run)
        try:
            decode = _decode(tokenizer)
            if watch:
                server = serve(runs, port, x=x, decode=decode)
                print(f"http://127.0.0.1:{server.server_port}  (stop with Ctrl-C)", flush=True)
                with server:
                    server.serve_forever()
                return
            place = _place(runs, out)
            with progress() as say:
                write_report(
                    *(runs, place),
                    x=x,
                    progress=lambda done, total: say(f"{done:,} of {total:,} responses written"),
                    decode=decode,
                )
        except (ValueError, RecursionError) as error:  # poise writes only complete files, so a file was changed
            fail(f"a file of the run is damaged: {error}")
    print(visible(f"report: {place}"))


def _decode(tokenizer: str | None) -> Callable[[list[int]], str] | None:
    if tokenizer is None:
        return None
    with quick_imports():
        from poise.models.loading import load_tokenizer

    return load_tokenizer(tokenizer)[0].decode  # type: ignore[no-any-return]


def _place(runs: list[str], out: Path | None) -> Path:
    """The path of the report file."""
    first = Path(runs[0])
    beside = first.with_suffix(".html") if first.is_file() else first / "report.html"
    place = out or (beside if len(runs) == 1 else Path("report.html"))
    if out is None and place.is_symlink():  # the run's author may have chosen the link's target
        fail(f"{place} is a link to another file: name the file to write with --out")
    if place.is_dir():
        fail(f"--out {place} is a folder: name a file, such as {place / 'report.html'}")
    return place
