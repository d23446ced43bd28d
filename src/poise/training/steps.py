"""A step: the state of the run before and after it, what it hands to those that follow the run, and its metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from poise.algorithms.base import FIRST, Algorithm, Memory, Trajectory
from poise.algorithms.collected import metrics_of
from poise.algorithms.sampler import POLICY, Counts
from poise.batch import Phase, Rows, TokenBatch
from poise.config.schema import Config
from poise.objective_settings import Settings
from poise.rewards import TrainerState
from poise.tasks import Task, epochs, several_turns


@dataclass(frozen=True)
class State:
    """Where a run is. With the weights and the optimizer's moments this is all that a checkpoint holds."""

    step: int = 0  # steps taken
    tokens: int = 0  # sampled since the run began, by all models, evaluations apart
    memory: Memory | None = None  # the algorithm's

    def ending(self, config: Config) -> str | None:
        """The setting, ``budget`` or ``steps``, that ends the run here; None if it goes on."""
        if config.budget is not None and self.tokens >= config.budget:
            return "budget"
        return "steps" if self.step >= config.steps else None

    def progress(self, config: Config, task: Task) -> TrainerState:
        """How far the run is, as reward functions see it."""
        return TrainerState(self.step, config.steps, epochs(task, config.seed, self.step * config.prompts))


class Clock:
    """Measures how the time of a step is spent, from now on."""

    def __init__(self) -> None:
        self.start, self.spent = time.perf_counter(), dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time inside this context to the part ``name``."""
        start = time.perf_counter()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: int) -> dict[str, float]:
        """``time/…`` in seconds, and the sampled tokens per second of the whole step."""
        total = time.perf_counter() - self.start
        parts = {f"time/{name}": seconds for name, seconds in self.spent.items()}
        parts["time/other"] = total - sum(self.spent.values())  # so that the parts add up to the step
        return {**parts, "time/step": total, "time/tokens_per_s": tokens / total}


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


def step_metrics(
    algorithm: Algorithm,
    counts: Counts,
    samples: Sequence[Trajectory],
    batch: TokenBatch,
    settings: Settings,
) -> dict[str, float]:
    """``reward/…`` and ``rollout/…`` of a step, and what the algorithm reports itself.

    They are over first attempts, whatever else was sampled, so that algorithms can be compared.
    """
    own = metrics_of(algorithm, samples)
    first = [row for row, sample in enumerate(samples) if sample.role == FIRST]
    if first and len(first) < len(samples):
        samples, batch = [samples[row] for row in first], batch.rows(first)
    sampled = rollout_metrics(samples, batch, settings)
    return {**reward_metrics(samples, batch), **reported_metrics(counts), **sampled, **own}


def reported_metrics(counts: Counts) -> dict[str, float]:
    """``reward/…``: the mean of each number that reward functions reported themselves, with ``log_metric``."""
    return {f"reward/{name}": sum(values) / len(values) for name, values in counts.reported.items()}


def turn_metrics(counts: Counts, task: Task) -> dict[str, float]:
    """``rollout/continued`` and ``rollout/reread`` of a task with several turns.

    The later turns that continued from keys that the engine had kept, and those that had to read their dialogue again.
    If problems were too long, ``rollout/too_long`` is their number.
    """
    names = ["continued", "reread"] * several_turns(task) + ["too_long"] * ("too_long" in counts.turns)
    return {f"rollout/{name}": float(counts.turns[name]) for name in names}


def reward_metrics(samples: Sequence[Trajectory], batch: TokenBatch) -> dict[str, float]:
    """``reward/…``: means over the responses; ``no_spread`` is the share whose advantages are all 0."""
    scores, n = [sample.score for sample in samples], len(samples)
    verdicts: dict[str, list[bool]] = {}
    for sample in samples:
        verdicts.setdefault(sample.problem.difficulty, []).append(sample.score.correct)
    parts = {name for score in scores for name in score.parts}
    rewards, groups = batch.rewards, batch.groups
    assert rewards is not None
    assert groups is not None
    return {
        "reward/mean": float(rewards.mean()),
        "reward/accuracy": sum(score.correct for score in scores) / n,
        **{f"reward/accuracy/{name}": sum(correct) / len(correct) for name, correct in sorted(verdicts.items())},
        "reward/no_spread": float((batch.token_advantages == 0).all(1).float().mean()),
        **{f"reward/{name}": sum(score.parts.get(name, 0.0) for score in scores) / n for name in sorted(parts)},
    }


def rollout_metrics(samples: Sequence[Trajectory], batch: TokenBatch, settings: Settings) -> dict[str, float]:
    """``rollout/…``: length, entropy, share finished; the mismatch too, if the sampler's log-probabilities differ."""
    assert batch.entropy is not None
    return {
        **(mismatch_metrics(batch, settings) if batch.sampler_logp is not None else {}),
        "rollout/length": float(batch.lengths.float().mean()),
        "rollout/entropy": float(batch.entropy[batch.mask].mean()),
        "rollout/finished": float(torch.tensor([sample.finished for sample in samples]).float().mean()),
    }


def token_metrics(counts: Counts, before: int) -> dict[str, int]:
    """``tokens/…``: sampled in a step, by all models together and by each other than the policy; ``total`` ever since.

    ``before`` is the number of tokens in the steps before it.
    """
    others = {f"tokens/{name}": count for name, count in counts.tokens.items() if name != POLICY}
    return {"tokens/sampled": counts.tokens.total(), **others, "tokens/total": before + counts.tokens.total()}


def mismatch_metrics(batch: TokenBatch, settings: Settings) -> dict[str, float]:
    """How the policy's log-probabilities differ from the sampler's, over all response tokens.

    ``importance`` is the mean importance weight before truncation, 1 if both agree; ``truncated`` the share of tokens
    whose weight is truncated; ``mismatch`` and ``mismatch_max`` the mean and the largest absolute log-ratio;
    ``mismatch_kl`` estimates KL(sampler ‖ policy), by k3.
    """
    assert batch.sampler_logp is not None
    cap = torch.inf if settings.importance_cap is None else settings.importance_cap
    gap = (batch.old_logp - batch.sampler_logp)[batch.mask].double()
    ratio, distance = gap.exp(), gap.abs()
    statistics = {
        "importance": ratio.mean(),
        "truncated": (ratio > cap).double().mean(),
        "mismatch": distance.mean(),
        "mismatch_max": distance.max(),
        "mismatch_kl": (torch.expm1(gap) - gap).mean(),
    }
    values = torch.stack([*statistics.values()]).tolist()
    return {f"rollout/{name}": value for name, value in zip(statistics, values, strict=True)}
