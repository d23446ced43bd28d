"""The reference page: all settings and all metrics, made from the code. ``poise reference`` prints it.

Settings of a run come from ``config``, with the comments beside them; those of tasks, regulators, algorithms,
surrogates and rewards from their dataclasses and docstrings; metrics from ``runs.metric_names``.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from poise import regulators, surrogates, tasks
from poise._lib.comments import field_comments
from poise._lib.errors import unknown
from poise.algorithms.names import TABLE as ALGORITHMS
from poise.config.schema import Config
from poise.config.values import Group
from poise.objective import Settings
from poise.rewards.names import TABLE as REWARDS
from poise.runs.metric_names import METRICS, find
from poise.tasks.reasoning_gym import ReasoningGym

LONGEST = 40  # characters of a default; longer ones are texts for the model
ACTS_IN = {  # the modules that a setting, or a group of settings, acts in
    "model": "models/loading.py", "run": "runs/folder.py", "steps": "trainer.py", "budget": "trainer.py",
    "seed": "rollout/sampling.py", "prompts": "trainer.py", "group": "algorithms/grpo.py",
    "regulator": "training/phases.py", "algorithm": "algorithms/collected.py", "advantage": "advantages.py",
    "drop_equal_groups": "training/phases.py", "task": "tasks/base.py", "rollout": "algorithms/sampler.py",
    "optim": "training/update.py", "objective": "objective.py", "evaluation": "training/evaluate.py",
    "lora": "models/loading.py", "checkpoint_every": "training/checkpoints.py",
    "keep_checkpoints": "runs/folder.py", "rollouts_every": "training/records.py", "stop_at": "trainer.py",
    "device": "models/loading.py", "dtype": "models/loading.py", "compile": "models/compilation.py",
    "tracking": "runs/trackers.py", "remote_code": "models/loading.py",
}  # fmt: skip


class Setting(NamedTuple):
    """A row of a table of settings."""

    name: str
    kind: str
    default: str
    meaning: str
    module: str


def page() -> str:
    """The whole page, as Markdown."""
    parts = [
        "# Settings and metrics\n",
        _wrapped(
            "All settings of a run and all metrics that it writes. `poise reference` makes this page from the code, "
            "and `poise reference optim.lr` prints one entry of it. Modules are those of `src/poise`."
        ),
        "## Settings of a run\n",
        _wrapped(
            "On the command line `key=value`, in a recipe YAML. `poise train RECIPE --dry-run` shows the values that a "
            "run would have."
        ),
        _table(["setting", "type", "default", "meaning", "acts in"], map(_row, settings())),
        *_methods("Tasks", "`task.name=NAME`; its settings are `task.KEY=VALUE`.", task_classes(), "tasks.md"),
        *_methods("Regulators", "`regulator=\"NAME(KEY=VALUE)\"`.", regulators.TABLE, "papers.md"),
        *_methods("Algorithms", "`algorithm=\"NAME(KEY=VALUE)\"`.", ALGORITHMS, "erl.md", "rltr.md"),
        *_methods("Surrogates", "`objective.surrogate=\"NAME(KEY=VALUE)\"`.", surrogates.TABLE, "surrogates.md"),
        *_methods("Rewards", "`reward=\"NAME(KEY=VALUE)\"`.", REWARDS, "rewards.md"),
        "## Metrics\n",
        _wrapped(
            "Each step writes a line to `metrics.jsonl` of the run folder, and sends it to the trackers. Words in "
            "capitals stand for names of the run's own."
        ),
        _table(["metric", "meaning", "computed in"], ((f"`{row}`", *_of(row)) for row in METRICS)),
    ]  # fmt: skip
    return "\n".join(parts)


def entries(name: str) -> list[str]:
    """What is known about a setting or a metric of this name; without one, about all whose names contain it."""
    known = {setting.name: _explained(setting) for setting in settings()}
    known |= {name: f"{name}\n  {metric.meaning}\n  computed in {metric.module}" for name, metric in METRICS.items()}
    row = find(name)
    if name in known or row is not None:
        return [known[name if name in known else str(row)]]
    return [text for each, text in known.items() if name in each]


def missing(name: str) -> str:
    """The message for a name that is neither a setting nor a metric."""
    message = unknown("setting or metric", name, [setting.name for setting in settings()])
    return message.partition(" (allowed")[0] + "; poise reference prints all of them"


def _explained(setting: Setting) -> str:
    about = f"{setting.kind}, default {setting.default}".replace("`", "")
    return f"{setting.name}\n  {setting.meaning}\n  {about}\n  acts in {setting.module}"


def settings() -> Iterator[Setting]:
    """The settings of a run, groups one after the other."""
    groups = []
    comments = field_comments(Config)
    for name, field in Config.model_fields.items():
        group = _group_of(field)
        if group is None or name == "task":
            yield Setting(name, _kind(field), _default(field), comments.get(name, ""), ACTS_IN[name])
        if group is not None and name != "task":
            groups.append((name, group))
    for prefix, group in groups:
        own = field_comments(group)
        known = {**field_comments(Settings), **own} if prefix == "objective" else own
        for name, field in group.model_fields.items():
            yield Setting(f"{prefix}.{name}", _kind(field), _default(field), known.get(name, ""), ACTS_IN[prefix])


def _of(metric: str) -> tuple[str, str]:
    return METRICS[metric].meaning, f"`{METRICS[metric].module}`"


def _row(setting: Setting) -> tuple[str, ...]:
    return f"`{setting.name}`", setting.kind, setting.default, setting.meaning, f"`{setting.module}`"


def _group_of(field: FieldInfo) -> type[Group] | None:
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Group)), None)


# Types and defaults of pydantic's fields


def _kind(field: FieldInfo) -> str:
    return _described(field.annotation, field.metadata)


def _described(annotation: Any, limits: Any = ()) -> str:
    """A type in words: ``whole number ≥ 1``."""
    arguments = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _described(annotation.__origin__, [*annotation.__metadata__, *limits])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if arguments and type(None) in arguments:
        kinds = [_described(kind, limits) for kind in arguments if kind is not type(None)]
        return f"{' or '.join(kinds)}, or `null`"
    if get_origin(annotation) is tuple:
        inner = dict.fromkeys(_described(kind) for kind in arguments if kind is not Ellipsis)
        return f"list of {', '.join(inner)}"
    if arguments:
        return " or ".join(_described(kind, limits) for kind in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Group):
        return "settings"
    names = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    return names.get(annotation, str(annotation)) + _range(limits)


def _range(limits: Any) -> str:
    """The limits of a number, without those that only keep it in range of the machine."""
    low, high = "", ""
    for limit in (part for each in limits for part in (each.metadata if isinstance(each, FieldInfo) else [each])):
        if isinstance(limit, Ge | Gt) and abs(_bound(limit)) < 2**31 - 1:
            low = f" {'≥' if isinstance(limit, Ge) else '>'} {_bound(limit):g}"
        if isinstance(limit, Le | Lt) and abs(_bound(limit)) < 2**31 - 1:
            high = f" {'≤' if isinstance(limit, Le) else '<'} {_bound(limit):g}"
    return low + ("," if low and high else "") + high


def _bound(limit: Any) -> float:
    return float(next(getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "`null`" if field.default is None else _value(field.default)


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return f"`{ {True: 'true', False: 'false', None: 'null'}[value] }`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if isinstance(value, tuple | list):
        shown = f"[{', '.join(_value(part).strip('`') for part in value)}]"
        return f"`{shown}`" if len(shown) <= LONGEST else "a list"
    text = str(value)
    return "a text" if len(text) > LONGEST or "\n" in text else f"`{text}`" if text else "empty"


# Methods: classes with settings and a docstring


def task_classes() -> dict[str, Any]:
    """The tasks, with the class behind each name."""
    return {**tasks.TASKS, "rg/NAME": ReasoningGym}


def _methods(title: str, how: str, table: Mapping[str, Callable[..., Any]], *more: str) -> Iterator[str]:
    links = " and ".join(f"[{page}]({page})" for page in more)
    yield f"## {title}\n"
    yield f"{how} More in {links}.\n"
    for name, kind in table.items():
        yield f"### {title.lower().removesuffix('s')} `{name}`\n"
        yield _wrapped(about(kind))
        rows = list(method_settings(kind))
        if any(row[3] for row in rows):
            yield _table(["setting", "type", "default", "note"], rows)
        elif rows:
            yield _table(["setting", "type", "default"], (row[:3] for row in rows))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def about(kind: Callable[..., Any]) -> str:
    """The docstring of a class, as Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join((inspect.getdoc(kind) or "").split()))


def method_settings(kind: Callable[..., Any]) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and comment of each setting of a class."""
    comments: dict[str, str] = {}
    for each in reversed(inspect.getmro(kind)) if isinstance(kind, type) else ():
        comments |= field_comments(each)
    positional = {"id", "dataset", "settings"}  # part of the task's name, or the generator's own
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.name in positional or parameter.kind is parameter.VAR_KEYWORD:
            continue
        missing = parameter.default is parameter.empty
        factory = "<factory>" in repr(parameter.default)
        default = "required" if missing else "empty" if factory else _value(parameter.default)
        yield f"`{parameter.name}`", _words(str(parameter.annotation)), default, comments.get(parameter.name, "")


def _words(annotation: str) -> str:
    """An annotation in words."""
    text = re.sub(r"(Sequence|tuple)\[(\w+)(, \.\.\.)?\]", r"list of \2", annotation)
    text = re.sub(r"Mapping\[.*?\]", "settings", text)
    text = re.sub(r"Callable\[\[\], Any\]", "a callable", text)
    for word, plain in (("int", "whole number"), ("float", "number"), ("str", "text"), ("bool", "`true` or `false`"),
                        ("None", "`null`"), ("Any", "text or list")):  # fmt: skip
        text = re.sub(rf"\b{word}\b", plain, text)
    return text.replace(" | ", " or ")


def _table(columns: list[str], rows: Any) -> str:
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines) + "\n"
