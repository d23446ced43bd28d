"""``poise report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poise.cli.common import check_no_comparison, explained, fail, home, progress


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
