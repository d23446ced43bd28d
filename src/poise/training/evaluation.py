"""Evaluation on held-out problems: avg@k, pass@k, maj@k and greedy accuracy, by difficulty."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from poise._lib.files import dumps
from poise.sampling.algorithms import Trajectory
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, TaskError, draw
from poise.training.accuracy import BY_DIFFICULTY, ProblemResult, lost_shares, summarise
from poise.training.config.schema import Config

CHUNK = 64  # problems per call of the sampler, and per progress report
GPU_RESPONSES = 1024  # on a GPU, a call may have this many responses: a GPU decodes many as fast as a few


@dataclass(frozen=True)
class Evaluation:
    """The results of all held-out problems, with sampling and with greedy decoding."""

    task: str
    samples: int
    temperature: float
    sampled: list[ProblemResult]
    greedy: list[ProblemResult]
    reward: float  # mean over all samples
    cut_off: int  # samples that reached the token limit
    greedy_cut_off: int
    problems: str  # a fingerprint of the problems
    unreadable: int | None = None  # samples that ended without a readable answer; None for a task without answers
    greedy_unreadable: int | None = None
    failed: int = 0  # samples without a verdict; they count as wrong
    attempts: Sequence[Trajectory] = ()  # all samples

    def summary(self) -> dict[str, Any]:
        """Return the evaluation's entry in ``summary.json``. ``accuracy`` is avg@k.

        If ``accuracy`` rises but ``greedy`` does not, training has only sharpened the model's distribution.
        """
        sampled, greedy = summarise(self.sampled, self.samples), summarise(self.greedy, 1)
        average = sampled["overall"][f"avg@{self.samples}"]
        table = {name: value for name, value in sampled["overall"].items() if name != "problems"}
        table["greedy"] = greedy["overall"]["avg@1"]
        for difficulty, row in sampled["difficulty"].items():
            table[f"avg@{self.samples}{BY_DIFFICULTY}{difficulty}"] = row[f"avg@{self.samples}"]
            table[f"greedy{BY_DIFFICULTY}{difficulty}"] = greedy["difficulty"][difficulty]["avg@1"]
        return {
            "accuracy": average["value"],
            "interval": [average["low"], average["high"]],
            "greedy": greedy["overall"]["avg@1"]["value"],
            "reward": self.reward,
            "n": len(self.sampled),
            "samples": self.samples,
            "temperature": self.temperature,
            "cut_off": self.cut_off,
            "greedy_cut_off": self.greedy_cut_off,
            **({} if self.unreadable is None else {"unreadable": self.unreadable}),
            **({} if self.greedy_unreadable is None else {"greedy_unreadable": self.greedy_unreadable}),
            "problems": self.problems,
            **({"failed": self.failed} if self.failed else {}),
            "table": table,
        }

    def in_short(self) -> str:
        """The accuracy in a few words, for the console: avg@k and greedy, at temperature 0 only greedy."""
        greedy = f"greedy {fmean(result.correct[0] for result in self.greedy):.3f}"
        sampled = fmean(fmean(result.correct) for result in self.sampled)
        return greedy if self.temperature == 0 else f"avg@{self.samples} {sampled:.3f}, {greedy}"

    def by_problem(self) -> dict[str, Any]:
        """The content of ``before.json`` and ``problems.json``: correct replies per problem, sampled and greedy.

        Runs with the same evaluation settings have the same problems, so they can be compared problem by problem.
        """
        right, greedy = ([sum(result.correct) for result in results] for results in (self.sampled, self.greedy))
        return {"samples": self.samples, "problems": self.problems, "correct": right, "greedy": greedy}

    def metrics(self) -> dict[str, float]:
        """Return the metrics ``eval/{task}/…``."""
        return summary_metrics(self.task, self.summary())


def summary_metrics(task: str, summary: dict[str, Any]) -> dict[str, float]:
    """Compute ``Evaluation.metrics`` from an evaluation's summary."""
    named = {name.replace(BY_DIFFICULTY, "/"): row["value"] for name, row in summary["table"].items()}
    return {f"eval/{task}/{name}": value for name, value in {**named, **lost_shares(summary)}.items()}


def evaluate(
    sampler: Sampler,
    *,
    problems: int,
    samples: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    held_out_problems: Sequence[Problem] | None = None,
) -> Evaluation:
    """Sample ``samples`` responses and one greedy response to each of ``problems`` held-out problems.

    The seed determines the problems and the random numbers: evaluate two policies with the same seed to compare them.
    Pass ``held_out_problems`` if you have already drawn the problems.
    """
    sampler = sampler.at()
    test_problems = held_out_problems
    if test_problems is None:
        test_problems = draw(sampler.task, "test", seed, problems, sampler.fits)
    problems = len(test_problems)  # a finite task may have fewer
    sampled: list[Trajectory] = []
    greedy: list[Trajectory] = []
    # Fixed per device type and number of samples, because the random numbers depend on the size of a call.
    size = CHUNK if sampler.policy.device.type == "cpu" else max(CHUNK, GPU_RESPONSES // samples)
    for start in range(0, problems, size):
        chunk = test_problems[start : start + size]
        chunk_seed = seed * 1_000_003 + start
        attempts = sampler.play([problem for problem in chunk for _ in range(samples)], chunk_seed)
        sampled += attempts
        if all(sample.score.failed for sample in sampled):
            raise TaskError(f"none of the {len(sampled)} attempts got a verdict: {sampled[0].score.failed}")
        is_greedy = sampler.sampling.temperature == 0
        greedy += attempts[::samples] if is_greedy else sampler.greedy().play(chunk, chunk_seed)
        if progress:
            progress(len(greedy), problems)
    return Evaluation(
        sampler.task.name,
        samples,
        sampler.sampling.temperature,
        [_result(sampled[i * samples : (i + 1) * samples]) for i in range(problems)],
        [_result([sample]) for sample in greedy],
        sum(sample.score.reward for sample in sampled) / len(sampled),
        sum(not sample.finished for sample in sampled),
        sum(not sample.finished for sample in greedy),
        hashlib.sha256(dumps([[problem.id, problem.prompt] for problem in test_problems])).hexdigest()[:16],
        _unreadable(sampled),
        _unreadable(greedy),
        sum(sample.score.failed is not None for sample in sampled),
        sampled,
    )


def held_out(
    sampler: Sampler,
    config: Config,
    progress: Callable[[int, int], None] | None = None,
    problems: Sequence[Problem] | None = None,
    seed: int | None = None,
) -> Evaluation:
    """Evaluate with the settings of a run; see ``evaluate``."""
    settings = config.evaluation
    sampling = replace(sampler.sampling, temperature=config.test_temperature)
    return evaluate(
        replace(sampler, sampling=sampling),
        problems=settings.problems,
        samples=settings.samples,
        seed=settings.seed if seed is None else seed,
        progress=progress,
        held_out_problems=problems,
    )


def _unreadable(samples: Sequence[Trajectory]) -> int | None:
    """Count the samples that ended without a readable answer. Return None if a correct sample has no answer."""
    if any(sample.score.correct and sample.score.answer is None for sample in samples):
        return None
    return sum(sample.finished and sample.score.answer is None for sample in samples)


def _result(samples: Sequence[Trajectory]) -> ProblemResult:
    """The result of one problem."""
    answers = tuple(sample.score.answer for sample in samples)
    return ProblemResult(samples[0].problem.difficulty, tuple(sample.score.correct for sample in samples), answers)
