"""What is wrong with settings, in the words a user reads."""

import pytest

from poise.config.schema import ConfigError, load


def problems(*overrides, recipe="demo"):
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    return caught.value.problems


def problem(*overrides, recipe="demo"):
    (line,) = problems(*overrides, recipe=recipe)
    assert "\n" not in line
    return line
