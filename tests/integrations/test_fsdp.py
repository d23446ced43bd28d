"""TRL with a regulator under FSDP2: two processes, gloo, no GPU."""

from itertools import pairwise

import pytest

pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

import torch

from support import fsdp_runs
from support.processes import close, launch


@pytest.mark.long
@pytest.mark.slow
def test_fsdp2_trains_as_stock_trl_and_as_one_process(tmp_path):
    launch(fsdp_runs.__file__, tmp_path)
    sharded = torch.load(tmp_path / "result.pt")
    start, *_, end = sharded["stock"]
    assert not torch.equal(start, end)
    assert torch.equal(sharded["grpo"], sharded["stock"])
    for method in ("lopti", "nthr"):
        alone = fsdp_runs.train(tmp_path, method)
        assert not torch.equal(alone[-1], start)
        assert close(sharded[method][-1] - start, alone[-1] - start, 1e-4)
    moved = [not torch.equal(before, after) for before, after in pairwise(sharded["idle"])]
    assert moved == [False, True, False, True]  # a phase without a token is no step
