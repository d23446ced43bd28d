"""The imports that every run needs. A server imports this module once, then forks a process for every run.

This module must not start a thread or touch CUDA, because forked processes could not use them.
"""

from __future__ import annotations

import os

from poise._lib.imports import quick_imports
from poise.referee.compare.worker import THREADS, die_with_parent

os.setsid()  # Ctrl-C on the terminal reaches only the comparison, which stops the runs
die_with_parent()
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each run that compiles starts a worker per core
# NumPy and SciPy each bring an OpenBLAS, which starts a thread per core on import.
os.environ.update(dict.fromkeys(THREADS, "1"))
# pyarrow's memory allocator also starts threads; transformers imports pyarrow through scikit-learn, if installed.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # look for a GPU without touching CUDA
with quick_imports():
    import torch

    torch.set_num_threads(1)

    import poise.referee.compare.shared_start
    import poise.runs.plots
    import poise.trainer  # noqa: F401
