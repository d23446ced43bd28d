"""Imports of many modules at once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import inside this context without garbage collection, which takes a fifth of the time of importing the trainer.

    Modules make hundreds of thousands of objects that stay, and the collector would look through them again and again.
    Later collections leave them out too, and so a child process shares the memory that they are in.
    """
    collecting, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:  # else there is nothing new to leave out
            gc.freeze()
        if collecting:
            gc.enable()
