"""``poise`` and ``python -m poise``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line, or say what it lacks."""
    sys.path.insert(0, os.getcwd())  # so that a regulator of one's own is found beside the command
    try:
        from poise.cli_see import app
    except ModuleNotFoundError as error:
        sys.exit(f"poise's command line needs {error.name}, which is not installed: pip install 'poise[train]'")
    app()


if __name__ == "__main__":
    main()
