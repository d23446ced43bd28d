"""``poise`` and ``python -m poise``."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line, or say what it lacks."""
    # Threads that wait for each other must not spin: on a busy machine they would keep each other from working. The
    # OpenMP library reads this once, when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for number in (0, 1, 2):  # one that is closed, as by >&-, would be the next file that is opened
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    try:
        from poise._lib import user_code as _user_code
        from poise.cli.see import app
        from poise.runs.console import lasting_output
    except ModuleNotFoundError as error:
        sys.exit(f"poise's command line needs {error.name}, which is not installed: pip install 'poise[train]'")
    with suppress(FileNotFoundError):  # the current folder may have been removed
        _user_code.FOLDERS.append(os.getcwd())  # so that a regulator of one's own is found beside the command
    with lasting_output():
        app()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `python -m` puts the current folder first: a yaml.py there would run in place of the real one
    main()
