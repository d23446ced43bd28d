"""How good a policy is on held-out problems: avg@k, pass@k, maj@k and greedy accuracy, by difficulty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poise.algorithms import Sample
from poise.algorithms.sampler import Sampler
from poise.config.schema import Config
from poise.tasks import draw
from poise.training.accuracy import ProblemResult, summarise

CHUNK = 64  # problems between two reports of progress


@dataclass(frozen=True)
class Evaluation:
    """The verdicts on every problem, sampled and greedy."""

    task: str
    samples: int
    temperature: float
    sampled: list[ProblemResult]
    greedy: list[ProblemResult]
    reward: float  # mean over the samples
    cut_off: int  # samples that the limit of tokens ended
    greedy_cut_off: int
    failed: int = 0  # samples without a verdict; they count as wrong

    def summary(self) -> dict[str, Any]:
        """For ``summary.json``. ``accuracy`` is avg@k as sampled; ``greedy`` beside it tells mere sharpening apart."""
        drawn, greedy = summarise(self.sampled, self.samples), summarise(self.greedy, 1)
        average = drawn["overall"][f"avg@{self.samples}"]
        table = {name: value for name, value in drawn["overall"].items() if name != "problems"}
        table["greedy"] = greedy["overall"]["avg@1"]
        for difficulty, row in drawn["difficulty"].items():
            table[f"avg@{self.samples}, difficulty {difficulty}"] = row[f"avg@{self.samples}"]
            table[f"greedy, difficulty {difficulty}"] = greedy["difficulty"][difficulty]["avg@1"]
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
            **({"failed": self.failed} if self.failed else {}),
            "table": table,
        }

    def metrics(self) -> dict[str, float]:
        """``eval/{task}/…`` for the metrics of a step."""
        summary = self.summary()
        named = {name.replace(", difficulty ", "/"): row["value"] for name, row in summary["table"].items()}
        return {f"eval/{self.task}/{name}": value for name, value in named.items()}


def is_summary(found: Any) -> bool:
    """Whether ``found``, read from a file, is what ``Evaluation.summary`` made, as far as anything reads it again."""
    if not isinstance(found, dict) or not isinstance(found.get("table"), dict):
        return False
    rows = [row if isinstance(row, dict) else {} for row in found["table"].values()]
    numbers = [*(row.get(key) for row in rows for key in ("value", "low", "high")), found.get("accuracy")]
    counts = [found.get(key) for key in ("n", "samples")]
    return all(type(count) is int for count in counts) and all(type(number) in (int, float) for number in numbers)


def at_once(problems: int, samples: int) -> int:
    """How many responses ``evaluate`` asks an engine for in one call."""
    return min(problems, CHUNK) * samples


def evaluate(
    sampler: Sampler,
    *,
    problems: int,
    samples: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Sample ``samples`` responses to each of the first ``problems`` held-out problems of a seed, and one greedily.

    The same seed gives the same problems and the same random numbers, so that two policies are compared on equal terms.
    """
    asked = draw(sampler.task, "test", seed, problems)
    problems = len(asked)  # a finite task may have fewer
    drawn: list[Sample] = []
    best: list[Sample] = []
    for at in range(0, problems, CHUNK):
        part = asked[at : at + CHUNK]
        own_seed = seed * 1_000_003 + at
        drawn += sampler.play([problem for problem in part for _ in range(samples)], own_seed)
        best += sampler.greedy().play(part, own_seed)
        if progress:
            progress(len(best), problems)
    return Evaluation(
        sampler.task.name,
        samples,
        sampler.sampling.temperature,
        [_result(drawn[i * samples : (i + 1) * samples]) for i in range(problems)],
        [_result([sample]) for sample in best],
        sum(sample.score.reward for sample in drawn) / len(drawn),
        sum(not sample.finished for sample in drawn),
        sum(not sample.finished for sample in best),
        sum(sample.score.failed is not None for sample in drawn),
    )


def held_out(sampler: Sampler, config: Config, progress: Callable[[int, int], None] | None = None) -> Evaluation:
    """``evaluate`` as the settings of a run say: what the trainer measures before and after, and ``poise eval``."""
    asked = config.evaluation
    sampling = replace(sampler.sampling, temperature=config.test_temperature)
    return evaluate(
        replace(sampler, sampling=sampling), problems=asked.problems, samples=asked.samples, seed=asked.seed,
        progress=progress,
    )  # fmt: skip


def _result(samples: Sequence[Sample]) -> ProblemResult:
    """The verdicts on one problem."""
    answers = tuple(sample.score.answer for sample in samples)
    return ProblemResult(samples[0].problem.difficulty, tuple(sample.score.correct for sample in samples), answers)
