"""A step's data: the run's ``State`` before and after, the ``StepResult`` for subscribers, the clock, the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil

import torch

from poise.batch import Phase, Rows, TokenBatch
from poise.objective_settings import Settings
from poise.sampling.sampler import POLICY, Counts
from poise.sampling.trajectories import FIRST, Memory, Trajectory
from poise.tasks import Task, epochs
from poise.tasks.rewards import TrainerState
from poise.training.config.schema import Config


@dataclass(frozen=True)
class State:
    """The progress of a run. A checkpoint contains only this state, the weights and the optimizer's state."""

    step: int = 0  # the last finished step
    tokens: int = 0  # tokens sampled by all models since the run began, without evaluations
    memory: Memory | None = None  # the algorithm's own state

    def ending(self, steps: int, budget: int | None) -> str | None:
        """Which setting ("budget" or "steps") stops the run here; None if training continues."""
        if budget is not None and self.tokens >= budget:
            return "budget"
        return "steps" if self.step >= steps else None

    def progress(self, config: Config, task: Task) -> TrainerState:
        """Return the run's progress in the form that reward functions receive."""
        return TrainerState(self.step, config.steps, epochs(task, config.seed, self.step * config.prompts))


class Clock:
    """Measures how a step spends its time. The clock starts when it is created."""

    def __init__(self) -> None:
        self.start, self.spent = time.perf_counter(), dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent in this context to ``time/NAME``."""
        start = time.perf_counter()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: int) -> dict[str, float]:
        """``time/…`` in seconds, and the sampled tokens per second of the whole step."""
        total = time.perf_counter() - self.start
        parts = {f"time/{name}": seconds for name, seconds in self.spent.items()}
        parts["time/other"] = total - sum(self.spent.values())  # so that the parts add up to ``time/step``
        return {**parts, "time/step": total, "time/tokens_per_s": tokens / total}


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of one step. A subscriber may add to ``metrics``, and later subscribers see the addition."""

    state: State  # after the step
    metrics: dict[str, float]  # without times, which the recorder adds
    clock: Clock
    ending: str | None = None  # the setting ("budget" or "steps") that stops the run here
    trajectories: Sequence[Trajectory] = ()  # the trained rows; empty if no reward applied
    batch: TokenBatch | None = None  # one row per trajectory
    phases: Sequence[Phase] = ()  # for ``rows`` of the batch
    rows: Rows = field(default_factory=lambda: slice(None))  # the trained rows of the batch; all by default


def response_metrics(trajectories: Sequence[Trajectory], batch: TokenBatch, settings: Settings) -> dict[str, float]:
    """The metrics ``reward/…`` and ``rollout/…`` of a step.

    They cover only first attempts, so that they are comparable between algorithms.
    """
    first = [row for row, each in enumerate(trajectories) if each.role == FIRST]
    if first and len(first) < len(trajectories):
        trajectories, batch = [trajectories[row] for row in first], batch.rows(first)
    return {**reward_metrics(trajectories, batch), **rollout_metrics(trajectories, batch, settings)}


def counted_metrics(counts: Counts) -> dict[str, float]:
    """Metrics of the sampler's counts: values that reward functions reported (``log_metric``), turns and tokens."""
    reported = {f"reward/{name}": sum(values) / len(values) for name, values in counts.reported.items()}
    turns = {f"rollout/{n}": float(counts.turns[n]) for n in ("continued", "reread", "too_long") if n in counts.turns}
    others = {f"tokens/{name}": count for name, count in counts.tokens.items() if name != POLICY}
    return {**reported, **turns, "tokens/sampled": counts.tokens.total(), **others}


def reward_metrics(samples: Sequence[Trajectory], batch: TokenBatch) -> dict[str, float]:
    """``reward/…``: means over the responses. ``no_spread`` is the share of responses whose advantages are all 0."""
    scores, n = [sample.score for sample in samples], len(samples)
    by_difficulty: dict[str, list[bool]] = {}
    for sample in samples:
        by_difficulty.setdefault(sample.problem.difficulty, []).append(sample.score.correct)
    parts = {name for score in scores for name in score.parts}
    rewards, groups = batch.rewards, batch.groups
    assert rewards is not None
    assert groups is not None
    return {
        "reward/mean": float(rewards.mean()),
        "reward/accuracy": sum(score.correct for score in scores) / n,
        **{f"reward/accuracy/{name}": sum(correct) / len(correct) for name, correct in sorted(by_difficulty.items())},
        "reward/no_spread": float((batch.token_advantages == 0).all(1).float().mean()),
        **{f"reward/{name}": sum(score.parts.get(name, 0.0) for score in scores) / n for name in sorted(parts)},
    }


def rollout_metrics(samples: Sequence[Trajectory], batch: TokenBatch, settings: Settings) -> dict[str, float]:
    """``rollout/…``: length, entropy, share of finished responses; the mismatch, if the batch has ``sampler_logp``."""
    assert batch.entropy is not None
    return {
        **(mismatch_metrics(batch, settings) if batch.sampler_logp is not None else {}),
        "rollout/length": float(batch.lengths.float().mean()),
        "rollout/entropy": float(batch.entropy[batch.mask].mean()),
        "rollout/finished": float(torch.tensor([sample.finished for sample in samples]).float().mean()),
    }


def mismatch_metrics(batch: TokenBatch, settings: Settings) -> dict[str, float]:
    """How the policy's log-probabilities differ from the sampler's, over all response tokens."""
    assert batch.sampler_logp is not None
    cap = torch.inf if settings.importance_cap is None else settings.importance_cap
    gap = (batch.old_logp - batch.sampler_logp)[batch.mask].double()
    ratio, distance = gap.exp(), gap.abs()
    statistics = {
        "importance": ratio.mean(),
        "truncated": (ratio > cap).double().mean(),
        "mismatch": distance.mean(),
        "mismatch_p999": distance.sort().values[ceil(0.999 * len(distance)) - 1],  # kthvalue is not deterministic
        "mismatch_max": distance.max(),
        "mismatch_kl": (torch.expm1(gap) - gap).mean(),
    }
    values = torch.stack([*statistics.values()]).tolist()
    return {f"rollout/{name}": value for name, value in zip(statistics, values, strict=True)}
