"""Freed memory stays with the process: its pages need not be cleared by the system again."""

import ctypes
import subprocess
import sys

import pytest

COUNT = """
import resource
from poise._lib.device import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x") * (8 << 20) for _ in range(12)]  # 96 MiB, as the activations of an update
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(3)][-1])
assert keep_freed_memory()
print([faults() for _ in range(3)][-1])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    run = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    default, kept = map(int, run.stdout.split())
    assert kept < default / 10


def test_a_c_library_that_cannot_be_told_is_left_alone(monkeypatch):
    from poise._lib import device

    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: object())
    assert device.keep_freed_memory() is False
