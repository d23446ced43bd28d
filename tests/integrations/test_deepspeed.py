"""TRL with a regulator under DeepSpeed's ZeRO-2 and ZeRO-3: two processes, gloo, no GPU."""

import pytest

pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed; CONTRIBUTING.md says how to run this test")

import torch

from support import deepspeed_runs
from support.processes import close, launch


@pytest.mark.long
@pytest.mark.slow
def test_deepspeed_trains_as_stock_trl_and_as_one_process(tmp_path):
    launch(deepspeed_runs.__file__, tmp_path)  # it also checks that two methods are refused
    sharded = torch.load(tmp_path / "result.pt")
    for stage in (2, 3):
        assert torch.equal(sharded[stage, "grpo"], sharded[stage, "stock"])
    for name in deepspeed_runs.METHODS:
        alone = deepspeed_runs.train(tmp_path, name)
        assert not torch.equal(alone[1], alone[0])
        assert not torch.equal(alone[2], alone[1])
        for stage in (2, 3):
            assert torch.equal(sharded[stage, name][0], alone[0])
            assert close(sharded[stage, name][-1] - alone[0], alone[-1] - alone[0], 1e-4)
            if name not in ("stock", "grpo"):
                assert not close(sharded[stage, name][-1] - alone[0], sharded[stage, "stock"][-1] - alone[0], 1e-2)
