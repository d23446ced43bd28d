"""Diagnostics of an update: which tokens drive it, and how it changes the likelihood of correct responses."""

from poise.diagnostics.displacement import Displacement, likelihood_displacement
from poise.diagnostics.dominance import Intervals, dominance, gradient_sizes, token_gradient_sizes
from poise.diagnostics.loop import ForwardLoop, Loop

__all__ = [
    "Displacement",
    "ForwardLoop",
    "Intervals",
    "Loop",
    "dominance",
    "gradient_sizes",
    "likelihood_displacement",
    "token_gradient_sizes",
]
