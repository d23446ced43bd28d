"""Settings of a regulator by name: ``regulator.alpha=0.3`` changes the one part of the regulator that has it."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches

from poise import regulators
from poise._lib import user_code
from poise._lib.errors import LONGEST, short
from poise.config.documents import ConfigError, Document


def change_regulator(text: str, settings: Document) -> str:
    """The text form of a regulator with some settings of its parts changed by name."""
    try:
        parts = parts_of(text)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"regulator = {short(text)}: {error}"]) from None
    problems = []
    changes: dict[int, Document] = {}
    for key, value in settings.items():
        owners = [at for at, part in enumerate(parts) if key in settings_of(part)]
        if len(owners) == 1:
            changes.setdefault(owners[0], {})[key] = value
        else:
            problems.append(_no_single_owner(key, [parts[at] for at in owners], text, parts))
    for at, change in changes.items():  # all settings of a part at once: their limits may depend on each other
        try:
            parts[at] = _changed(parts[at], change)
            regulators.text(parts[at])
        except (TypeError, ValueError) as error:
            asked = ", ".join(f"regulator.{key} = {short(value)}" for key, value in change.items())
            problems.append(f"{asked}: {error}")
    if problems:
        raise ConfigError(problems)
    return " | ".join(regulators.text(part) for part in parts)


def parts_of(text: str) -> list[regulators.Regulator]:
    """The regulators between the bars."""
    whole = regulators.parse(text)
    return list(whole.parts) if isinstance(whole, regulators.Compose) else [whole]


def _no_single_owner(key: str, owners: list[regulators.Regulator], text: str, parts: list[regulators.Regulator]) -> str:
    if owners:
        names = " and ".join(regulators.text(part) for part in owners)
        return f"regulator.{key}: {names} both have it; write the regulator out, regulator={text!r}"
    own = [name for part in parts for name in settings_of(part)]
    near = get_close_matches(key[:LONGEST].lower(), own, n=1, cutoff=0.5)
    guess = f"; did you mean 'regulator.{near[0]}'?" if near else "."
    others = [name for name, kind in regulators.TABLE.items() if key in inspect.signature(kind).parameters]
    hint = f"; {key} is a setting of {', '.join(others)}" if others else ""
    has = ", ".join(own) or "no settings"
    targets = [part.function if isinstance(part, regulators.Function) else part for part in parts]
    classes = [type(target) for target in targets if not inspect.isroutine(target)]
    forgotten = next(filter(None, map(user_code.forgotten_dataclass, classes)), "")
    return f"unknown key 'regulator.{short(key)[1:-1]}'{guess} ({short(text)} has: {has}{hint}){forgotten}"


def settings_of(part: regulators.Regulator) -> list[str]:
    """The names of a regulator's settings."""
    target = part.function if isinstance(part, regulators.Function) else part
    if is_dataclass(target):
        return [field.name for field in fields(target) if field.init]
    return list(inspect.signature(target).parameters)[1:]  # a function; the first is the batch


def _changed(part: regulators.Regulator, change: Document) -> regulators.Regulator:
    if not isinstance(part, regulators.Function):
        return replace(part, **change)  # type: ignore[type-var] # a regulator with settings is a dataclass
    if is_dataclass(part.function) and not isinstance(part.function, type):
        return replace(part, function=replace(part.function, **change))
    return replace(part, settings=tuple((dict(part.settings) | change).items()))
