"""Token regulators: one file per method, one table of names.

>>> regulator = poise.regulators.parse("ar(alpha=0.3) | lopti(threshold=0.5)")
>>> for phase in regulator(batch): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from poise._lib import user_code as _user_code
from poise._lib.calls import read_call, split_outside
from poise._lib.errors import check_settings, unknown
from poise.batch import TokenBatch
from poise.regulators.amplify import Amplify
from poise.regulators.ar import AdvantageReweighting
from poise.regulators.base import Compose, Function, Regulator, Scorer, as_regulator, regulator, summary
from poise.regulators.blame import Blame
from poise.regulators.clip_cov import ClipCov
from poise.regulators.constant import Constant
from poise.regulators.entropy import TopEntropy
from poise.regulators.identity import Identity
from poise.regulators.lopti import Lopti
from poise.regulators.nthr import NTHR
from poise.regulators.random_split import RandomSplit
from poise.regulators.stapo import Stapo
from poise.regulators.stare import Stare
from poise.regulators.tr_grpo import TokenRegulation

__all__ = [
    "NTHR",
    "TABLE",
    "AdvantageReweighting",
    "Amplify",
    "Blame",
    "ClipCov",
    "Compose",
    "Constant",
    "Function",
    "Identity",
    "Lopti",
    "RandomSplit",
    "Regulator",
    "Scorer",
    "Stapo",
    "Stare",
    "TokenRegulation",
    "TopEntropy",
    "get",
    "parse",
    "regulator",
    "summary",
    "text",
    "token_weights",
]

TABLE: dict[str, type[Regulator]] = {
    "grpo": Identity,
    "ar": AdvantageReweighting,
    "lopti": Lopti,
    "tr-grpo": TokenRegulation,
    "nthr": NTHR,
    "amplify": Amplify,
    "entropy": TopEntropy,
    "clip-cov": ClipCov,
    "stapo": Stapo,
    "stare": Stare,
    "blame": Blame,
    "constant": Constant,
    "random-split": RandomSplit,
}


def get(name: str, *args: Any, **settings: Any) -> Regulator:
    """Build a regulator from its name or dotted path: ``get("ar", alpha=0.2)``, ``get("mypackage.module.Mine")``.

    A dotted path (``package.module.Name`` or ``package.module:Name``) names a subclass of ``Regulator``, or a function
    or class marked with ``@poise.regulator``. Loading it runs that module's code: see ``_lib.user_code``.
    """
    if not args and not settings and any(sign in name for sign in "(|"):
        return parse(name)
    target = _user_code.find("regulator", name, TABLE, Regulator)
    if isinstance(target, Regulator):
        check_settings(name, settings, [])
        return target
    if inspect.isclass(target):
        return _build(name, target, args, settings)
    if args:
        raise TypeError(f"{name}: pass a function's settings by name, {name}(setting=value)")
    check_settings(name, settings, list(inspect.signature(target).parameters)[1:])
    return Function(target, tuple(settings.items()))


def parse(text: str | Callable[[TokenBatch], Any]) -> Regulator:
    """Build a regulator from its text form: ``"ar(alpha=0.3) | lopti(threshold=0.5)"``. Values are Python literals.

    A regulator is returned unchanged; another callable is wrapped in ``Function``.
    """
    if not isinstance(text, str):
        return as_regulator(text)
    parts = [_parse_one(part, text) for part in split_outside(text, "|")]
    return parts[0] if len(parts) == 1 else Compose(tuple(parts))


def text(regulator: Regulator) -> str:
    """The text form of a regulator, such that ``parse(text(r)) == r``. Default settings are omitted."""
    if isinstance(regulator, Compose):
        return " | ".join(text(part) for part in regulator.parts)
    names = {kind: name for name, kind in TABLE.items()}
    target: Any = regulator.function if isinstance(regulator, Function) else regulator
    if is_dataclass(target):
        kind: Any = type(target)
        values = [(f.name, getattr(target, f.name)) for f in fields(target) if getattr(target, f.name) != f.default]
    elif isinstance(regulator, Function) and hasattr(target, "__qualname__"):
        kind, values = target, list(regulator.settings)
    else:
        raise ValueError(f"{regulator!r} has no text form: it is neither a dataclass nor a function with a name")
    name = names.get(kind) or _user_code.path_to(kind)
    if "<" in name:
        raise ValueError(f"{name} has no text form: it is not defined at the top of a module")
    return name + (f"({', '.join(f'{k}={v!r}' for k, v in values)})" if values else "")


def _build(name: str, kind: type, args: tuple[Any, ...], settings: dict[str, Any]) -> Regulator:
    if inspect.isabstract(kind):
        raise TypeError(f"{name} has no method phases(self, batch), which returns [Phase.of(batch, weights)]")
    instance = _user_code.build(name, kind, settings, args)
    if isinstance(instance, Regulator):
        return instance
    if callable(instance):
        return Function(instance)
    raise TypeError(f"{name} is not a regulator: it is not callable")


def _parse_one(part: str, whole: str) -> Regulator:
    name, args, settings = read_call(part, whole)
    return get(name, *args, **settings)


def token_weights(regulator: str | Regulator, **batch: Any) -> Tensor:
    """(B, T) policy weights of a regulator with one phase; the keywords are the fields of ``TokenBatch``.

    >>> weights = poise.token_weights("ar(alpha=0.2)", old_logp=old_logp, advantages=advantages, mask=mask)
    >>> advantages = advantages[:, None] * weights

    Weights are never negative, so a weight on the advantage multiplies the clipped policy term by the same number, for
    any clip. For the weights of the KL and entropy terms (TR-GRPO), call the regulator and read ``Phase.kl``.
    """
    for name in batch:
        if name not in TokenBatch.__dataclass_fields__:
            hint = "settings go into the text form, as in 'ar(alpha=0.2)'"
            raise TypeError(unknown("field of TokenBatch", name, TokenBatch.__dataclass_fields__) + f"; {hint}")
    phases = parse(regulator)(TokenBatch(**batch))
    if len(phases) > 1:
        names = ", ".join(phase.name for phase in phases)
        raise ValueError(
            f"{regulator} updates in {len(phases)} phases ({names}), but token_weights returns only one tensor; loop "
            "with `for phase in poise.regulators.parse(...)(batch)`, and make one pass of optimizer steps per phase"
        )
    return phases[0].policy
