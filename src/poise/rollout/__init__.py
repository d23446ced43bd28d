"""Engines that sample responses."""

from poise.rollout.base import Engine, Rollouts

__all__ = ["Engine", "Rollouts"]
