"""What is kept of a step: its numbers, and every token that it learned from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from poise.batch import Phase, TokenBatch
from poise.rollout.base import Rollouts
from poise.tasks import Problem, Score


def token_records(
    step: int,
    problems: Sequence[Problem],
    texts: Sequence[str],
    scores: Sequence[Score],
    rollouts: Rollouts,
    batch: TokenBatch,
    phases: Sequence[Phase],
    decode: Callable[[int], str],
) -> Iterator[dict[str, Any]]:
    """Every response of a step, token by token. ``problems`` has one for each response."""
    given = batch.token_advantages
    for i, (problem, text, score) in enumerate(zip(problems, texts, scores, strict=True)):
        mask = rollouts.mask[i]
        ids = rollouts.tokens[i][mask].tolist()
        yield {
            "step": step,
            "problem": problem.id,
            "difficulty": problem.difficulty,
            "prompt": problem.prompt,
            "text": text,
            "reward": score.reward,
            "correct": score.correct,
            "parts": dict(score.parts),
            "finished": bool(rollouts.finished[i]),
            "tokens": {
                "id": ids,
                "text": [decode(token) for token in ids],
                "logp": _rounded(batch.old_logp[i][mask]),
                "entropy": _rounded(rollouts.entropy[i][mask]),
                "advantage": _rounded(given[i][mask]),
                "weight": {phase.name: _rounded(phase.policy[i][mask]) for phase in phases},
            },
        }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


def reward_metrics(scores: Sequence[Score], batch: TokenBatch) -> dict[str, float]:
    """``reward/…``: means over the responses; ``no_spread`` is the share whose group had nothing to compare."""
    n = len(scores)
    parts = {name for score in scores for name in score.parts}
    rewards, groups = batch.rewards, batch.groups
    assert rewards is not None
    assert groups is not None
    return {
        "reward/mean": float(rewards.mean()),
        "reward/accuracy": sum(score.correct for score in scores) / n,
        "reward/no_spread": float((batch.token_advantages == 0).all(1).float().mean()),
        **{f"reward/{name}": sum(score.parts.get(name, 0.0) for score in scores) / n for name in sorted(parts)},
    }


def rollout_metrics(rollouts: Rollouts, batch: TokenBatch) -> dict[str, float]:
    """``rollout/…``: what was sampled and, where old log-probabilities were recomputed, how far they are off."""
    differs = {}
    if batch.sampler_logp is not None:
        ratio = (batch.old_logp - batch.sampler_logp)[batch.mask]
        differs = {"rollout/importance": float(ratio.exp().mean()), "rollout/mismatch": float(ratio.abs().mean())}
    return {
        **differs,
        "rollout/length": float(rollouts.mask.sum(1).float().mean()),
        "rollout/entropy": float(rollouts.entropy[rollouts.mask].mean()),
        "rollout/finished": float(rollouts.finished.float().mean()),
    }


class Clock:
    """Where the time of a step went."""

    def __init__(self) -> None:
        self.start, self.spent = time.perf_counter(), dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a part."""
        start = time.perf_counter()
        yield
        self.spent[name] = time.perf_counter() - start

    def metrics(self, tokens: int) -> dict[str, float]:
        """``time/…`` in seconds, and the sampled tokens per second of the whole step."""
        total = time.perf_counter() - self.start
        named = {f"time/{name}": seconds for name, seconds in self.spent.items()}
        named["time/other"] = total - sum(self.spent.values())  # so that the parts add up to the step
        return {**named, "time/step": total, "time/tokens_per_s": tokens / total}
