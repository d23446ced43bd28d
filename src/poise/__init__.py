"""Token regulators for reinforcement learning with verifiable rewards.

A regulator reads one rollout batch and weights each token's contribution to the update:

>>> regulator = poise.regulators.parse("ar(alpha=0.2) | lopti(threshold=0.4)")
>>> for phase in regulator(poise.TokenBatch(old_logp, mask, advantages)): ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poise import advantages, diagnostics, objective, regulators, surrogates
    from poise.algorithms import algorithm
    from poise.batch import Phase, TokenBatch
    from poise.head import Head
    from poise.regulators import Regulator, regulator, token_weights
    from poise.tasks import task

__version__ = "0.1.0"

__all__ = [
    "Head",
    "Phase",
    "Regulator",
    "TokenBatch",
    "__version__",
    "advantages",
    "algorithm",
    "diagnostics",
    "objective",
    "regulator",
    "regulators",
    "surrogates",
    "task",
    "token_weights",
]

# Imported on first use: the command line must set up the process before torch is imported (``poise.__main__``).
_MODULES = ("advantages", "batch", "diagnostics", "head", "objective", "regulators", "surrogates")
_OWNERS = {
    "Head": "head", "Phase": "batch", "Regulator": "regulators", "TokenBatch": "batch",
    "algorithm": "algorithms", "regulator": "regulators", "task": "tasks", "token_weights": "regulators",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"poise.{name}")
    if name in _OWNERS:
        value = globals()[name] = getattr(import_module(f"poise.{_OWNERS[name]}"), name)
        return value
    raise AttributeError(f"module 'poise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
