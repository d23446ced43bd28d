"""Measures of what an update does."""

from poise.diagnostics.displacement import Displacement, likelihood_displacement

__all__ = ["Displacement", "likelihood_displacement"]
