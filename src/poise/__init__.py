"""Token regulators for reinforcement learning with verifiable rewards.

A regulator reads one rollout batch and weights each token's contribution to the update:

>>> regulator = poise.regulators.parse("ar(alpha=0.2) | lopti(threshold=0.4)")
>>> for phase in regulator(poise.TokenBatch(old_logp, mask, advantages)): ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poise import advantages, diagnostics, objective, regulators, rewards, surrogates, tasks
    from poise.advantages import advantage
    from poise.api import Result, train
    from poise.batch import Phase, TokenBatch
    from poise.head import Head
    from poise.models.loading import load_policy
    from poise.models.policy import Policy
    from poise.regulators import Regulator, regulator, token_weights
    from poise.sampling import choose as engines
    from poise.sampling.algorithms import Grpo, Trajectory, algorithm
    from poise.sampling.sampler import Sampler
    from poise.surrogates import Surrogate
    from poise.tasks import task
    from poise.trainer import Trainer
    from poise.training.batches import drop_failed, make_batch
    from poise.training.config.schema import Config
    from poise.training.update import UpdatePlan, backward, mini_batches

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Grpo",
    "Head",
    "Phase",
    "Policy",
    "Regulator",
    "Result",
    "Sampler",
    "Surrogate",
    "TokenBatch",
    "Trainer",
    "Trajectory",
    "UpdatePlan",
    "__version__",
    "advantage",
    "advantages",
    "algorithm",
    "backward",
    "diagnostics",
    "drop_failed",
    "engines",
    "load_policy",
    "make_batch",
    "mini_batches",
    "objective",
    "regulator",
    "regulators",
    "rewards",
    "surrogates",
    "task",
    "tasks",
    "token_weights",
    "train",
]

# Imported on first use: the command line must set up the process before torch is imported (``poise.__main__``), and the
# library needs nothing but torch.
_LIBRARY = ("advantages", "batch", "diagnostics", "head", "objective", "regulators", "rewards", "surrogates", "tasks")
_MODULES = {name: f"poise.{name}" for name in _LIBRARY} | {
    "config": "poise.training.config",
    "engines": "poise.sampling.choose",
}
_OWNERS = {
    "Head": "head", "Phase": "batch", "Regulator": "regulators", "Surrogate": "surrogates", "TokenBatch": "batch",
    "advantage": "advantages", "regulator": "regulators", "task": "tasks", "token_weights": "regulators",
    # The parts of a training loop, which also need transformers.
    "Grpo": "sampling.algorithms", "Policy": "models.policy", "Sampler": "sampling.sampler",
    "Trajectory": "sampling.algorithms", "UpdatePlan": "training.update", "algorithm": "sampling.algorithms",
    "backward": "training.update", "drop_failed": "training.batches", "load_policy": "models.loading",
    "make_batch": "training.batches", "mini_batches": "training.update",
    # The trainer.
    "Config": "training.config.schema", "Result": "api", "Trainer": "trainer", "train": "api",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _OWNERS:
        value = globals()[name] = getattr(import_module(f"poise.{_OWNERS[name]}"), name)
        return value
    raise AttributeError(f"module 'poise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
