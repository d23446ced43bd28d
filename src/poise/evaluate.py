"""How good a policy is on held-out problems: avg@k, pass@k, maj@k and greedy accuracy, by difficulty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from poise.config import Config
from poise.policy import Policy
from poise.rollout.base import Engine
from poise.rollout.limits import encode_problem
from poise.scoring import Scoring
from poise.statistics import ProblemResult, summarise
from poise.tasks import Problem, Score, Task, draw

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
    policy: Policy,
    engine: Engine,
    task: Task,
    *,
    problems: int,
    samples: int,
    temperature: float,
    max_tokens: int,
    max_prompt: int | None = None,
    seed: int = 0,
    top_p: float = 1.0,
    top_k: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Sample ``samples`` responses to each of the first ``problems`` held-out problems of a seed, and one greedily.

    The same seed gives the same problems and the same random numbers, so that two policies are compared on equal terms.
    """
    asked = draw(task, "test", seed, problems)
    prompts = [encode_problem(policy, problem, max_tokens, max_prompt) for problem in asked]
    sampled: list[ProblemResult] = []
    greedy: list[ProblemResult] = []
    rewards: list[float] = []
    cut_off = greedy_cut_off = 0

    def scores(part: Sequence[Problem], at: int, group: int, heat: float) -> tuple[list[list[Score]], int]:
        with Scoring(policy, task, [problem for problem in part for _ in range(group)]) as scoring:
            out = engine.generate(
                prompts[at : at + len(part)],
                group,
                max_tokens=max_tokens,
                temperature=heat,
                seed=seed * 1_000_003 + at,
                top_p=top_p,
                top_k=top_k,
                done=scoring.take,
            )
            found = scoring.finish(out)[1]
        return [found[i * group : (i + 1) * group] for i in range(len(part))], int((~out.finished).sum())

    for at in range(0, problems, CHUNK):
        part = asked[at : at + CHUNK]
        drawn, unfinished = scores(part, at, samples, temperature)
        best, greedy_unfinished = scores(part, at, 1, 0.0)
        cut_off, greedy_cut_off = cut_off + unfinished, greedy_cut_off + greedy_unfinished
        sampled += [_result(p, given) for p, given in zip(part, drawn, strict=True)]
        greedy += [_result(p, given) for p, given in zip(part, best, strict=True)]
        rewards += [score.reward for given in drawn for score in given]
        if progress:
            progress(len(sampled), problems)
    reward = sum(rewards) / len(rewards)
    return Evaluation(task.name, samples, temperature, sampled, greedy, reward, cut_off, greedy_cut_off)


def held_out(
    policy: Policy, engine: Engine, task: Task, config: Config, progress: Callable[[int, int], None] | None = None
) -> Evaluation:
    """``evaluate`` as the settings of a run say: what the trainer measures before and after, and ``poise eval``."""
    asked, rollout = config.evaluation, config.rollout
    return evaluate(
        policy, engine, task, problems=asked.problems, samples=asked.samples, seed=asked.seed,
        temperature=config.test_temperature, max_tokens=rollout.max_tokens, max_prompt=rollout.max_prompt,
        top_p=rollout.top_p, top_k=rollout.top_k, progress=progress,
    )  # fmt: skip


def _result(problem: Problem, scores: Sequence[Score]) -> ProblemResult:
    answers = tuple(score.answer for score in scores)
    return ProblemResult(problem.difficulty, tuple(score.correct for score in scores), answers)
