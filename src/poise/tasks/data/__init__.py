"""Problems from a file of the user's own, scored by reward functions."""

from poise.tasks.data.rows import DataError
from poise.tasks.data.task import Data, Math

__all__ = ["Data", "DataError", "Math"]
