"""Builds the arms of a comparison from the command line or a YAML file.

On the command line, a setting with several values is an *axis*: ``;`` separates the values; in plain settings ``,``
does too. In a file, ``axes`` has a list of values for each key, and ``arms`` lists single arms. All combinations of the
axes' values become arms.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from poise import regulators
from poise._lib.calls import split_outside
from poise._lib.errors import short
from poise.referee.compare.settings import Settings
from poise.training.config.documents import SHORT_FORMS, ConfigError, Document, key_of, merge, split_overrides
from poise.training.config.messages import unknown_key
from poise.training.config.schema import Config, keys, restore

RATE = "optim.lr"
TEXTS = ("regulator", "algorithm")  # their values contain commas
SAME = {  # groups of settings that all arms must share, and why
    "task": "all arms of a comparison see the same problems",
    "evaluation": "all arms are measured on the same held-out problems",
    "seed": "all arms are trained with the same seeds",
    "run": "a comparison has one folder",
    "tracking": "trackers do not make an arm; write a list of trackers in brackets, tracking=[tensorboard,wandb]",
}


def rate_text(rate: float) -> str:
    """Format a learning rate as a user writes it: 1e-4, 2.5e-5, 0.05."""
    if rate >= 0.01:
        return f"{rate:g}"
    digits, _, power = f"{rate:.5e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


@dataclass(frozen=True)
class Variant:
    """An arm at one learning rate: all settings except the seed."""

    name: str
    config: Config

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.config.optim.lr

    @property
    def identity(self) -> Document:
        """All settings except run and seed, in a normal form. Two variants with equal identities have the same runs."""
        document = self.config.model_dump(mode="json", exclude={"run", "seed"})
        document["regulator"] = method(self.config)
        return document


def method(config: Config) -> str:
    """The regulator's shortest text, or the text as the user typed it if the class is not a dataclass."""
    try:
        return regulators.text(config.build_regulator())
    except ValueError:
        return config.regulator


@dataclass(frozen=True)
class PlannedArm:
    """One method: the settings that distinguish it, and a variant per learning rate to try."""

    name: str
    settings: Mapping[str, Any]
    variants: tuple[Variant, ...]
    control: str = ""  # why ``controls=auto`` added this arm


def folder_name(variant: str) -> str:
    """A readable and unique folder name for a variant's runs."""
    if re.fullmatch(r"\w[\w.=-]{0,59}", variant, re.ASCII):
        return variant
    digest = hashlib.sha256(" ".join(variant.split()).encode()).hexdigest()[:6]
    readable = re.sub(r"[^\w.=]+", "-", variant, flags=re.ASCII)[:60].strip("-.")
    return f"{readable}-{digest}"


def alternatives(key: str, text: str) -> list[str]:
    """The values after ``key=``: one, or several for an axis.

    ``;`` always separates values. ``,`` separates values of plain settings, outside brackets and quotes: write a list
    as ``[a, b]``, and put a sentence with commas in quotes.
    """
    parts = split_outside(text, ";")
    if len(parts) == 1 and key not in TEXTS:
        parts = split_outside(text, ",")
    parts = [part.strip() for part in parts]
    if len(parts) > 1 and not all(parts):
        raise ConfigError(f"{key}={short(text)[1:-1]}: part {parts.index('') + 1} of {len(parts)} is empty")
    return parts


def build(document: Document, overrides: Sequence[str], comparison: Settings) -> list[PlannedArm]:
    """Build the arms of a comparison from a recipe's ``document``, the overrides and the comparison's settings.

    With ``tune``, learning rates are variants of an arm; otherwise each rate is an arm.
    """
    axes = {key: [(_text(value), json.dumps(value)) for value in values] for key, values in comparison.axes.items()}
    single_arms, tuned = _single_arms(comparison.arms), comparison.tune > 0
    fixed: list[str] = []
    for override in overrides:
        key, value = key_of(override), override.partition("=")[2]
        parts = alternatives(key, value)
        _check_commas(key, value)
        axes.pop(key, None)
        if len(parts) > 1:
            axes[key] = [(part, part) for part in parts]
        else:
            fixed.append(override)
    _check_keys(document, fixed, axes, single_arms)
    rates = axes.pop(RATE, None)
    if tuned and rates is None:
        raise ConfigError("tune chooses each arm's learning rate: name several, such as optim.lr=5e-5,1e-4,2e-4")
    variants = [(RATE, *rate) for rate in rates or []] if tuned else []
    if rates and not tuned:
        axes[RATE] = rates
    arms = []
    for name, settings in single_arms:
        for point in product(*axes.values()):
            values = [*settings, *((key, *each) for key, each in zip(axes, point, strict=True))]
            arms.append(_arm(name, document, fixed, values, variants))
    _check_distinct(arms)
    return arms


def _check_commas(key: str, value: str) -> None:
    """Reject a comma between two methods. The parser would suggest ``|``, which composes the methods instead."""
    parts = [part.strip() for group in split_outside(value, ";") for part in split_outside(group, ",")]
    if key in TEXTS and len(parts) > len(split_outside(value, ";")):
        guess = "; ".join(filter(None, parts))
        raise ConfigError(f'{key}={short(value)[1:-1]}: to compare, separate with ";": {key}="{guess}"')


Value = tuple[str, str, str]  # key, value as shown in names, value as written in overrides


def _arm(name: str, document: Document, fixed: list[str], values: list[Value], rates: list[Value]) -> PlannedArm:
    """Build the arm with these values, and a variant of it for each learning rate."""
    title = name or ", ".join(text if key == "regulator" else f"{key}={text}" for key, text, _ in values)
    variants = []
    for rate in [[each] for each in rates] or [[]]:
        overrides = [*fixed, *(f"{key}={text}" for key, _, text in [*values, *rate])]
        try:
            config = restore(merge(document, split_overrides(overrides)), trust=True)
        except ConfigError as error:
            raise ConfigError(*(f"arm {title}: {line}" if title else line for line in error.problems)) from None
        label = f"{title}, {RATE}={rate[0][1]}" if rate else title
        variants.append(Variant(label or method(config), config))
    return PlannedArm(title or variants[0].name, {key: text for key, text, _ in values}, tuple(variants))


def _single_arms(entries: list[dict[str, Any]] | None) -> list[tuple[str, list[Value]]]:
    """The names and settings of the arms that a file lists; without a list, one arm without a name and settings."""
    found = []
    for arm in entries or [{}]:
        name = arm.get("name", "")
        if isinstance(name, bool) or not isinstance(name, str | int | float) or not str(name).isprintable():
            raise ConfigError(f"arms: name = {short(name)}: must be a single line of text")
        settings = [(key, _text(value), json.dumps(value)) for key, value in arm.items() if key != "name"]
        found.append((str(name), settings))
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _check_keys(
    document: Document, fixed: Iterable[str], axes: Mapping[str, Any], single_arms: Iterable[tuple[str, list[Value]]]
) -> None:
    """Reject unknown keys, and axes over settings that all arms must share, before arms are built."""
    differing = [*axes, *(key for _, values in single_arms for key, _, _ in values)]
    for key in differing:
        top = key.partition(".")[0]
        top = "task" if top in SHORT_FORMS else top
        if top in SAME:
            raise ConfigError(f"{key} cannot differ between arms: {SAME[top]}")
    known = set(Config.model_fields) | set(SHORT_FORMS)
    used = dict.fromkeys([*document, *map(key_of, fixed), *differing])
    if wrong := [key for key in used if key.partition(".")[0] not in known]:
        raise ConfigError(*(unknown_key(key, [*Settings.model_fields, *SHORT_FORMS, *keys(document)]) for key in wrong))


def _check_distinct(arms: Sequence[PlannedArm]) -> None:
    """Reject two arms with the same settings or the same name."""
    if len(arms) < 2:
        raise ConfigError(
            "there is only one arm, so there is nothing to compare: name several, separated by ; such as "
            'regulator="grpo; ar; lopti"'
        )
    seen: list[tuple[Document, str]] = []
    for arm in arms:
        rates = [variant.rate for variant in arm.variants]
        if twice := next((rate for i, rate in enumerate(rates) if rate in rates[:i]), None):
            raise ConfigError(f"{RATE} has {rate_text(twice)} twice: remove one of them")
        for identity, name in seen:
            if identity == arm.variants[0].identity:
                raise ConfigError(f"arms {name!r} and {arm.name!r} are the same: remove one of them")
            if name.split() == arm.name.split():  # folder names ignore spaces
                raise ConfigError(f"two arms are named {name!r}: rename one of them")
        seen.append((arm.variants[0].identity, arm.name))
