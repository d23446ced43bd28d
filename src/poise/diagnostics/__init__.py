"""Diagnostics of an update: which tokens drive it, and how it changes the likelihood of correct responses."""

from poise.diagnostics.displacement import Displacement, likelihood_displacement
from poise.diagnostics.dominance import dominance
from poise.diagnostics.intervals import Intervals
from poise.diagnostics.loop import ForwardLoop, Loop
from poise.diagnostics.sizes import gradient_sizes, token_gradient_sizes

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
