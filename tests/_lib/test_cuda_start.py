"""CUDA is started beside the imports, and never in the way of a message."""

import threading
import time

import pytest
import torch

from poise._lib import cuda_start
from poise._lib.cuda_start import cuda_starts


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:99", "cuda:x", "cpu", "meta", "nonsense"])
def test_whatever_the_device_nothing_is_raised_and_no_thread_is_left(device):
    before = threading.active_count()
    with cuda_starts(device):
        pass
    assert threading.active_count() == before


@pytest.mark.parametrize(("device", "touched"), [("auto", ["cuda"]), ("cuda:1", ["cuda:1"]), ("cpu", [])])
def test_the_device_of_the_run_is_started_and_no_other(device, touched, monkeypatch):
    started = []
    monkeypatch.setattr(cuda_start, "_start", started.append)
    with cuda_starts(device):
        pass
    assert started == touched


def test_it_is_over_before_the_run_begins_even_if_an_import_fails(monkeypatch):
    done = []

    def slow(device):
        time.sleep(0.1)
        done.append(device)

    monkeypatch.setattr(cuda_start, "_start", slow)
    with pytest.raises(ModuleNotFoundError), cuda_starts("cuda"):
        __import__("a_module_that_nobody_has")
    assert done == ["cuda"]


def test_random_numbers_of_a_run_are_not_drawn():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with cuda_starts("auto"):
        pass
    assert torch.equal(torch.get_rng_state(), before)
