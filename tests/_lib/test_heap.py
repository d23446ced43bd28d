"""Freed memory stays with the process: its pages need not be cleared by the system again."""

import ctypes
import subprocess
import sys

import pytest

COUNT = """
import resource, sys
from poise._lib.device import keep_freed_memory

keep = sys.argv[1] == "keep"
assert not keep or keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x") * (8 << 20) for _ in range(12)]  # 96 MiB, as the activations of an update
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(3)][-1])
"""


def page_faults(how):
    run = subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    assert page_faults("keep") < page_faults("default") / 10


def test_a_c_library_that_cannot_be_told_is_left_alone(monkeypatch):
    from poise._lib import device

    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: object())
    assert device.keep_freed_memory() is False
