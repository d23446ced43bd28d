"""The table of names, and the parser of a surrogate's text form."""

from __future__ import annotations

from inspect import signature

from poise._lib.calls import read_call
from poise._lib.errors import unknown
from poise.surrogates.base import Surrogate
from poise.surrogates.pointwise import Cispo, Clip, Dppo, Sapo
from poise.surrogates.surveyed import Gspo, KlCov, LpReg

TABLE: dict[str, type[Surrogate]] = {
    "clip": Clip,
    "cispo": Cispo,
    "gspo": Gspo,
    "sapo": Sapo,
    "dppo": Dppo,
    "kl-cov": KlCov,
    "lp-reg": LpReg,
}


def parse(text: str) -> Surrogate:
    """Build a surrogate from its text form: ``"gspo"``, ``"dppo(delta=0.2)"``. Values are Python literals."""
    name, args, settings = read_call(text)
    if name not in TABLE:
        raise ValueError(unknown("surrogate", name, TABLE))
    if args:
        raise ValueError(f"surrogate {name}: name the settings, {name}(setting=value)")
    if name == "clip" and settings:
        raise ValueError("surrogate clip: its settings are clip_low, clip_high and dual_clip of the objective")
    allowed = list(signature(TABLE[name]).parameters)
    for key in settings:
        if key not in allowed:
            raise ValueError(unknown(f"setting of surrogate {name}", key, allowed))
    return TABLE[name](**settings)
