"""The arguments of a command that ask for a configuration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise import config as configs
from poise.comparison.arms import alternatives
from poise.config.arguments import arguments, written
from poise.config.documents import parse_typed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(VALUES)
def test_a_written_value_reads_as_itself(value):
    text = written(value)
    assert parse_typed(text) == value
    assert alternatives("task.x", text) == [text.strip()]  # and is no axis of a comparison
    assert "\n" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("2-3", "2-3"),
        ("1e-3", '"1e-3"'),
        ("yes", '"yes"'),
        ('5" or 3", or 2', r'"5\u0022 or 3\u0022, or 2"'),  # a \" would end the text for the parser of axes
        ("{question} Go", "{question} Go"),
        (["a", 1], '["a", 1]'),
        (None, "null"),
    ],
)
def test_how_values_are_written(value, text):
    assert written(value) == text


@pytest.mark.parametrize("recipe", configs.recipes())
def test_a_recipe_is_found_again(recipe):
    assert arguments(configs.load(recipe)) == [recipe]


def test_only_what_differs_is_named():
    assert arguments(configs.load("ar", ["model=a/b", "steps=3"])) == ["ar", "model=a/b", "steps=3"]
    assert arguments(configs.load("demo", ["lora.rank=8"])) == ["demo", "lora.rank=8"]
    assert arguments(configs.load("demo", ["task.name=sokoban", "seed=1"]), ["seed"]) == [
        "demo",
        "task.name=sokoban",
    ]


def test_settings_that_a_recipe_has_and_the_run_lacks_lead_to_another_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: embedded\ntask: {name: kk}\n")  # the recipes for kk name people
    config = configs.load(tmp_path / "mine.yaml")
    recipe, *words = arguments(config)
    assert configs.load(recipe, words) == config


def test_what_cannot_be_typed_has_no_arguments():
    config = configs.load("demo")
    task = type(config.task).model_construct(name="kk", people="2-3", instruction="x" * 100_001)
    assert arguments(config.model_copy(update={"task": task})) is None
