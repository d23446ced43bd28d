"""Which values a task's setting takes, by its annotation."""

import numpy as np
import pytest

from poise import tasks
from poise.tasks.base import TaskError
from poise.tasks.streams import draw_of_split, split_of


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("frozenlake", {"slippery": 1}),
        ("frozenlake", {"slippery": np.True_}),
        ("kk", {"names": np.array(["Ada", "Bob", "Cleo", "Dan", "Eve", "Flo", "Gil", "Hal"])}),
        ("kk", {"names": dict.fromkeys(["Ada", "Bob", "Cleo", "Dan", "Eve", "Flo", "Gil", "Hal"]).keys()}),
        ("frozenlake", {"slippery": 0}),
    ],
)
def test_what_means_the_same_is_taken(name, settings):
    tasks.get(name, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("frozenlake", {"slippery": 2}, "slippery must be true or false, got 2"),
        ("frozenlake", {"slippery": [1]}, "slippery must be true or false"),
        ("kk", {"names": "Ada"}, "names must be a list of texts"),
        ("kk", {"names": [1, 2]}, "names must be a list of texts"),
    ],
)
def test_what_means_something_else_is_refused(name, settings, words):
    with pytest.raises(TypeError, match=words):
        tasks.get(name, **settings)


def test_an_environment_takes_functions_as_rewards():
    class Env:
        def reset(self):
            return "go"

        def act(self) -> str:
            """Do it."""
            return "done"

    def fair(completions, **_):
        return [1.0] * len(completions)

    for reward in (fair, [fair]):
        assert tasks.get("environment", factory=Env, reward=reward)._rewards is not None


def test_settings_that_allow_too_few_problems_are_the_users_to_change():
    meaning = next(text for text in "abcdef" if split_of(text) == "train")
    with pytest.raises(TaskError, match="small: no test problem among 20000 draws: these settings allow too few"):
        draw_of_split("small", "test", lambda: (meaning, None))
