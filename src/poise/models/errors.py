"""The error of everything that has to do with a model; apart, so that catching it imports no transformers."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be loaded or used. The message says what to do."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
