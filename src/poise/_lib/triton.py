"""Whether Triton kernels can run."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def available() -> bool:
    """Whether Triton is installed, and a C compiler, which it needs to build kernel launchers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    return find_spec("triton") is not None and compiler is not None


def suits(values: Tensor) -> bool:
    """Whether our kernels take this tensor: on CUDA, and not float64, which plain torch computes."""
    return values.is_cuda and values.dtype != torch.float64 and available()
