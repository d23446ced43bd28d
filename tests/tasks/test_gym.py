"""Gymnasium's environments as tasks."""

import time
from itertools import islice

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra 'games')")

from poise import tasks
from poise.tasks.gym import gym

SAFE = ["down", "down", "right", "right", "down", "right"]


def play(task, replies, seed=0):
    episode = task.episode(next(task.problems("train", seed)))
    said = [episode.start()]
    for reply in replies:
        said.append(episode.step(reply))
        if not said[-1]:
            break
    return said, episode


def test_a_known_path_crosses_the_lake():
    said, episode = play(gym("FrozenLake-v1")(make={"is_slippery": False}), SAFE)
    assert said[0][0]["content"].startswith("[S]FFF\nFHFH\nFFFH\nHFFG\nTurn 1 of 32.")
    assert "[F]HFH" in said[1][0]["content"]
    assert episode.score() == tasks.Score(1.0, True, answer=" ".join(SAFE))
    assert episode.feedback() == "The episode ended after 6 actions. Reward: 1."


def test_replies_without_an_action_and_turns():
    task = gym("FrozenLake-v1")(make={"is_slippery": False}, turns=3)
    said, episode = play(task, ["what?", "I go down, no, right!", "right", "right"])
    assert "names no action" in said[1][0]["content"]
    assert "S[F]FF" in said[2][0]["content"]
    assert said[3] == []
    assert episode.score() == tasks.Score(0.0, False, answer="right right")
    assert episode.feedback() == "The episode did not end after 2 actions. Replies without an action: 1. Reward: 0."


def test_taxi_has_its_words_and_depends_on_the_seed():
    task = gym("Taxi-v4")(correct_at=0)
    assert task.actions == ("south", "north", "east", "west", "pickup", "dropoff")
    said, episode = play(task, ["pickup"] * 3)
    assert "\x1b" not in said[0][0]["content"]
    assert episode.score().reward <= -3
    starts = {task.episode(problem).start()[0]["content"] for problem in islice(task.problems("train", 0), 8)}
    assert len(starts) > 4
    again = [play(task, ["north", "east", "south"], seed=3)[0] for _ in range(2)]
    assert again[0] == again[1]


def test_an_environment_that_raises_or_hangs_loses_its_episode_only(monkeypatch):
    task = gym("FrozenLake-v1")(timeout=0.2)
    for how, why in ((lambda *_: 1 / 0, "ZeroDivisionError"), (lambda *_: time.sleep(30), "within 0.2 s")):
        episode = task.episode(next(task.problems("train", 0)))
        episode.start()
        monkeypatch.setattr(episode.world, "step", how)
        assert episode.step("down") == []
        assert why in episode.score().failed
    assert play(task, ["down"])[1].score().failed is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("FrozenLake-v9", {}, "did you mean 'FrozenLake-v1'"),
        ("Blackjack-v1", {}, "does not run|no text rendering"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, "must be 4 different words, got a, b"),
        ("FrozenLake-v1", {"make": {"side": 3}}, "does not run: TypeError"),
    ],
)
def test_mistakes_are_answered(name, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        gym(name)(**settings)


def test_the_splits_share_no_seed():
    task = gym("Taxi-v4")()
    train, test = ({p.data["seed"] for p in islice(task.problems(split, 0), 300)} for split in tasks.SPLITS)
    assert not train & test
