"""Where a run is between two steps, and what a step hands to those that follow the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from poise.algorithms.base import Memory, Trajectory
from poise.batch import Phase, Rows, TokenBatch
from poise.training.metrics import Clock


@dataclass(frozen=True)
class State:
    """Where a run is. With the weights and the optimizer's moments this is all that a checkpoint holds."""

    step: int = 0  # steps taken
    tokens: int = 0  # sampled since the run began, by all models, evaluations apart
    memory: Memory | None = None  # the algorithm's


@dataclass(frozen=True, eq=False)
class StepResult:
    """One step. Who follows the run may add to ``metrics``, and is seen by those that come later."""

    state: State  # after the step
    metrics: dict[str, float]
    clock: Clock
    trajectories: Sequence[Trajectory] = ()  # what was learned from; none, if no reward applied
    batch: TokenBatch | None = None  # the rows of the trajectories
    phases: Sequence[Phase] = ()  # of ``rows`` of the batch
    rows: Rows = field(default_factory=lambda: slice(None))  # all
