"""Freed memory stays with the process; the memory that a process may use."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from poise._lib.device import free_bytes, total_bytes

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


@pytest.mark.parametrize(("name", "index"), [("cuda", None), ("cuda:1", 1)])
def test_the_share_of_a_process_is_asked_for_by_number(monkeypatch, name, index):
    """Torch refuses a CUDA device without a number here; None means the current device."""
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {index: 0.5}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    assert total_bytes(torch.device(name)) == 40 << 30


def test_free_memory_is_at_most_what_the_process_may_use(monkeypatch):
    cuda, gib = torch.device("cuda"), 1 << 30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5 * gib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 8 * gib)
    for share, free, expected in ((1.0, 40, 43), (0.25, 40, 15), (0.25, 2, 5), (0.05, 40, 0)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _, share=share: share)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * gib, 80 * gib))
        assert free_bytes(cuda) == expected * gib
