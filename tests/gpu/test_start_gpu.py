"""The start of a run on CUDA."""

import subprocess
import sys

CONTEXT = """
import torch
from poise._lib.cuda_start import cuda_starts
with cuda_starts("auto"):
    import poise.config
assert torch.cuda.is_initialized()
print(torch.cuda.memory_allocated() < 2**26)
"""


def test_the_context_is_made_beside_the_imports():
    done = subprocess.run([sys.executable, "-c", CONTEXT], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == "True", done.stderr
