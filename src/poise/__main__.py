"""``poise`` and ``python -m poise``."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line, or name a missing package."""
    # Waiting OpenMP threads must sleep, not spin: on a busy machine, spinning threads starve the working ones. The
    # OpenMP library reads this variable once, when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for descriptor in (0, 1, 2):  # if one is closed (>&-), the next file that is opened would get its number
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    try:
        from poise._lib import user_code as _user_code
        from poise.cli.app import app
        from poise.runs.subscribers.console import lasting_output
    except ModuleNotFoundError as error:
        from poise._lib.errors import how_to_install

        sys.exit(f"poise's command line needs {error.name}, which is not installed; {how_to_install('train')}")
    with suppress(FileNotFoundError):  # the current folder may have been removed
        _user_code.FOLDERS.append(os.getcwd())  # user code may be in the current folder
    with lasting_output():
        app()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `python -m` puts the current folder first: a yaml.py there would shadow the real one
    main()
