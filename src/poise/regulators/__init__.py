"""Token regulators: one file per method, one table of names.

>>> regulator = poise.regulators.parse("ar(alpha=0.3) | lopti(threshold=0.5)")
>>> for phase in regulator(batch): ...
"""

from poise.regulators.amplify import Amplify
from poise.regulators.ar import AdvantageReweighting
from poise.regulators.base import Compose, Function, Regulator, regulator
from poise.regulators.blame import Blame
from poise.regulators.clip_cov import ClipCov
from poise.regulators.constant import Constant
from poise.regulators.entropy import TopEntropy
from poise.regulators.identity import Identity
from poise.regulators.lopti import Lopti
from poise.regulators.names import TABLE, get, parse, text
from poise.regulators.nthr import NTHR
from poise.regulators.random_split import RandomSplit
from poise.regulators.scores import Scorer
from poise.regulators.stapo import Stapo
from poise.regulators.stare import Stare
from poise.regulators.summary import summary
from poise.regulators.tr_grpo import TokenRegulation
from poise.regulators.weights import token_weights

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
