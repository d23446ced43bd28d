"""Write docs/reference.md, all settings and metrics of a run, from the code: python scripts/reference.py

Settings of a run come from pydantic's JSON schema of ``config``; those of tasks, regulators, algorithms, surrogates and
rewards from their signatures and docstrings; metrics from ``metric_names``.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from metric_names import METRICS

from poise import regulators, surrogates, tasks
from poise.sampling.algorithms import TABLE as ALGORITHMS
from poise.tasks.environment import Environment
from poise.tasks.reasoning_gym import ReasoningGym
from poise.tasks.rewards.run import TABLE as REWARDS
from poise.training.config.schema import Config

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
LONGEST = 40  # characters of a default; longer ones are texts for the model
TYPES = {"integer": "int", "number": "float", "string": "text", "boolean": "bool", "null": "null", "object": "group"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
INNER = ("id", "dataset", "settings")  # parameters that are part of a task's name, or its generator's own

WRITTEN = """\
| you write | it means |
|---|---|
| `optim.lr=1e-6`, `optim.betas="[0.9, 0.99]"`, `evaluation=off` | a YAML 1.2 value; the quotes are for your shell |
| `regulator="ar(alpha=0.3)"`, `reward="regex(pattern='x')"` | a name with settings; their values are Python literals |
| `regulator="ar \\| lopti"` | two regulators composed: their weights and phases multiply |
| `regulator="grpo; ar"`, `optim.lr=1e-5,1e-4` | only in `poise compare`: several values, one arm for each |
| `regulator=mine.py:Mine`, `task.name=package.module.Mine` | your own code: a file or a module, and a name in it |
"""
Method = Callable[..., Any]
METHODS: dict[str, tuple[str, Mapping[str, Method]]] = {
    "Tasks": (
        "`task.name=NAME`; settings are `task.KEY=VALUE`. More in [tasks.md](tasks.md).",
        {**tasks.TASKS, "environment": Environment, "rg/NAME": ReasoningGym},
    ),
    "Regulators": ('`regulator="NAME(KEY=VALUE)"`. More in [papers.md](papers.md).', regulators.TABLE),
    "Algorithms": ('`algorithm="NAME(KEY=VALUE)"`. More in [erl.md](erl.md) and [rltr.md](rltr.md).', ALGORITHMS),
    "Surrogates": (
        '`objective.surrogate="NAME(KEY=VALUE)"`. More in [surrogates.md](surrogates.md).', surrogates.TABLE
    ),
    "Rewards": ('`reward="NAME(KEY=VALUE)"`. More in [rewards.md](rewards.md).', REWARDS),
}  # fmt: skip


def page() -> str:
    """The whole page, as Markdown."""
    parts = [
        "# Settings and metrics\n",
        "`scripts/reference.py` makes this page from the code.\n",
        "## Settings of a run\n",
        "Write settings as `key=value` on the command line, or as YAML in a recipe. "
        "`poise train --dry-run` shows all values of a run. Without `run=`, the recipe names the folder; if it already "
        "has a run, this one goes to the next free folder, such as `runs/demo-2`.\n",
        WRITTEN,
        _table(["setting", "type", "default", "meaning"], settings()),
    ]
    for title, (how, table) in METHODS.items():
        parts += [f"## {title}\n", f"{how}\n", *(_entry(name, kind, table) for name, kind in table.items())]
    parts += [
        "## Metrics\n",
        _wrapped(
            "Each step writes a line to `metrics.jsonl` of the run folder, and sends it to the trackers. Words in "
            "capitals stand for names of the run's own."
        ),
        _table(["metric", "meaning"], ((f"`{name}`", meaning) for name, meaning in METRICS.items())),
    ]
    return "\n".join(parts)


def settings() -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each setting of a run, groups one after the other."""
    schema = Config.model_json_schema()
    groups = {}
    for name, field in schema["properties"].items():
        group = _group(field, schema["$defs"])
        if group is None:
            yield _row(name, field)
        else:
            groups[name] = group
    for prefix, group in groups.items():
        yield from (_row(f"{prefix}.{name}", field) for name, field in group["properties"].items())


def _group(field: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any] | None:
    references = [part["$ref"] for part in (field, *field.get("anyOf", ())) if "$ref" in part]
    return groups[references[0].rpartition("/")[2]] if references else None


def _row(name: str, field: dict[str, Any]) -> tuple[str, str, str, str]:
    default = field.get("default", "required")
    shown = default if default in ("", "required") else f"`{_value(default)}`"
    return f"`{name}`", _type(field), shown, _markdown(field.get("description", ""))


def _type(field: dict[str, Any]) -> str:
    """A type in words: ``int ≥ 1 or null``."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(map(_type, field["anyOf"]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('prefixItems', [field.get('items')])[0])}"
    bounds = [f"{sign} {field[key]:g}" for key, sign in BOUNDS.items() if abs(field.get(key, 2**53)) < 2**31 - 1]
    return f"{TYPES[field.get('type', 'string')]} {', '.join(bounds)}".strip()


def _value(value: Any) -> str:
    """A default as it is typed."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _entry(name: str, kind: Method, table: Mapping[str, Method]) -> str:
    """A task or a method: its settings with their defaults, and what its docstrings say about them."""
    base = next((each for each in _bases(kind) if each in table.values()), None)
    inherited = inspect.signature(base).parameters if base else {}
    own = {key: value for key, value in inspect.signature(kind).parameters.items()
           if key not in INNER and repr(value) != repr(inherited.get(key))}  # fmt: skip
    shown = [f"`{key}{_default(value.default)}`" for key, value in own.items() if value.kind is not value.VAR_KEYWORD]
    rest = f" The rest as `{next(each for each in table if table[each] is base)}`." if base else ""
    bases = [] if base else _bases(kind)
    text = f"- **`{name}`** {', '.join(shown)}{':' if shown else ''} {about([kind, *bases], own)}{rest}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    text = _value(value)
    return f"={text}" if len(text) <= LONGEST and text.isprintable() and "<factory>" not in text else "=…"


def _bases(kind: Method) -> list[type]:
    return list(inspect.getmro(kind)[1:-1]) if isinstance(kind, type) else []


def about(kinds: Iterable[Method], names: Iterable[str]) -> str:
    """The first sentence of the docstrings of these classes, and all sentences that speak of these settings."""
    first, *more = (sentence for kind in kinds for sentence in _sentences(kind))
    return " ".join([first, *(sentence for sentence in more if words_in_code(sentence) & set(names))])


def words_in_code(text: str) -> set[str]:
    """The words between backticks."""
    return {word for code in re.findall("`([^`]+)`", text) for word in re.findall(r"\w+", code)}


def _sentences(kind: Method) -> list[str]:
    outside_code = r"(?=(?:[^`]*`[^`]*`)*[^`]*$)"
    return re.split(rf"(?<=[.?])\s+(?=[A-Z`*]){outside_code}", _markdown(inspect.getdoc(kind) or ""))


def _markdown(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def _table(columns: list[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ["---"] * len(columns), *([cell.strip().replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
