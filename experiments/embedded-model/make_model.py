"""Train a model on worked solutions of a task: the embedded model, or a larger one for a comparison.

    python experiments/embedded-model/make_model.py my-model workers=15          # the embedded model's settings
    python experiments/embedded-model/make_model.py my-model task.people=3 noise=0 wording=1.0 stop_at=0.35
    python experiments/embedded-model/make_model.py my-model task.people=3-5 style=sentences width=320 layers=6 heads=8
    python experiments/embedded-model/make_model.py OTHER model=my-model steps=500

Settings are ``task.name`` and those of the task (``task.…``); ``style`` (sentences, compact or values), ``noise`` and
``wording`` of Knights & Knaves' solutions; ``steps``, ``batch``, ``lr``, ``seed``, ``workers``, ``compile``,
``stop_at``, ``measure_every``, ``max_tokens`` and ``device``; then ``width``, ``layers``, ``heads`` and ``vocabulary``
for a new model, or ``model`` (a folder, a run or a hub id) to start from another. What you leave out is as for the
embedded model.

The new folder has ``warmstart.yaml``, the settings: ``poise train model=FOLDER`` takes the task from there.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from warm_start import NEW_MODEL, SOLUTIONS, Warmstart, embedded, train

WORDS = {"true": True, "false": False, "none": None}


def parse(words: Iterable[str]) -> dict[str, Any]:
    """``key=value`` words as a dict. A value is a Python literal, or text."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r}: write key=value")
        try:
            found[key] = WORDS[text.lower()] if text.lower() in WORDS else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def changed(settings: Warmstart, changes: dict[str, Any]) -> Warmstart:
    """The settings with ``changes`` in their place. Another task begins with its own defaults."""
    known = [own.name for own in fields(settings) if not own.name.startswith("task")]
    for key in changes:
        if key not in known and not key.startswith("task."):
            raise ValueError(f"unknown setting {key!r}: there are task.name, task.…, device, {', '.join(known)}")
    name = changes.get("task.name", settings.task)
    defaults: dict[str, Any] = {own.name: own.default for own in fields(settings)}
    start: dict[str, Any] = {}
    if changes.get("model") is not None:  # it has its own shape
        start |= {key: defaults[key] for key in NEW_MODEL}
    if name != settings.task:
        start |= {key: defaults[key] for key in SOLUTIONS} | {"task": name, "task_settings": {}}
    settings = replace(settings, **start)
    of_task = {key.removeprefix("task."): value for key, value in changes.items() if key.startswith("task.")}
    of_task.pop("name", None)
    own = {key: value for key, value in changes.items() if not key.startswith("task.")}
    return replace(settings, task_settings=settings.task_settings | of_task, **own)


def main(words: list[str]) -> None:
    if not words or "=" in words[0] or words[0] in ("-h", "--help"):
        sys.exit(__doc__)
    out = Path(words[0])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        sys.exit(f"{out} is there already: choose another folder, or go on from its model with model={out}")
    try:
        changes = parse(words[1:])
        device = str(changes.pop("device", "auto"))
        settings = changed(embedded(), changes)
        settings.build_task()
    except (ValueError, TypeError) as error:
        sys.exit(str(error))

    def say(step: int, found: dict[str, float]) -> None:
        print(f"{step}/{settings.steps}", *(f"{name} {value:.3f}" for name, value in found.items()), flush=True)

    train(settings, out, device=device, say=say, note=lambda text: print(text, flush=True))
    print(f"saved to {out}; measure it on its task with: poise eval {shlex.quote(str(out))}")


if __name__ == "__main__":
    main(sys.argv[1:])
