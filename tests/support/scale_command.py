"""As a script: one of two processes that run examples/scale/trl_kk.py as a command of docs/scale.md does, on a CPU.

python scale_command.py FOLDER sharded|whole WORDS…: what the trainer logged is then in FOLDER/logged.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from support import fsdp_runs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/scale"))

import trl_kk

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, kind, *words = sys.argv[1:]
    if kind == "sharded":
        fsdp_runs.shard_without_gpu()
    trainer = trl_kk.build(*trl_kk.parser().parse_args_and_config(words))
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    assert isinstance(trainer.model_wrapped, FSDPModule) is (kind == "sharded")
    if os.environ["RANK"] == "0":
        (Path(folder) / "logged.json").write_text(json.dumps(trainer.state.log_history[:-1]))
