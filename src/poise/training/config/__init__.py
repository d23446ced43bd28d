"""A run's settings: recipes, overrides, checks and error messages."""

from poise.training.config.documents import ConfigError, recipes
from poise.training.config.schema import Config, dump, load, restore

__all__ = ["Config", "ConfigError", "dump", "load", "recipes", "restore"]
