"""Algorithms: what is sampled for a step, how it is rewarded, and which rows are compared with each other."""

from poise.algorithms.base import Algorithm, Memory, Sample, algorithm
from poise.algorithms.grpo import Grpo
from poise.algorithms.names import TABLE, get

__all__ = ["TABLE", "Algorithm", "Grpo", "Memory", "Sample", "algorithm", "get"]
