"""Token regulators for reinforcement learning with verifiable rewards.

A regulator looks at one rollout batch and says, token by token, how much each may pull in the update:

>>> regulator = poise.regulators.parse("ar(alpha=0.2) | lopti(threshold=0.4)")
>>> for phase in regulator(poise.TokenBatch(old_logp, mask, advantages)): ...
"""

from poise import advantages, diagnostics, objective, regulators
from poise.batch import Phase, TokenBatch
from poise.head import Head
from poise.regulators import Regulator, token_weights

__version__ = "0.1.0"

__all__ = [
    "Head",
    "Phase",
    "Regulator",
    "TokenBatch",
    "__version__",
    "advantages",
    "diagnostics",
    "objective",
    "regulators",
    "token_weights",
]
