"""The example that plays a game of gymnasium."""

import json
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed")

from poise import tasks

EXAMPLE = Path(__file__).parents[2] / "examples/environment/gymnasium_game.py"


def call(action):
    return f"<tool_call>{json.dumps({'name': 'act', 'arguments': {'action': action}})}</tool_call>"


def test_it_is_played_with_tool_calls():
    task = tasks.get("environment", factory=f"{EXAMPLE}:Taxi", turns=5)
    problems = list(islice(task.problems("train", 0), 8))
    starts = {task.episode(problem).start()[0]["content"] for problem in problems}
    assert len(starts) > 4
    assert not any("\x1b" in start for start in starts)
    episode = task.episode(problems[0])
    episode.start()
    said = [episode.step(call(action))[0]["content"] for action in ("dropoff", "fly", "south")]
    assert "south, north, east" in said[1]
    assert "[" in said[2]
    assert episode.step("I give up.") == []
    assert episode.score().reward == -11.0  # gymnasium takes 10 for a wrong dropoff and 1 for a move
