"""Algorithms decide what to sample for a step, and which samples are normalised together."""

from poise.algorithms.base import Algorithm, Memory, Sample, algorithm
from poise.algorithms.grpo import Grpo
from poise.algorithms.names import TABLE, get
from poise.algorithms.rltr import Rltr

__all__ = ["TABLE", "Algorithm", "Grpo", "Memory", "Rltr", "Sample", "algorithm", "get"]
