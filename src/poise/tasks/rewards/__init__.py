"""Rewards with TRL's signature: built-in rewards, and your own (``file.py:name``). No torch needed."""

from poise.tasks.rewards.base import GOLD_COLUMNS, Grade, RewardError, TrainerState, text_of
from poise.tasks.rewards.maths import Math
from poise.tasks.rewards.run import TABLE, Rewards, get
from poise.tasks.rewards.simple import Choice, Exact, Format, Number, Overlong, Regex

__all__ = [
    "GOLD_COLUMNS",
    "TABLE",
    "Choice",
    "Exact",
    "Format",
    "Grade",
    "Math",
    "Number",
    "Overlong",
    "Regex",
    "RewardError",
    "Rewards",
    "TrainerState",
    "get",
    "text_of",
]
