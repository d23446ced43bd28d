"""The commands that show what happened in a run: report, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from poise.cli.common import check_no_comparison, explained, fail, home, progress


@contextmanager
def _reading() -> Iterator[None]:
    """Report unreadable files as damage: poise writes the files of a run whole."""
    with explained():
        try:
            yield
        except (ValueError, RecursionError) as error:
            fail(f"a file of the run is damaged: {error}")


def report(
    runs: Annotated[list[str], typer.Argument(callback=home, help="Run folders; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option(callback=home, help="The file to write, .html or .png (curves only); default: report.html."),
    ] = None,
    x: Annotated[str, typer.Option("--x", help="What curves are drawn over: step, tokens or seconds.")] = "step",
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report on this machine and keep it up to date.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --watch; 0: any free port.")] = 0,
) -> None:
    """Write a run, or several side by side, as one HTML file that opens from disk and needs no network.

    With `--out FILE.png` only the curves are drawn. In the HTML file the reader can change what `--x` chose.

    Examples:

    - `poise report runs/demo`
    - `poise report runs/grpo runs/ar --out comparison.html`
    - `poise report runs/grpo runs/ar --out curves.png --x tokens`
    - `poise report --watch runs/demo`
    """
    from poise._lib.errors import unknown
    from poise.reports.html import serve, write_report
    from poise.runs.axes import AXES
    from poise.runs.console import visible

    with _reading():
        if x not in AXES:
            fail(unknown("--x", x, AXES))
        for run in map(Path, runs):
            check_no_comparison(run)
        if watch:
            server = serve(runs, port, x=x)
            print(f"http://127.0.0.1:{server.server_port}  (stop with Ctrl-C)", flush=True)
            try:
                server.serve_forever()
            finally:
                server.server_close()
            return
        place = out or (Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html"))
        if out is None and place.is_symlink():  # the author of the run chose its target
            fail(f"{place} is a link to another file: name the file to write with --out")
        if place.is_dir():
            fail(f"--out {place} is a folder: name a file, such as {place / 'report.html'}")
        if place.suffix.lower() == ".png":
            from poise.reports.picture import write_picture  # imports transformers, which takes seconds

            write_picture(runs, place, x)
        else:
            with progress() as say:
                write_report(
                    runs, place, x=x, progress=lambda done, total: say(f"{done:,} of {total:,} responses written")
                )
    print(visible(f"report: {place}"))


def tokens(
    run: Annotated[str, typer.Argument(callback=home, help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="A recorded step; default: the last.")] = None,
    by: Annotated[
        str, typer.Option(help="probability, weight, advantage, gradient, entropy, nthr or change.")
    ] = "weight",
    response: Annotated[int, typer.Option(min=0, help="Number of the first response to show; they start at 0.")] = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="How many responses to show.")] = 1,
    top: Annotated[int, typer.Option(min=0, help="How many tokens with the most extreme values to list.")] = 8,
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

    with _reading():
        folder = RunFolder.open(run, resume=False)
        steps = [s for s in folder.recorded() if folder.tokens_path(s).exists()]
        if not steps:
            fail(f"{run} has no recorded tokens; train with rollouts_every=10, for example")
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
            role = f" ({visible(record['role'])})" if "role" in record else ""
            rich.print(f"step {chosen}, response {i}{role}: {verdict}, reward {record['reward']}; shaded by {by}")
            rich.print(visible(record["prompt"]), style="dim")
            rich.print(shaded(one, texts, by, record.get("environment", [])))
            with Console(0) as console:
                console.table(extremes(one, texts, by, top))
