"""Rewards, under their public name: ``poise.tasks.rewards`` has the code."""

from poise.tasks.rewards import *  # noqa: F403
from poise.tasks.rewards import __all__ as __all__
