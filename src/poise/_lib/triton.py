"""Whether Triton's kernels can be used here."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def available() -> bool:
    """Triton is installed, and a C compiler, which it needs for every kernel's launcher."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    return find_spec("triton") is not None and compiler is not None


def suits(values: Tensor) -> bool:
    """These are values that our kernels work on: on CUDA, and not float64, which is left to plain torch."""
    return values.is_cuda and values.dtype != torch.float64 and available()
