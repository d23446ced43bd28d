"""The arms of a comparison, from what the user typed or wrote in a YAML file.

On the command line a value of several parts is an *axis*: ``;`` separates the parts, and for plain settings ``,`` does
too. In a file ``axes`` has a list for each key, and ``arms`` lists arms one by one. Axes multiply out.
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
from poise.config.documents import SHORT_FORMS, ConfigError, Document, merge, split_overrides
from poise.config.messages import unknown_key
from poise.config.schema import Config, keys, restore

RATE = "optim.lr"
TEXTS = ("regulator", "algorithm")  # their values contain commas
SAME = {  # what all arms share
    "task": "all arms of a comparison see the same problems",
    "evaluation": "all arms are measured on the same held-out problems",
    "seed": "all arms are trained with the same seeds",
    "run": "a comparison has one folder",
    "tracking": "how runs are tracked makes no arm; write a list of trackers in brackets, tracking=[tensorboard,wandb]",
}


def shown_rate(rate: float) -> str:
    """A learning rate as it is typed: 1e-4, 2.5e-5, 0.05."""
    if rate >= 0.01:
        return f"{rate:g}"
    digits, _, power = f"{rate:.5e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


@dataclass(frozen=True)
class Variant:
    """One setting of everything but the seed: its learning rate, and its whole configuration."""

    name: str
    config: Config

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.config.optim.lr

    @property
    def identity(self) -> Document:
        """What its runs have in common: equal for two variants whose runs are the same."""
        document = self.config.model_dump(mode="json", exclude={"run", "seed"})
        document["regulator"] = _method(self.config)
        return document


def _method(config: Config) -> str:
    """The regulator's shortest text; as it was typed, if it has none because its class is no dataclass."""
    try:
        return regulators.text(config.build_regulator())
    except ValueError:
        return config.regulator


@dataclass(frozen=True)
class PlannedArm:
    """One method: the settings in which it differs, and a variant for each learning rate that it is tuned over."""

    name: str
    settings: Mapping[str, Any]
    variants: tuple[Variant, ...]


def folder_name(variant: str) -> str:
    """A name for the folder of a variant's runs: readable, and another one for every variant."""
    if re.fullmatch(r"\w[\w.=-]{0,59}", variant, re.ASCII):
        return variant
    digest = hashlib.sha256(" ".join(variant.split()).encode()).hexdigest()[:6]
    readable = re.sub(r"[^\w.=]+", "-", variant, flags=re.ASCII)[:60].strip("-.")
    return f"{readable}-{digest}"


def alternatives(key: str, text: str) -> list[str]:
    """The parts of a value typed after ``key=``: one, unless it is an axis.

    ``;`` always separates. ``,`` separates the values of plain settings, outside brackets and quotes: a value that is
    itself a list is written ``[a, b]``, a sentence with commas in quotes.
    """
    parts = split_outside(text, ";")
    if len(parts) == 1 and key not in TEXTS:
        parts = split_outside(text, ",")
    parts = [part.strip() for part in parts]
    if len(parts) > 1 and not all(parts):
        raise ConfigError([f"{key}={short(text)[1:-1]}: part {parts.index('') + 1} of {len(parts)} is empty"])
    return parts


def build(document: Document, overrides: Sequence[str], *, tuned: bool) -> list[PlannedArm]:
    """The arms of ``document`` (a recipe, with ``axes`` and ``arms`` if it is a comparison's) and typed overrides.

    With ``tuned``, learning rates are variants of an arm; otherwise every rate is an arm of its own.
    """
    document = dict(document)
    axes = _axes(document.pop("axes", None))
    listed = _listed(document.pop("arms", None))
    fixed: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = alternatives(key.strip(), value) if equals else [value]
        _check_commas(key.strip(), value)
        axes.pop(key.strip(), None)
        if len(parts) > 1:
            axes[key.strip()] = [(part, part) for part in parts]
        else:
            fixed.append(override)
    _check_keys(document, fixed, axes, listed)
    rates = axes.pop(RATE, None)
    if tuned and rates is None:
        raise ConfigError(["tune chooses a learning rate for each arm: give several, such as optim.lr=5e-5,1e-4,2e-4"])
    inner = [] if rates is None else [(RATE, shown, typed) for shown, typed in rates]
    if inner and not tuned:
        axes[RATE], inner = [(shown, typed) for _, shown, typed in inner], []
    arms = []
    for named, chosen in listed:
        for point in product(*axes.values()):
            values = [*chosen, *((key, *each) for key, each in zip(axes, point, strict=True))]
            arms.append(_arm(named, document, fixed, values, inner))
    _check_distinct(arms)
    return arms


def _check_commas(key: str, value: str) -> None:
    """A comma between two methods is a mistake: composing them, as its message would say, is not what was meant."""
    parts = [part.strip() for group in split_outside(value, ";") for part in split_outside(group, ",")]
    if key in TEXTS and len(parts) > len(split_outside(value, ";")):
        meant = "; ".join(filter(None, parts))
        raise ConfigError([f'{key}={short(value)[1:-1]}: to compare, separate with ";": {key}="{meant}"'])


Value = tuple[str, str, str]  # a key, its value as it is shown, and as it is typed


def _arm(name: str, document: Document, fixed: list[str], values: list[Value], rates: list[Value]) -> PlannedArm:
    """The arm with these values, and each of the learning rates in turn."""
    shown = name or ", ".join(text if key == "regulator" else f"{key}={text}" for key, text, _ in values)
    variants = []
    for rate in [[each] for each in rates] or [[]]:
        typed = [*fixed, *(f"{key}={text}" for key, _, text in [*values, *rate])]
        try:
            config = restore(merge(document, split_overrides(typed)), trust=True)
        except ConfigError as error:
            raise ConfigError([f"arm {shown}: {line}" if shown else line for line in error.problems]) from None
        label = f"{shown}, {RATE}={rate[0][1]}" if rate else shown
        variants.append(Variant(label or _method(config), config))
    return PlannedArm(shown or variants[0].name, {key: text for key, text, _ in values}, tuple(variants))


def _axes(written: Any) -> dict[str, list[tuple[str, str]]]:
    """The axes of a file, each a list of values: as they are shown, and as they would be typed."""
    if written is None:
        return {}
    if not isinstance(written, Mapping) or not all(isinstance(v, list) and v for v in written.values()):
        example = "such as regulator: [grpo, ar]"
        raise ConfigError([f"axes = {short(written)}: must have a list of values for each key, {example}"])
    return {str(key): [(_shown(value), _typed(value)) for value in values] for key, values in written.items()}


def _listed(written: Any) -> list[tuple[str, list[Value]]]:
    """The arms that a file lists, each with its name, if it has one, and its settings; one without any for none."""
    if written is None:
        return [("", [])]
    if not isinstance(written, list) or not written or not all(isinstance(arm, Mapping) and arm for arm in written):
        example = "such as - regulator: ar"
        raise ConfigError([f"arms = {short(written)}: must be a list of arms, each with settings, {example}"])
    for arm in written:
        name = arm.get("name", "")
        if isinstance(name, bool) or not isinstance(name, str | int | float) or not str(name).isprintable():
            raise ConfigError([f"arms: name = {short(name)}: must be text in one line"])
    return [
        (
            str(arm.get("name", "")),
            [(str(key), _shown(value), _typed(value)) for key, value in arm.items() if key != "name"],
        )
        for arm in written
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _typed(value: Any) -> str:
    return json.dumps(value)


def _check_keys(
    document: Document, fixed: Iterable[str], axes: Mapping[str, Any], listed: Iterable[tuple[str, list[Value]]]
) -> None:
    """Refuse axes over what all arms share, and keys that no setting has, before an arm is blamed for them."""
    differing = [*axes, *(key for _, values in listed for key, _, _ in values)]
    for key in differing:
        top = "task" if key in SHORT_FORMS else key.partition(".")[0]
        if top in SAME:
            raise ConfigError([f"{key} cannot differ between arms: {SAME[top]}"])
    typed = [override.partition("=")[0].strip() for override in fixed if "=" in override]
    known = set(Config.model_fields) | set(SHORT_FORMS)
    wrong = [key for key in dict.fromkeys([*document, *typed, *differing]) if key.partition(".")[0] not in known]
    if wrong:
        raise ConfigError([unknown_key(key, [*OWN, *SHORT_FORMS, *keys(document)]) for key in wrong])


def _check_distinct(arms: Sequence[PlannedArm]) -> None:
    """Refuse the same arm twice, however it is written, and two arms of one name."""
    if len(arms) < 2:
        raise ConfigError(
            [
                "there is one arm only, and nothing to compare it with: name several, separated by ; such as "
                'regulator="grpo; ar; lopti"'
            ]
        )
    seen: list[tuple[Document, str]] = []
    for arm in arms:
        rates = [variant.rate for variant in arm.variants]
        if twice := next((rate for i, rate in enumerate(rates) if rate in rates[:i]), None):
            raise ConfigError([f"{RATE} has {shown_rate(twice)} twice: leave one of them out"])
        for identity, name in seen:
            if identity == arm.variants[0].identity:
                raise ConfigError([f"arms {name!r} and {arm.name!r} are the same: leave one of them out"])
            if name.split() == arm.name.split():  # a folder is named after it, whatever the spaces
                raise ConfigError([f"two arms are named {name!r}: give one of them another name"])
        seen.append((arm.variants[0].identity, arm.name))


# The keys of a comparison itself, beside the settings of its runs.
OWN = ("seeds", "tune", "baseline", "jobs", "threads", "hours", "retries", "keep", "axes", "arms")
