"""Imported once, by the server that forks a process for every run: what every run needs.

Nothing here may start a thread or touch CUDA: a forked process could not use it.
"""

from __future__ import annotations

import os

from poise._lib.imports import quick_imports
from poise.comparison.worker import THREADS, die_with_parent

os.setsid()  # Ctrl-C on the terminal reaches the comparison alone, which tells the runs
die_with_parent()
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each run that compiles starts one for every core
# NumPy and SciPy bring an OpenBLAS each, which starts a thread per core when it is imported.
os.environ.update(dict.fromkeys(THREADS, "1"))
# So does the memory allocator of pyarrow, which transformers imports by way of scikit-learn, if it is installed.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking CUDA whether there is a GPU would touch it
with quick_imports():
    import torch

    torch.set_num_threads(1)

    import poise.comparison.shared_start
    import poise.runs.plots
    import poise.trainer  # noqa: F401
