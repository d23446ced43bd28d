"""maj@16 of the tasks that people train on: replies in other words that say the same are one answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poise import tasks
from poise.runs.subscribers.evaluation_schedule import EvaluationSchedule
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, Score, Task
from poise.training.config.schema import load
from poise.training.evaluation import evaluate
from poise.training.interrupts import Stopper
from support.scripted import Scripted
from support.tiny_models import tiny

Say = Callable[[Problem], tuple[list[str], list[str], str]]  # right in several wordings; wrong in several; another
LEARNING = Path(__file__).parents[2] / "experiments" / "learning" / "learning_tasks.py"


def kk(problem: Problem) -> tuple[list[str], list[str], str]:
    names, solution = problem.data["names"], problem.data["solution"]

    def wordings(roles: list[bool]) -> list[str]:
        said = [f"{name} is a {'knight' if role else 'knave'}" for name, role in zip(names, roles, strict=True)]
        inside = [", ".join(said), " AND ".join(reversed(said)).lower()]
        return [f"<think>{i}</think><answer>{text}</answer>" for i, text in enumerate(inside)]

    other = [not role for role in solution]
    return wordings(list(solution)), wordings(other), "<think></think><answer>nobody knows</answer>"


def sums(problem: Problem) -> tuple[list[str], list[str], str]:
    answer = int(problem.data["answer"])
    right, wrong = ([f"That is {n}.", f"1 and more: {n}"] for n in (answer, answer + 1))
    return right, wrong, "no idea"


def data(problem: Problem) -> tuple[list[str], list[str], str]:
    del problem
    return ["so \\boxed{\\frac{1}{2}}", "The answer is 0.5"], ["#### 2", "<answer>2.0</answer>"], "no idea"


def made(name: str, tmp_path: Path) -> tuple[Task, Say]:
    if name == "kk":
        return tasks.get("kk", people=[2, 3]), kk
    if name == "sums":
        return tasks.get(f"{LEARNING}:Sums"), sums
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": f"half of {i}?", "answer": "1/2"}) + "\n" for i in range(60)))
    return tasks.get("data", file=str(path), reward=name, held_out=0.5), data


def evaluated(task: Task, replies: Callable[[Problem], list[str]]) -> Any:
    """The evaluation of two problems; the second one's replies are those of the first, right for wrong."""
    policy: Any = tiny("llama")
    known = tasks.draw(task, "test", 0, 2)
    texts = [text for problem in known for text in replies(problem)]
    policy.encode = lambda *_: [1, 2]
    policy.decode = lambda ids: texts[ids[0]]
    engine = Scripted(policy, lambda number, *_: [number])
    return evaluate(Sampler(policy, engine, task, max_tokens=9), problems=2, samples=16)


@pytest.mark.parametrize("name", ["kk", "sums", "number", "math"])
def test_the_majority_of_16_is_counted_by_what_replies_say(name: str, tmp_path: Path) -> None:
    task, say = made(name, tmp_path)
    turns = iter([True, False])

    def replies(problem: Problem) -> list[str]:
        right, wrong, other = say(problem)
        more, fewer = (right, wrong) if next(turns) else (wrong, right)
        return [*(more * 3), *(fewer * 2), *([other] * 6)]  # 6 say the same in two wordings, 4 another, 6 nothing

    found = evaluated(task, replies)
    metrics = found.metrics()
    assert metrics[f"eval/{task.name}/maj@16"] == 0.5  # of two problems
    assert metrics[f"eval/{task.name}/avg@16"] == pytest.approx((6 + 4) / 32)
    table = found.summary()["table"]
    assert table["maj@16"]["value"] == 0.5
    assert table["maj@16"]["low"] < 0.5 < table["maj@16"]["high"]
    assert len({*found.sampled[0].answers}) == 3  # right, wrong and none


class Unsaid:
    """A task of somebody's own that says what is right, but not what was answered."""

    name = "unsaid"

    def problems(self, split: str, seed: int) -> Any:
        del split, seed
        return iter([Problem(str(i), f"say {i}", "", {}) for i in range(100)])

    def score(self, problem: Problem, text: str) -> Score:
        del problem
        return Score(float(text == "yes"), text == "yes")


def test_a_task_that_names_no_answers_has_no_majority() -> None:
    found = evaluated(Unsaid(), lambda _: ["yes"] * 15 + ["no"])
    assert found.metrics()["eval/unsaid/avg@16"] == 15 / 16
    assert not [name for name in found.metrics() if "maj@" in name]


def test_a_task_that_writes_into_its_problems_does_not_change_the_next_evaluation() -> None:
    class Writing(Unsaid):
        def problems(self, split: str, seed: int) -> Any:
            return (replace(problem, data={}) for problem in super().problems(split, seed))

        def score(self, problem: Problem, text: str) -> Score:
            problem.data["asked"] = problem.data.get("asked", 0) + 1  # type: ignore[index]
            return Score(float(problem.data["asked"]), text == "yes")

    policy, task = tiny("llama"), Writing()
    policy.encode, policy.decode = (lambda *_: [1, 2]), (lambda ids: "yes" if ids[0] % 2 else "no")
    sampler = Sampler(policy, Scripted(policy, lambda number, *_: [number]), task, max_tokens=9)
    config = load(None, ["model=embedded", "evaluation.problems=3", "evaluation.samples=2"])
    unused: Any = None
    console: Any = SimpleNamespace(note=lambda _: None)
    evaluations = EvaluationSchedule(sampler, config, unused, console, unused, Stopper(print))
    first, second = evaluations.measure(), evaluations.measure()
    assert first.summary() == second.summary()
    assert [sample.problem.id for sample in first.attempts] == ["0", "0", "1", "1", "2", "2"]
