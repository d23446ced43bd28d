"""Reads recipes as plain documents: YAML files, inheritance, overrides. ``schema`` defines the keys."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import Node, ScalarNode

from poise._lib.errors import LONGEST, UserError, misspelt, short, unknown
from poise._lib.files import loads
from poise._lib.user_code import METHODS
from poise.runs.listing import is_comparison

FOLDER = Path(__file__).parents[2] / "recipes"
LARGEST = 100_000  # characters of a recipe or an override
DEEPEST = 20  # levels in a document, and recipes in a chain of inheritance
# Short forms of task settings. ``data`` is a name or a group: ``data=NAME`` is ``data.name=NAME``.
SHORT_FORMS = {
    "environment": "factory",
    "data": "file",
    **{f"data.{key}": key for key in ("config", "split", "test_split", "streaming", "buffer")},
    "reward": "reward",
    "reward_weights": "reward_weights",
    "reward_timeout": "reward_timeout",
    "reward_quick": "reward_quick",
}
SHORT_NAMES = {
    "environment": "environment",
    "data": "data",
}  # the implied task; environment wins
DATA_TASKS = ("data", "math")
DEMO = "demo"
RECIPES = {"embedded": "tiny", "embedded-plain": DEMO}  # of the models that ship with poise

Document = dict[str, Any]


class ConfigError(UserError, ValueError):
    """An invalid configuration. ``problems`` has one line per mistake."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def recipes() -> list[str]:
    """The names of the recipes that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def default_recipe(model: Any) -> str | None:
    """Return the recipe that runs if none is named: the demo without a model, or the recipe of a model that ships."""
    if not isinstance(model, str):
        return DEMO if model is None else None
    meant, is_recipe = misspelt(model, RECIPES), model in recipes()
    if (meant or is_recipe) and not Path(model).exists():
        why = f"there is no such folder; did you mean {meant!r}?"
        if is_recipe:
            why = f"this is a recipe, not a model: poise train {model}, or in Python recipe={model!r}"
        raise ConfigError(f"model = {short(model)}: {why}")
    return RECIPES.get(model)


def read(recipe: str | Path, *, shipped: bool = True) -> Document:
    """Return a recipe's document, merged with its bases. Without ``shipped``, shipped recipes count as empty."""
    return _read(_find(recipe), (), shipped)


def merge(below: Document, above: Document) -> Document:
    """Return ``below`` updated with ``above``: groups are merged, other values are replaced."""
    task, other = below.get("task"), above.get("task")
    if isinstance(task, dict) and isinstance(other, dict) and "name" in other and other["name"] != task.get("name"):
        below = below | {"task": {}}  # the other task has different settings
    return _merge(below, above)


def _merge(below: Document, above: Document) -> Document:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


PLACEHOLDER = re.compile(r"\s*\{\w+\}")  # a placeholder of a template; a group would have a colon


def split_overrides(overrides: Sequence[str], short_keys: Mapping[str, str] | None = None) -> Document:
    """Parse ``key=value`` strings into a document.

    ``short_keys`` maps each key that may be written without its group to its dotted key.
    """
    document: Document = {}
    problems = []
    for text in overrides:
        key, equals, typed = text.partition("=")
        path = [part.strip() for part in (short_keys or {}).get(key.strip(), key).split(".")]
        if not equals or not all(path):
            problems.append(f"override {short(text)}: write key=value, such as optim.lr=1e-6")
            continue
        if len(path) > DEEPEST:
            problems.append(f"override {short(text)}: the key has {len(path)} levels, more than {DEEPEST}")
            continue
        if path[0] in METHODS and len(path) > 1:
            call = f"{path[0]}='NAME({path[1][:LONGEST]}={typed.strip()[:LONGEST]})'"
            problems.append(f"override {short(text)}: settings of the {path[0]} go in brackets, {call}")
            continue
        try:
            value = read_typed(text)
        except ConfigError as error:
            problems += error.problems
            continue
        document = _merge(document, nested(path, value))
    if problems:
        raise ConfigError(*problems)
    return expand_short_forms(document)


def join_settings(settings: Mapping[str, Any]) -> Document:
    """Build a document from settings with dotted keys, such as ``{"optim.lr": 1e-6, "task": {"name": "kk"}}``."""
    document: Document = {}
    for key, value in settings.items():
        setting = nested(key.split("."), value)
        if twice := _in_both(document, setting):
            raise ConfigError(*(f"{each} has two values: remove one of them" for each in twice))
        document = _merge(document, setting)
    return expand_short_forms(document)


def _in_both(one: Any, other: Any, path: str = "") -> list[str]:
    """The dotted keys for which both documents have a value."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [path]
    names = [name for name in other if name in one]
    return [key for name in names for key in _in_both(one[name], other[name], f"{path}.{name}" if path else name)]


def nested(path: Sequence[str], value: Any) -> Document:
    """Return a document with one setting: ``value`` at ``path``."""
    if list(path) == ["data"] and not isinstance(value, dict):
        path = ["data", "name"]  # next to data.config
    for part in reversed(path[1:]):
        value = {part: value}
    return {path[0]: value}


def expand_short_forms(document: Document) -> Document:
    """Replace ``data``, ``reward``, ``environment`` and the other short forms with the task settings they stand for."""
    document = _flat_data(document)
    short_forms = [key for key in SHORT_FORMS if key in document]
    task = document.get("task", {})
    if not short_forms or not isinstance(task, dict):  # the schema refuses a task that is not a group
        return document
    problems = [
        f"{key} is short for task.{SHORT_FORMS[key]}, and both are set: remove one of them"
        for key in short_forms
        if SHORT_FORMS[key] in task
    ]
    key, name = next(((key, name) for key, name in SHORT_NAMES.items() if key in short_forms), ("", task.get("name")))
    if key == "data" and task.get("name") in DATA_TASKS:
        name = task["name"]
    if task.get("name", name) != name:
        problems.append(
            f"{key}={document[key]} means task.name={name}, but task.name={short(task['name'])[1:-1]} is also set: "
            "remove one of them"
        )
    if problems:
        raise ConfigError(*problems)
    task = ({"name": name} if name else {}) | task | {SHORT_FORMS[key]: document[key] for key in short_forms}
    return {key: value for key, value in document.items() if key not in short_forms} | {"task": task}


def _flat_data(document: Document) -> Document:
    """Flatten the group ``data`` of a document to the keys ``data``, ``data.config``, ``data.split``, …"""
    data = document.get("data")
    if not isinstance(data, dict):
        return document
    flat = {"data" if key == "name" else f"data.{key}": value for key, value in data.items()}
    if wrong := [key for key in flat if key not in SHORT_FORMS]:
        allowed = ["name", *(key.removeprefix("data.") for key in SHORT_FORMS if key.startswith("data."))]
        raise ConfigError(*(unknown("key of data", key.removeprefix("data."), allowed) for key in wrong))
    return {key: value for key, value in document.items() if key != "data"} | flat


class YamlError(ValueError):
    """Text that cannot be read as YAML. ``line`` counts from 1; it is 0 if the line is unknown."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def parse(text: str) -> Any:
    """Parse YAML 1.2: 1e-6 is a number, off and dates are text, a repeated key is an error.

    Any error in the text raises ``YamlError``.
    """
    if len(text) > LARGEST:
        raise YamlError(f"it has more than {LARGEST:,} characters")
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Constructor = _Composer, _Constructor
    try:
        return yaml.load(text)
    except RecursionError:
        raise YamlError(f"it has more than {DEEPEST} levels") from None
    except YAMLError as error:
        reason, mark = getattr(error, "problem", None) or str(error), getattr(error, "problem_mark", None)
        if "<stream end>" in reason or "unexpected end of stream" in reason:
            reason = "it ends too early: a bracket or a quote is not closed"
        raise YamlError(_first_line(reason), mark.line + 1 if mark else 0) from None
    except (ValueError, TypeError, LookupError) as error:  # ruamel raises these for texts such as !!int x
        raise YamlError(f"cannot read a value: {_first_line(str(error))}") from None


class _Composer(Composer):
    """Refuses aliases of lists and groups: with these, a few lines can expand to billions of values."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        alias = self.parser.peek_event() if self.parser.check_event(AliasEvent) else None
        node: Node | None = super().compose_node(parent, index)
        if alias is not None and not isinstance(node, ScalarNode):
            reason = f"the alias *{alias.anchor} stands for a list or a group: write it out, or inherit it with base:"
            raise ComposerError(None, None, reason, alias.start_mark)
        return node


class _Constructor(SafeConstructor):
    """Reads dates as text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _first_line(text: str) -> str:
    return text.splitlines()[0][:300]


def key_of(override: str) -> str:
    """The key of a ``key=value`` string."""
    return override.partition("=")[0].strip()


def read_typed(override: str) -> Any:
    """Parse the value of a ``key=value`` string as YAML, but keep a sentence as typed.

    YAML would cut ``End with #### 42`` at the ``#``, turn ``Be brief: answer`` into a group and refuse ``{question}
    Go``.
    """
    written = override.partition("=")[2]
    if PLACEHOLDER.match(written):
        return written
    bare = not written.lstrip().startswith(("[", "{", '"', "'"))
    try:
        value = parse(written)
    except YamlError as error:
        if bare and ": " in written:
            return written
        raise ConfigError(f"override {short(override)}: cannot read the value: {error}") from None
    sentence = isinstance(value, dict | list) or (isinstance(value, str) and " #" in written)
    return written if bare and sentence else value


def too_deep(value: Any, levels: int = DEEPEST) -> bool:
    """Whether groups and lists are nested more than ``levels`` deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return parts is not None and (levels == 0 or any(too_deep(part, levels - 1) for part in parts))


def to_yaml(document: Document) -> str:
    """Write a document as YAML that parses back to the same document."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = False, 120
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    yaml.dump(document, text)
    return text.getvalue()


def _read(path: Path, below: tuple[Path, ...], shipped: bool) -> Document:
    if path.parent == FOLDER and not shipped:
        return {}
    if path in below:
        circle = " -> ".join(p.name for p in (*below[below.index(path) :], path))
        raise ConfigError(f"recipe {path.name!r} inherits from itself: {circle}")
    if len(below) == DEEPEST:
        raise ConfigError(f"recipe {below[0].name!r}: more than {DEEPEST} recipes inherit from each other")
    try:
        with path.open(encoding="utf-8") as file:
            document = (loads if path.suffix == ".json" else parse)(file.read(LARGEST + 1))
    except (ValueError, OSError) as error:
        line = getattr(error, "line", 0)
        where = f", line {line}" if line else ": cannot be read as YAML"
        raise ConfigError(f"{path}{where}: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a recipe is made of lines key: value, got {type(document).__name__}")
    base = document.pop("base", None)
    document = expand_short_forms(document)
    if base is None:
        return document
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base = {short(base)}: must be the name or the path of a recipe")
    return merge(_read(_find(base, path.parent), (*below, path), shipped), document)


def _find(recipe: str | Path, beside: Path | None = None) -> Path:
    """Find a recipe's file: a shipped recipe with this name, or a path relative to the folder ``beside``."""
    name, shipped = str(recipe), recipes()
    if name in shipped:
        return FOLDER / f"{name}.yaml"
    path = (beside or Path()) / Path(recipe).expanduser()
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        quoted = shlex.quote(name)
        way = f"to continue a run, poise train --resume {quoted}; to start from its model, model={quoted}; "
        way += f"to use its settings, poise train {quoted}/config.json"
        if is_comparison(path):
            way = "this folder belongs to a comparison; to continue it, run its command again"
        raise ConfigError(f"recipe {short(name)} is a folder, and a recipe is a YAML file: {way}")
    if "/" in name or "\\" in name or path.suffix:
        raise ConfigError(f"recipe {short(name)}: there is no such file (shipped: {', '.join(shipped)})")
    if name in RECIPES:
        raise ConfigError(f"{name} is a model, not a recipe: write model={name}")
    raise ConfigError(unknown("recipe", name, shipped) + "; for your own recipe, write its path")
