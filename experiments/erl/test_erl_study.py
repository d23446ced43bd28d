"""erl.py: lessons are what ERL asks and shows, results at equal tokens, and every path with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from poise import tasks
from poise.models.loading import load_policy
from poise.sampling.erl import Erl
from poise.sampling.sampler import Sampler
from poise.tasks.frozenlake import FrozenLake
from support.scripted import Scripted

HERE = Path(__file__).parent

pytestmark = pytest.mark.studies


def lessons(count: int, kind: str | None = None, seed: int = 0) -> tuple[Any, list[tasks.Problem]]:
    task: Any = tasks.get(f"{HERE}/erl_tasks.py:Lessons")
    drawn = islice(task.problems("train", seed), 10 * count)
    return task, [p for p in drawn if kind is None or p.data.get("lesson") == kind][:count]


def test_the_expert_is_right_in_every_lesson_and_reflections_only_repeat_what_failed() -> None:
    task, problems = lessons(40)
    kinds = {problem.data.get("lesson") for problem in problems}
    assert kinds == {None, "reflection", "second"}
    for problem in problems:
        problem = tasks.Problem(problem.id, problem.prompt, "", json.loads(json.dumps(dict(problem.data))))
        episode = task.episode(problem)
        said = episode.start()
        while said:
            said = episode.step(episode.expert())
        assert episode.score().correct
        if problem.data.get("lesson") == "reflection":
            moves = episode.advice.removeprefix("Not ").removesuffix(".")
            assert f"({moves})" in episode.asked or len(moves.split()) > 12


def test_a_warm_start_measures_plain_games_and_reflections() -> None:
    kinds = [problem.data.get("lesson") for problem in lessons(100, seed=1 << 40)[1]]
    assert 30 < kinds.count(None) < 70
    assert "second" not in kinds


def test_lessons_are_word_for_word_what_erl_asks_and_shows() -> None:
    from erl_tasks import ASK, RECALL, Second

    task, problems = lessons(4, "reflection")
    policy = load_policy("embedded", device="cpu")
    game = FrozenLake(side=task.side, turns=task.turns, actions=task.actions, rules=task.rules)
    end = next(iter(policy.end_tokens))
    for problem in problems:
        lesson, remembered = task.episode(problem), problem.data["memory"]
        second = Second(problem, task, lesson.advice)
        said = deque([*problem.data["replies"], lesson.expert(), *["up"] * 9])
        engine = Scripted(policy, lambda *_, said=said: [*policy.tokenizer(said.popleft())["input_ids"], end])
        algorithm = Erl(group=1, ask=ASK, recall=RECALL, memory=bool(remembered))
        memory = {"advice": f"Not {remembered}."} if remembered else None
        samples, _ = algorithm.collect([problem], Sampler(policy, engine, game, max_tokens=64), 0, memory)
        assert samples[0].notes["shown"] == 1
        asked = [list(requests[0].prompt.tokens) for requests in engine.asked]
        turns = len(problem.data["replies"])
        assert asked[turns] == policy.encode(lesson.start())
        assert asked[turns + 1] == policy.encode(second.start())


def test_arms_are_compared_at_equal_tokens() -> None:
    import erl

    def run(*points: tuple[float, float]) -> dict[str, Any]:
        return {"held_out": list(points), "curve": [{"step": 5}]}

    arms = {
        "grpo": {"0": run((0, 0.2), (100, 0.4)), "1": run((0, 0.2), (100, 0.6))},
        "erl": {"0": run((0, 0.2), (50, 0.4), (110, 0.7)), "1": run((0, 0.2), (80, 0.8)), "2": run()},
    }
    found = erl.summary(arms)
    assert found["tokens"] == 80
    assert found["grpo"]["by_seed"] == pytest.approx({0: 0.36, 1: 0.52})
    assert found["erl"]["by_seed"] == pytest.approx({0: 0.55, 1: 0.8})
    assert found["erl"]["against_baseline"]["values"] == pytest.approx([0.19, 0.28])
    assert found["erl"]["against_baseline"]["p"] == 0.5
    assert erl.summary({"grpo": {"0": run()}}) == {}


@pytest.mark.long
def test_the_study_runs_its_arms_and_keeps_what_it_found(tmp_path: Path) -> None:
    command = [sys.executable, "experiments/erl/erl.py", str(tmp_path), "--tiny", "--only", "grpo;erl"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "erl.log").read_text()
    found = json.loads((tmp_path / "erl.json").read_text())
    for arm in ("grpo", "erl"):
        (only,) = found["arms"][arm].values()
        assert only["exit"] == 0
        assert len(only["held_out"]) == 4  # before, after two steps, and at the end
        assert only["curve"][-1]["tokens/total"] == only["held_out"][-1][0]
    assert {"reflection/readable", "second/success", "first/success"} <= only["curve"][-1].keys()
    assert found["summary"]["erl"]["against_baseline"]["seeds"] == 1
    assert (tmp_path / "erl.png").exists()
