"""The arguments of a command that ask for a configuration: the nearest recipe, and the settings that differ from it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import yaml

from poise._lib.calls import split_outside
from poise.config.documents import ConfigError, Document, merge, parse_typed, read, recipes, split_overrides
from poise.config.groups import LoraConfig
from poise.config.schema import Config, resolve


def arguments(config: Config, leave_out: Collection[str] = ()) -> list[str] | None:
    """What to type after ``poise train`` for these settings, one word each and not quoted for a shell.

    ``leave_out`` has dotted keys that the caller types himself, or that do not matter. The recipe is the one from
    which the fewest settings differ. None: a value is too long to be typed.
    """
    document, defaults = config.model_dump(mode="json"), _defaults()
    found = []
    for recipe in _candidates(config):
        base = merge(defaults, read(recipe) if recipe else {})
        words = {key: f"{key}={written(value)}" for key, value in _changes(base, document, "")}
        if _resolved(base, list(words.values())) == document:
            found.append((recipe, words))
    if not found:
        return None
    recipe, words = min(found, key=lambda each: len(each[1]))
    return [*([recipe] if recipe else []), *(word for key, word in words.items() if key not in leave_out)]


def written(value: Any) -> str:
    """The text after ``key=`` that reads as this value, in ``poise train`` and, as a single value, in ``compare``."""
    if isinstance(value, str) and value.isprintable() and _reads_as_itself(value):
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return re.sub(r"\\(.)", lambda escape: r"\u0022" if escape[1] == '"' else escape[0], quoted)  # one pair of quotes


def _reads_as_itself(text: str) -> bool:
    if any(len(split_outside(text, separator)) > 1 for separator in ";,"):
        return False
    try:
        return bool(parse_typed(text) == text)
    except yaml.YAMLError:
        return False


def _candidates(config: Config) -> list[str | None]:
    """The recipes to begin with. Without one, the embedded model would be trained as in the demo."""
    own = "demo" if config.model == "embedded" else None
    return [own, *(name for name in recipes() if name != own)]


def _defaults() -> Document:
    document = Config.model_validate({"task": {"name": "kk"}}).model_dump(mode="json")
    del document["task"]  # there is no default
    return document


def _changes(base: Document, wanted: Document, prefix: str) -> Iterator[tuple[str, Any]]:
    """The dotted keys and values that lead from ``base`` to ``wanted``."""
    for key, value in wanted.items():
        under = base.get(key)
        if under == value and key in base:
            continue
        if key == "lora" and value is not None and under is None:  # any of its settings turns it on
            yield f"{key}.rank", value["rank"]
            under = LoraConfig(rank=value["rank"]).model_dump(mode="json")
        if not prefix and isinstance(value, dict):
            renamed = key == "task" and (under or {}).get("name") != value["name"]  # and without the other's settings
            yield from _changes({} if renamed else under or {}, value, f"{key}.")
        else:
            yield prefix + key, value


def _resolved(base: Document, words: list[str]) -> Document | None:
    """The settings that these words ask for, in the order and with the types of a validated document."""
    try:
        document = resolve(base, *split_overrides(words))
    except ConfigError:
        return None
    lora = document["lora"]
    return document | {"lora": lora and LoraConfig.model_validate(lora).model_dump(mode="json")}
