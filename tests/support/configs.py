"""The messages that a user gets for wrong settings."""

import pytest

from poise.training.config.schema import ConfigError, load


def problems(*overrides, recipe="tiny"):
    """All messages, one for each mistake."""
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    return caught.value.problems


def problem(*overrides, recipe="tiny"):
    """The message for the only mistake: one line."""
    (line,) = problems(*overrides, recipe=recipe)
    assert "\n" not in line
    return line
