"""Recipes as plain documents: YAML files, inheritance, overrides. ``schema`` gives the keys their meaning."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from poise._lib.calls import with_settings
from poise._lib.errors import short, unknown
from poise.runs.listing import is_comparison

FOLDER = Path(__file__).parents[1] / "recipes"
LARGEST = 100_000  # characters of a recipe or an override
DEEPEST = 20  # levels of a document, and recipes that inherit from each other
# Short forms of task settings.
SHORT_FORMS = {
    "environment": "factory",
    "data": "file",
    "reward": "reward",
    "reward_weights": "reward_weights",
    "reward_timeout": "reward_timeout",
}
SHORT_NAMES = {"environment": "environment", "data": "data"}  # the task they imply; the first wins, as it may take data
_FLOAT = "tag:yaml.org,2002:float"
_DATE = "tag:yaml.org,2002:timestamp"
_EXPONENT = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")

Document = dict[str, Any]


class ConfigError(ValueError):
    """An invalid configuration: ``problems`` holds a line for each mistake."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def recipes() -> list[str]:
    """The names of the recipes that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(recipe: str | Path) -> Document:
    """The document of a recipe, with what it inherits filled in."""
    return _read(_find(recipe), ())


def merge(below: Document, above: Document) -> Document:
    """``above`` on top of ``below``: groups are merged, anything else is replaced."""
    task, other = below.get("task"), above.get("task")
    if isinstance(task, dict) and isinstance(other, dict) and "name" in other and other["name"] != task.get("name"):
        below = below | {"task": {}}  # another task has other settings
    return _merge(below, above)


def _merge(below: Document, above: Document) -> Document:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


PLACEHOLDER = re.compile(r"\s*\{\w+\}")  # of a template; a group would have a colon


def split_overrides(overrides: Sequence[str], short_keys: Mapping[str, str] | None = None) -> tuple[Document, Document]:
    """Two documents of ``key=value`` texts: the settings, and apart from them those of the regulator's parts.

    Settings of the algorithm (``algorithm.transfer=0.5``) are put into its text, if that is given too, and else are a
    group, which ``schema.resolve`` puts into the text below.
    ``short_keys`` has the dotted key for each key that may be written without its group. The order of the texts does
    not matter, unless a key is given twice.
    """
    document: Document = {}
    parts: dict[str, Document] = {"regulator": {}, "algorithm": {}}  # settings inside a text
    problems = []
    for text in overrides:
        key, equals, _ = text.partition("=")
        path = [part.strip() for part in (short_keys or {}).get(key.strip(), key).split(".")]
        if not equals or not all(path):
            problems.append(f"override {short(text)}: write key=value, such as optim.lr=1e-6")
            continue
        if len(path) > DEEPEST:
            problems.append(f"override {short(text)}: the key has {len(path)} levels, more than {DEEPEST}")
            continue
        try:
            value = read_typed(text)
        except ConfigError as error:
            problems += error.problems
            continue
        if path[0] in parts and len(path) > 1:
            parts[path[0]][".".join(path[1:])] = value
            continue
        for part in reversed(path[1:]):
            value = {part: value}
        document = _merge(document, {path[0]: value})
    if problems:
        raise ConfigError(problems)
    if parts["algorithm"]:
        given = document.get("algorithm")
        document["algorithm"] = parts["algorithm"] if given is None else change_algorithm(given, parts["algorithm"])
    return expand_short_forms(document), parts["regulator"]


def change_algorithm(text: Any, settings: Document) -> str:
    """The text form of an algorithm with some settings changed."""
    try:
        return with_settings(str(text), settings)
    except ValueError as error:
        raise ConfigError([f"algorithm = {short(text)}: {error}"]) from None


def expand_short_forms(document: Document) -> Document:
    """``data``, ``reward``, ``environment`` and so on as the settings of a task that they stand for."""
    given = [key for key in SHORT_FORMS if key in document]
    task = document.get("task", {})
    if not given or not isinstance(task, dict):  # a task that is no group is refused by the schema
        return document
    problems = [
        f"{key} is short for task.{SHORT_FORMS[key]}, and both are given: leave one of them out"
        for key in given
        if SHORT_FORMS[key] in task
    ]
    key, name = next(((key, name) for key, name in SHORT_NAMES.items() if key in given), ("", task.get("name")))
    if task.get("name", name) != name:
        problems.append(
            f"{key}={document[key]} means task.name={name}, but task.name={short(task['name'])[1:-1]} is given too: "
            "leave one of them out"
        )
    if problems:
        raise ConfigError(problems)
    task = ({"name": name} if name else {}) | task | {SHORT_FORMS[key]: document[key] for key in given}
    return {key: value for key, value in document.items() if key not in given} | {"task": task}


def parse(text: str) -> Any:
    """The value of a YAML text. Whatever is wrong with the text is a ``yaml.YAMLError``."""
    if len(text) > LARGEST:
        raise yaml.YAMLError(f"it has more than {LARGEST:,} characters")
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError(f"it has more than {DEEPEST} levels") from None


def read_typed(override: str) -> Any:
    """The value of a text ``key=value``."""
    try:
        return parse_typed(override.partition("=")[2])
    except yaml.YAMLError as error:
        raise ConfigError([f"override {short(override)}: cannot read the value: {_reason(error)}"]) from None


def parse_typed(written: str) -> Any:
    """The value of a text typed after ``key=``: YAML, except that sentences stay as they are typed.

    YAML would cut ``End with #### 42`` at the sign, make a group of ``Be brief: answer`` and refuse ``{question} Go``.
    """
    begin = written.strip()[:1]
    if PLACEHOLDER.match(written):
        return written
    if begin and begin in "[{\"'":
        return parse(written)
    try:
        value = parse(written)
    except yaml.YAMLError:
        if ": " in written:
            return written
        raise
    sentence = isinstance(value, dict | list) or (isinstance(value, str) and " #" in written)
    return written if sentence else value


def too_deep(value: Any, levels: int = DEEPEST) -> bool:
    """Whether groups and lists are nested deeper than any setting needs."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return parts is not None and (levels == 0 or any(too_deep(part, levels - 1) for part in parts))


def to_yaml(document: Document) -> str:
    """YAML that reads back as the same document."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _read(path: Path, below: tuple[Path, ...]) -> Document:
    if path in below:
        circle = " -> ".join(p.name for p in (*below[below.index(path) :], path))
        raise ConfigError([f"recipe {path.name!r} inherits from itself: {circle}"])
    if len(below) == DEEPEST:
        raise ConfigError([f"recipe {below[0].name!r}: more than {DEEPEST} recipes inherit from each other"])
    try:
        with path.open(encoding="utf-8") as file:
            document = parse(file.read(LARGEST + 1))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError([f"{path}{line}: {_reason(error)}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError([f"{path}: cannot be read as YAML: {_reason(error)}"]) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError([f"{path}: a recipe is made of lines key: value, got {type(document).__name__}"])
    base = document.pop("base", None)
    document = expand_short_forms(document)
    if base is None:
        return document
    if not isinstance(base, str):
        raise ConfigError([f"{path}: base = {short(base)}: must be the name or the path of a recipe"])
    return merge(_read(_find(base, path.parent), (*below, path)), document)


def _find(recipe: str | Path, beside: Path | None = None) -> Path:
    """The file of a recipe: one that ships by that name, or one at that path, seen from the folder ``beside``."""
    name, shipped = str(recipe), recipes()
    if name in shipped:
        return FOLDER / f"{name}.yaml"
    path = (beside or Path()) / Path(recipe).expanduser()
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        quoted = shlex.quote(name)
        way = f"to go on with a run, poise train --resume {quoted}; to start from its model, model={quoted}"
        if is_comparison(path):
            way = "this one is a comparison's; the command that began it goes on with it"
        raise ConfigError([f"recipe {short(name)} is a folder, and a recipe is a YAML file: {way}"])
    if "/" in name or "\\" in name or path.suffix:
        raise ConfigError([f"recipe {short(name)}: there is no such file (shipped: {', '.join(shipped)})"])
    raise ConfigError([unknown("recipe", name, shipped) + "; for one of your own give its path"])


def _reason(error: Exception) -> str:
    """The first line of what went wrong."""
    text = (error.problem if isinstance(error, yaml.MarkedYAMLError) else None) or str(error)
    if "<stream end>" in text or "unexpected end of stream" in text:
        return "it ends too early: a bracket or a quote is not closed"
    return text.splitlines()[0]


class _Loader(yaml.SafeLoader):
    """YAML as it is meant: 1e-6 is a number, a date is text, and a key that is given twice is an error.

    An alias stands for a single value: with lists and groups a few lines can mean billions of values.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node, unless it is an alias of many."""
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if alias is not None and not isinstance(node, yaml.ScalarNode):
            raise yaml.composer.ComposerError(
                None,
                None,
                f"the alias *{alias.anchor} stands for a list or a group: write it out, or inherit it with base:",
                alias.start_mark,
            )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node. What PyYAML trips over, such as ``!!int x``, is an error with its line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            raise yaml.constructor.ConstructorError(
                None, None, f"cannot read the value {short(node.value)}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, unless a key of it is given twice."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {short(key.value)} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would not read back as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))
