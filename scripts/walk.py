"""What one training step enters: files, functions, calls, and the edges from file to file.

    python scripts/walk.py                        # a step of recipe tiny, from its start to the start of the next
    python scripts/walk.py regulator=nthr --list  # another one, with the files and their functions

Counts calls of poise's own functions, in all threads. An edge leads from the file of a function to the file of the
poise function that called it, also through torch and transformers.
"""

from __future__ import annotations

import io
import sys
import tempfile
import threading
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import poise
from poise.trainer import State, StepResult, Trainer
from poise.training import config
from poise.training.building import build
from poise.training.preflight import preflight
from poise.training.resume import run_folder

ROOT = str(Path(poise.__file__).parent)
SETTINGS = (
    "task.name=kk", "steps=2", "prompts=2", "group=4", "rollout.max_tokens=40", "evaluation=off", "rollouts_every=1",
    "checkpoint_every=1", "device=cpu",
)  # fmt: skip
INNER = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # frames of their own before Python 3.12


class Walk:
    """Counts calls while it is on."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.edges: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """What ``sys.setprofile`` calls."""
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT) or frame.f_code.co_name in INNER:
            return
        self.calls[frame.f_code] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
            self.edges.add((caller.f_code.co_filename, frame.f_code.co_filename))

    def set(self, on: bool) -> None:
        """Begin or end the count, in this thread and those that begin later."""
        sys.setprofile(self if on else None)
        threading.setprofile(self if on else None)

    @property
    def files(self) -> dict[str, list[str]]:
        """The functions of each file."""
        files: dict[str, list[str]] = {}
        for code in self.calls:
            files.setdefault(str(Path(code.co_filename).relative_to(ROOT)), []).append(code.co_qualname)
        return {name: sorted(functions) for name, functions in sorted(files.items())}


def walk(overrides: list[str]) -> Walk:
    """Train two steps, and count from the start of the first to the start of the second."""
    counted = Walk()

    class Walked(Trainer):
        """A trainer that starts the count with its first step, and ends it with its second."""

        def step(self, state: State) -> StepResult:
            counted.set(on=state.step == 0)
            return super().step(state)

    with tempfile.TemporaryDirectory() as temporary, redirect_stdout(io.StringIO()):  # what the console shows
        settings = config.load("tiny", [*SETTINGS, *overrides, f"run={temporary}/run"])
        with run_folder(settings, resume=False) as folder:
            components = build(settings, folder)
            preflight(settings, components)
            try:
                Walked(settings, folder, components).run()
            finally:
                counted.set(on=False)
    return counted


def main() -> None:
    overrides = [argument for argument in sys.argv[1:] if argument != "--list"]
    counted = walk(overrides)
    files = counted.files
    print(
        f"a step enters {len(files)} files, {len(counted.calls)} functions, {counted.calls.total()} calls; "
        f"{len(counted.edges)} file-to-file edges"
    )
    if "--list" in sys.argv:
        for name, functions in files.items():
            print(f"{name}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
