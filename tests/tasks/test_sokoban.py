"""Sokoban: maps that can be solved, pushes, and what experts reach."""

from itertools import islice

import pytest

from poise import tasks
from poise.tasks.sokoban import Sokoban

ROWS = ["######", "#P___#", "#_X__#", "#__#_#", "#__O_#", "######"]


def maps(task, split="train", seed=0, count=30):
    return list(islice(task.problems(split, seed), count))


@pytest.mark.parametrize("settings", [{}, {"rules": "withheld", "walls": 0.0}, {"side": 6, "actions": 4, "turns": 2}])
def test_the_expert_solves_every_map(settings):
    task = Sokoban(**settings)
    for problem in [*maps(task), *maps(task, "test", count=12)]:
        episode = task.episode(problem)
        best = len(episode.solution())
        assert 2 <= best <= min(8, task.turns * task.actions)
        said = episode.start()
        while said:
            said = episode.step(episode.expert())
        assert episode.score().correct
        assert len(episode.moves) == best


def test_the_splits_share_no_map_and_the_seed_decides():
    task = Sokoban()
    train, test = ({tuple(p.data["map"]) for p in maps(task, split, count=60)} for split in tasks.SPLITS)
    assert not train & test
    assert {len(rows) for rows in train} == {6, 7, 8}
    assert maps(task) == maps(Sokoban(side=[6, 7, 8]))
    assert maps(task) != maps(task, seed=1)


def test_pushes_walls_and_what_is_said():
    task = Sokoban()
    episode = task.episode(task._problem(ROWS))
    assert "# P _ _ _ #\n# _ X _ _ #" in episode.start()[0]["content"]
    assert "You cannot go up." in episode.step("up")[0]["content"]
    assert "You went down.\n" in episode.step("down")[0]["content"]
    said = episode.step("right")[0]["content"]
    assert "pushed the box" in said
    assert "# _ P X _ #" in said
    assert "names no move" in episode.step("?")[0]["content"]
    episode.step("up")
    episode.step("right")
    assert "You cannot go down." in episode.step("down")[0]["content"]  # a wall is behind the box
    assert episode.solution() is not None
    episode.step("up right right")
    assert not episode.score().correct


def test_the_goal_ends_the_game_and_a_lost_box_does_not():
    rows = ["######", "#_P__#", "#_X__#", "#____#", "#_O__#", "######"]
    task = Sokoban(turns=4)
    episode = task.episode(task._problem(rows))
    assert episode.step("down")
    assert episode.step("down") == []
    assert episode.score() == tasks.Score(1.0, True, answer="down down")
    assert episode.feedback().startswith("The box is on the goal.")
    stuck = task.episode(task._problem(["#####", "#_XP#", "#___#", "#_O_#", "#####"]))
    assert stuck.step("left")
    assert stuck.solution() is None
    assert stuck.expert() == "up"
    assert "cannot get there any more" in stuck.feedback()


def test_withheld_rules_say_nothing_but_the_map():
    task = Sokoban(rules="withheld")
    episode = task.episode(task._problem(ROWS))
    said = episode.start()[0]["content"]
    assert "A C B B B A\nA B D B B A" in said
    assert not any(word in said for word in ("box", "goal", "wall", "push"))
    assert episode.step("down")[0]["content"].startswith("A A A A A A\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"side": 4}, "between 5 and 10"), ({"optimum": 1}, "between 2 and 30"), ({"walls": 0.9}, "between 0.0 and 0.5"),
     ({"turns": 1}, "takes at least two moves"), ({"rules": "no"}, "allowed: told, withheld")],
)  # fmt: skip
def test_settings_are_checked(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Sokoban(**settings)


def test_feedback_says_where_the_box_is_and_what_stopped_you():
    rows = ["#####", "#_XP#", "#___#", "#_O_#", "#####"]
    task = Sokoban(turns=3)
    episode = task.episode(task._problem(rows))
    for reply in ("up", "left", "?"):
        episode.step(reply)
    assert episode.feedback() == (
        "The box is at row 2, column 2, the goal at row 4, column 3: it is not on the goal, and it cannot get there "
        "any more. All 3 turns are used up. Replies without a move: 1. Moves that changed nothing: 1. "
        "Moves made: 2 (up left). Reward: 0."
    )
    withheld = Sokoban(turns=3, rules="withheld")
    episode = withheld.episode(withheld._problem(rows))
    episode.step("left")
    assert episode.feedback() == (
        "D ended at row 2, column 2. No move leads to success from there. Moves made: 1 (left). Reward: 0."
    )
    assert not any(word in episode.feedback() for word in ("box", "goal", "wall", "push"))
