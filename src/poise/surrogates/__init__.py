"""Surrogates: the policy term of a token as a function of its current probability. ``TABLE`` lists them.

>>> objective.Settings(surrogate="dppo(delta=0.2)")

A regulator weights tokens before the update; a surrogate acts through the ratio r = π/π_old of the current policy. The
weights multiply the surrogate's value, so every surrogate works with every regulator. With one optimizer step per batch
r = 1; apart from how they average over tokens, all surrogates but ``lp-reg`` then have the same gradient as ``clip``.
docs/surrogates.md compares them.

A surrogate sees one token. Data that depend on other tokens (GSPO's sequence ratio, the tokens that KL-Cov and Lp-Reg
choose) come from a ``Survey``. It is computed from the current log-probabilities of the whole mini-batch, before the
backward pass, which treats it as a constant. So the split into micro-batches does not change the result. A survey does
not depend on the phase.
"""

from __future__ import annotations

from inspect import isabstract

from poise._lib import user_code
from poise._lib.calls import read_call
from poise.surrogates.base import SEQUENCE_MEAN, Clip, Surrogate, Survey, Terms, clipped, k3
from poise.surrogates.pointwise import Cispo, Dppo, Sapo
from poise.surrogates.surveyed import Gspo, KlCov, LpReg

__all__ = [
    "SEQUENCE_MEAN",
    "TABLE",
    "Cispo",
    "Clip",
    "Dppo",
    "Gspo",
    "KlCov",
    "LpReg",
    "Sapo",
    "Surrogate",
    "Survey",
    "Terms",
    "clipped",
    "k3",
    "parse",
]

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
    """Build a surrogate from its text form: ``"gspo"``, ``"dppo(delta=0.2)"``, ``"mine.py:Mine(power=2)"``.

    Values are Python literals. A user's surrogate is a subclass of ``Surrogate``, named by its file or its dotted path.
    Loading it runs that file or module: see ``_lib.user_code``.
    """
    name, args, settings = read_call(text)
    kind = user_code.find("surrogate", name, TABLE, Surrogate)
    if isinstance(kind, Surrogate):  # an instance, passed from Python
        return kind
    if args:
        raise ValueError(f"surrogate {name}: pass its settings by name, {name}(setting=value)")
    if name == "clip" and settings:
        raise ValueError("surrogate clip: set objective.clip_low, objective.clip_high and objective.dual_clip instead")
    if isabstract(kind):
        raise TypeError(f"surrogate {name} has no method value(self, logp, parts), which returns each token's value")
    try:
        surrogate: Surrogate = user_code.build(f"surrogate {name}", kind, settings)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return surrogate
