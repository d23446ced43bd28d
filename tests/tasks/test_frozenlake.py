"""Frozen Lake: maps, moves, endings, and what experts and others reach."""

from itertools import islice
from random import Random

import pytest

from poise import tasks
from poise.tasks.frozenlake import FrozenLake
from poise.tasks.grid import DIRECTIONS, moves_in


def play(task, problem, policy):
    episode = task.episode(problem)
    said = episode.start()
    while said:
        said = episode.step(policy(episode))
    return episode


def maps(task, split="train", seed=0, count=64):
    return list(islice(task.problems(split, seed), count))


def test_moves_are_read_from_the_end_of_a_reply():
    assert moves_in("up") == ["up"]
    assert moves_in("Up is a hole, so I go LEFT.") == ["left"]
    assert moves_in("<think>up or down?</think> right") == ["right"]
    assert moves_in("up, up then left", 8) == ["up", "up", "left"]
    assert moves_in("upright supper") == []
    assert moves_in("</think>" * 10**5 + "x" * 10**6) == []
    assert moves_in("up " * 10**5, 3) == ["up"] * 3


@pytest.mark.parametrize("settings", [{}, {"rules": "withheld"}, {"actions": 3, "turns": 5}, {"side": 3}])
def test_the_expert_reaches_every_goal(settings):
    task = FrozenLake(**settings)
    for problem in [*maps(task), *maps(task, "test")]:
        episode = play(task, problem, lambda episode: episode.expert())
        assert episode.score().correct
        assert episode.score().reward == 1
        assert 2 <= len(episode.moves) <= task.turns * task.actions
        assert len(episode.replies) <= task.turns


def test_the_same_seed_gives_the_same_maps_and_no_map_is_in_both_splits():
    task = FrozenLake()
    assert maps(task) == maps(FrozenLake(side=range(2, 10)))
    assert maps(task) != maps(task, seed=1)
    train, test = (
        {tuple(p.data["map"]) for s in range(3) for p in maps(task, split, s, 400)} for split in tasks.SPLITS
    )
    assert not train & test
    assert {len(rows) for rows in train} == {len(rows) for rows in test} == set(range(2, 10))


def test_a_step_is_what_gymnasium_does():
    rows = ["P_O", "___", "O_G"]
    problem = FrozenLake(side=3)._problem(rows)
    episode = FrozenLake(side=3).episode(problem)
    assert "P _ O\n_ _ _\nO _ G" in episode.start()[0]["content"]
    said = episode.step("left")[0]["content"]
    assert "the edge stopped you" in said
    assert "P _ O" in said
    assert "Turn 2 of 8" in said
    assert "_ P O" in episode.step("I go right!")[0]["content"]
    assert "names no move" in episode.step("What?")[0]["content"]
    assert episode.step("right") == []  # the hole
    assert episode.score() == tasks.Score(0.0, False, answer="left right right")
    assert episode.feedback() == (
        "You fell into a hole at row 1, column 3. Replies without a move: 1. Moves that changed nothing: 1. "
        "Moves made: 3 (left right right). Reward: 0."
    )


def test_withheld_rules_say_nothing_but_the_map():
    task = FrozenLake(side=3, rules="withheld")
    episode = task.episode(task._problem(["P_O", "___", "O_G"]))
    start = episode.start()[0]["content"]
    assert "A B C\nB B B\nC B D" in start
    assert not any(word in start for word in ("hole", "goal", "ice"))
    assert episode.step("right")[0]["content"] == "B A C\nB B B\nC B D\nTurn 2 of 8. Your move?"


def test_turns_end_an_episode_and_a_reply_without_a_move_costs_one():
    task = FrozenLake(side=4, turns=2)
    episode = play(task, maps(task)[0], lambda _: "hm")
    assert len(episode.replies) == 2
    assert episode.score().reward == 0
    assert "not reach the goal in time" in episode.feedback()
    assert episode.score().answer is None
    assert "All 2 turns are used up. Replies without a move: 2." in episode.feedback()
    assert "Moves made: 0 (none). Reward: 0." in episode.feedback()


def test_feedback_with_rules_withheld_speaks_of_symbols_alone():
    task = FrozenLake(side=3, rules="withheld", turns=4)
    problem = task._problem(["P_O", "___", "O_G"])
    hole, late, won = ([*"rr"], [*"rlrl"], [*"rddr"])
    words = {"r": "right", "l": "left", "d": "down"}
    said = []
    for replies in (hole, late, won):
        episode = play(task, problem, lambda e, replies=replies: words[replies[len(e.replies)]])
        said.append(episode.feedback())
    assert said[0] == (
        "A moved onto C at row 1, column 3, and the game was over. Moves made: 2 (right right). Reward: 0."
    )
    assert said[1].startswith("A ended at row 1, column 1. All 4 turns are used up. Moves made: 4")
    assert said[2].startswith("A moved onto D at row 3, column 3, and the game was over.")
    assert said[2].endswith("Reward: 1.")
    assert not any(word in text for text in said for word in ("hole", "goal", "ice", "edge"))


def test_feedback_stays_short_however_long_the_game():
    task = FrozenLake(side=2, turns=64, actions=32, ice=(1.0, 1.0))
    episode = play(task, maps(task)[0], lambda e: "up down left right " * 8 if e.board.state != (9, 9) else "")
    assert len(episode.feedback().split()) < 60
    stuck = play(task, task._problem(["P_", "_G"]), lambda _: "up left " * 16)
    assert "Moves that changed nothing: 2048. Moves made: 2048 (... up left" in stuck.feedback()
    assert len(stuck.feedback().split()) < 60


def test_a_slippery_lake_slips_a_third_to_each_side_and_can_be_played_again():
    task = FrozenLake(side=9, slippery=True, ice=(1.0, 1.0), turns=20)
    went = dict.fromkeys(DIRECTIONS, 0)
    for problem in maps(task, count=150):
        episode = task.episode(problem)
        went[episode._slip("up")] += 1
        rng = Random(problem.id)
        replies = [rng.choice(list(DIRECTIONS)) for _ in range(20)]
        ends = [play(task, problem, lambda e, replies=replies: replies[len(e.replies)]) for _ in range(2)]
        assert ends[0].board.state == ends[1].board.state
    assert went["down"] == 0
    assert all(30 < went[move] < 70 for move in ("up", "left", "right"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"side": 1}, "side must be between 2 and 9, got 1"),
        ({"side": "a"}, "side must be like 5"),
        ({"side": 4.5}, "side must be a whole number, got 4.5"),
        ({"side": None}, "side must be a number, got None"),
        ({"turns": 0}, "turns must be between 1 and 64"),
        ({"turns": 1}, "takes at least two moves"),
        ({"rules": "hidden"}, "allowed: told, withheld"),
        ({"ice": 0.5}, "the smallest and the largest share"),
        ({"ice": (0.9, 0.5)}, r"ice\[1\] must be between 0.9 and 1.0"),
        ({"actions": 1.5}, "must be a whole number"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        tasks.get("frozenlake", **settings)
