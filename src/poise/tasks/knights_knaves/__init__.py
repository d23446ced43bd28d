"""Knights and Knaves: from what everyone says, find out who tells the truth."""

from poise.tasks.knights_knaves.puzzle import Puzzle, generate, read
from poise.tasks.knights_knaves.statements import canonical, solve, split_of
from poise.tasks.knights_knaves.task import KnightsKnaves

__all__ = ["KnightsKnaves", "Puzzle", "canonical", "generate", "read", "solve", "split_of"]
