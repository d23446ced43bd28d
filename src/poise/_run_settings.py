"""The settings of a run folder, for the commands that go on with a run or look at one."""

from __future__ import annotations

import json
from pathlib import Path

from poise._recipes import Document, merge
from poise.config import Config, restore
from poise.run import RunFolder


def is_run(model: str) -> bool:
    """Whether a folder is a run's, be it one that was stopped before its first checkpoint."""
    try:
        found = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "rollout" in found


def of_run(path: str, changes: Document, *, trust: bool = False, regulator: bool = True) -> Config:
    """The settings of the run in a folder, changed. Code that they name is loaded only with ``trust``.

    Without ``regulator`` the run's regulator stays a text: whoever only samples has no use for its code.
    """
    document = merge(RunFolder.open(path, resume=False).config, changes)
    kept: Document = {}
    if not regulator:
        kept["regulator"] = str(document.get("regulator", "grpo"))
        document["regulator"] = "grpo"
    if changes.get("remote_code") is True:  # the user's own word, not the run's
        kept["remote_code"], document["remote_code"] = True, False
    return restore(document, source=f"the run in {path}", trust=trust).model_copy(update=kept)
