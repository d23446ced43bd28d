"""Rewards for problems that have an answer, with TRL's signature; and yours, by ``file.py:name``. No torch here."""

from poise.rewards.base import GOLD_COLUMNS, Reward, RewardError, TrainerState, Verdict, text_of
from poise.rewards.maths import Math
from poise.rewards.run import TABLE, Rewards, get, names
from poise.rewards.simple import Choice, Exact, Format, Number, Overlong, Regex

__all__ = [
    "GOLD_COLUMNS",
    "TABLE",
    "Choice",
    "Exact",
    "Format",
    "Math",
    "Number",
    "Overlong",
    "Regex",
    "Reward",
    "RewardError",
    "Rewards",
    "TrainerState",
    "Verdict",
    "get",
    "names",
    "text_of",
]
