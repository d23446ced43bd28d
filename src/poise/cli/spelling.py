"""Settings written as options, ``--steps 3``, are answered with the spelling that works, ``steps=3``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import typer.core

from poise.cli.common import fail

_RENAMED = {"n": "samples", "task": "task.name"}  # options of earlier versions whose setting has another name


class Command(typer.core.TyperCommand):
    """A command that takes settings as ``key=value``, and options for all else."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Stop with the right spelling at the first option that is a setting."""
        options = {*ctx.help_option_names, *(name for p in self.params for name in (*p.opts, *p.secondary_opts))}
        for word, following in pairwise([*args, ""]):
            option, equals, value = word.partition("=")
            if word == "--":
                break
            if option.startswith("--") and option not in options:
                value = value if equals else following if not following.startswith("-") and "=" not in following else ""
                keys = _keys_meant(str(self.name), option[2:])
                if keys:
                    spelled = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
                    fail(f"{option}: write {spelled}; settings are key=value, without dashes")
        return super().parse_args(ctx, args)


def _keys_meant(command: str, option: str) -> list[str]:
    """The settings of the command that an option could stand for; none where it has no such setting."""
    key, known = _RENAMED.get(option, option).replace("-", "_"), _keys(command)
    return [key] if key in known else [each for each in known if each.rpartition(".")[2] == key]


def _keys(command: str) -> list[str]:
    from poise import tasks
    from poise.comparison.arms import OWN
    from poise.config.documents import SHORT_FORMS
    from poise.config.run_settings import evaluation_keys
    from poise.config.schema import keys

    own = {
        "compare": [*OWN, *keys({})],
        "eval": evaluation_keys(),
        "chat": evaluation_keys(),
        "show": ["seed", "split"],
    }.get(command, keys({}))
    of_tasks = {f"task.{setting}": None for name in tasks.TASKS for setting in tasks.settings_of(name)}
    return [*own, *SHORT_FORMS, "task.name", *of_tasks]
