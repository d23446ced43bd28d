"""Records of a step: its metrics, its responses, and their tokens."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from poise import __version__
from poise._lib.fingerprint import package_hash
from poise.algorithms.base import FIRST, Algorithm, Trajectory
from poise.algorithms.collected import metrics_of
from poise.algorithms.sampler import POLICY, Sampler
from poise.batch import Phase, TokenBatch
from poise.objective_settings import Settings
from poise.runs.console import barred
from poise.runs.folder import RunFolder
from poise.tasks import Task, gold_answer, several_turns

STARTS = ("package", "python", "torch", "transformers", "device", "threads")  # what may differ between two starts


def response_records(step: int, samples: Sequence[Trajectory], task: Task) -> Iterator[dict[str, Any]]:
    """Every response of a step: the problem, the text, and the verifier's score.

    ``gold`` is the right answer, ``answer`` what the verifier read; a record lacks what is not known.
    """
    for sample in samples:
        gold, answer = gold_answer(task, sample.problem), sample.score.answer
        yield {
            "step": step,
            "problem": sample.problem.id,
            "difficulty": sample.problem.difficulty,
            "prompt": sample.problem.prompt,
            "text": sample.text,
            "reward": sample.score.reward,
            "correct": sample.score.correct,
            "parts": dict(sample.score.parts),
            "finished": sample.finished,
            **({"gold": gold} if gold is not None else {}),
            **({"answer": answer} if isinstance(answer, str) else {}),
            **({"environment": said} if (said := environment_turns(sample)) else {}),
            **({"role": sample.role} if sample.role != FIRST else {}),
            **({"notes": dict(sample.notes)} if sample.notes else {}),
        }


def environment_turns(sample: Trajectory) -> list[tuple[int, str]]:
    """What the environment said between the replies, each with the number of the model's own tokens before it."""
    texts: list[str] = []
    for before, message in pairwise(sample.messages):
        if message["role"] == "assistant":
            continue
        if before["role"] == "assistant":
            texts.append(message["content"])
        else:
            texts[-1] += "\n" + message["content"]
    ends = sample.own[:-1] & ~sample.own[1:]  # own tokens that the environment's follow
    return list(zip(sample.own.cumsum(0)[:-1][ends].tolist(), texts, strict=False))


def dialogue(sample: Trajectory) -> str:
    """The replies, with what the environment said between them, behind bars."""
    own = (message["role"] == "assistant" for message in sample.messages)
    texts = (message["content"] for message in sample.messages)
    return "".join(text if mine else barred(text) for mine, text in zip(own, texts, strict=True)) or sample.text


def shown(sample: Trajectory) -> tuple[str, str, float, bool]:
    """A sample as the console shows it."""
    return sample.problem.prompt, dialogue(sample), sample.score.reward, sample.score.correct


def token_arrays(batch: TokenBatch, phases: Sequence[Phase]) -> dict[str, Tensor]:
    """The tokens of those responses, end to end: response i has ``start[i]:start[i + 1]`` of every other array.

    ``weight/NAME`` is the policy weight in phase NAME. A regulator's per-token values keep their own names.
    """
    mask = batch.mask
    assert batch.targets is not None
    assert batch.entropy is not None
    arrays = {
        "id": batch.targets[mask].int(),
        "logp": batch.old_logp[mask].float(),
        "entropy": batch.entropy[mask].float(),
        "advantage": batch.token_advantages[mask].float(),
        **{f"weight/{phase.name}": phase.policy[mask].float() for phase in phases},
        **{name: values[mask].float() for phase in phases for name, values in phase.tokens.items()},
    }
    lengths = mask.sum(1)
    arrays["start"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    return {name: values.cpu() for name, values in arrays.items()}


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and the hardware that a run's figures depend on. ``package`` is a hash of poise's own code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "poise": __version__,
        "python": platform.python_version(),
        "package": package_hash()[:12],
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "system": platform.system(),
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
    }


def begun(folder: RunFolder) -> datetime:
    """When a run began, by ``environment.json``: now, if it has not begun."""
    saved = folder.read_json("environment.json")
    try:
        return datetime.fromisoformat(saved["began"])
    except (TypeError, KeyError, ValueError):
        return datetime.now()


def write_start(folder: RunFolder, here: dict[str, Any], step: int) -> list[str]:
    """Write ``environment.json``: where the run goes on after this step, and all its earlier starts.

    Returns notes on what differs from the start before.
    """
    saved, began = folder.read_json("environment.json"), begun(folder).isoformat(timespec="seconds")
    last = {key: value for key, value in saved.items() if key != "earlier_starts"} if isinstance(saved, dict) else {}
    starts = saved.get("earlier_starts") if last else None
    earlier = [*(starts if isinstance(starts, list) else []), last] if last else []
    more = {"earlier_starts": earlier} if earlier else {}
    folder.write_json("environment.json", {**here, "began": began, "after_step": step, **more})
    differing = [key for key in STARTS if last and last.get(key) != here[key]]
    names = {"package": "the code of poise"}
    changes = ", ".join(
        f"{names.get(key, key)} {here[key]} instead of {last.get(key, 'an unknown one')}" for key in differing
    )
    return [f"changed since the last start: {changes}; results may differ"] if changes else []


def step_metrics(
    algorithm: Algorithm,
    task: Task,
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
    return {**reward_metrics(samples, batch), **task_metrics(task), **sampled, **own}


def task_metrics(task: Task) -> dict[str, float]:
    """``reward/…``: what the task's reward functions have reported themselves since the last call."""
    take = getattr(task, "take_metrics", None)
    return {f"reward/{name}": value for name, value in take().items()} if take else {}


def turn_metrics(sampler: Sampler) -> dict[str, float]:
    """``rollout/continued`` and ``rollout/reread`` of a task with several turns, since the last call.

    The later turns that continued from keys that the engine had kept, and those that had to read their dialogue again.
    If problems were too long, ``rollout/too_long`` is their number.
    """
    names = ["continued", "reread"] * several_turns(sampler.task) + ["too_long"] * ("too_long" in sampler.turns)
    turns = {f"rollout/{name}": float(sampler.turns[name]) for name in names}
    sampler.turns.clear()
    return turns


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


def token_metrics(sampled: Counter[str], before: int) -> dict[str, int]:
    """``tokens/…``: sampled in a step, by all models together and by each other than the policy; ``total`` ever since.

    ``sampled`` is ``Sampler.tokens`` of the step, ``before`` the number of tokens in the steps before it.
    """
    others = {f"tokens/{name}": count for name, count in sampled.items() if name != POLICY}
    return {"tokens/sampled": sampled.total(), **others, "tokens/total": before + sampled.total()}


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


class Clock:
    """Measures how the time of a step is spent."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the measurement of a step."""
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
