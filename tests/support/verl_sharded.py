"""A script: one of several processes that share verl's model and a batch. It writes the scores of its groups.

verl_sharded.py FOLDER RANK PROCESSES
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
FOLDER, RANK, PROCESSES = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=PROCESSES)

from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.engine.fsdp import FSDPEngineWithLMHead, transformer_impl  # noqa: E402

from poise.integrations.verl_scores import ScoringWorker  # noqa: E402
from support import verl_cpu  # noqa: E402

REWARDS = [1, 1, 0, 0, 1, 1, 1, 1, 0, -1, 0, 0, 1, 0, 1, 1]
SIZE = 1_460_000  # parameters of the embedded model


class Sharded(FullyShardedDataParallel):
    """As verl asks for it, but each process has loaded the weights: torch sends them between GPUs only."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings | {"sync_module_states": False})


def scores(strategy):
    """Of this process's rows, with the model sharded by verl's own code."""
    given = verl_cpu.OVERRIDES | {"actor_rollout_ref.actor.strategy": strategy}
    for kind in ("param", "reduce", "buffer"):
        given[f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.{kind}_dtype"] = "fp32"
    made = verl_cpu.worker(verl_cpu.composed([f"{key}={value}" for key, value in given.items()]), ScoringWorker)
    weights = list(made.engine.module.parameters())
    assert sum((w.to_local() if strategy == "fsdp2" else w).numel() for w in weights) <= SIZE // PROCESSES + 1000
    rows = verl_cpu.rows_of(4, 4, rewards=REWARDS)
    share = len(rows) // PROCESSES
    data = verl_cpu.list_of_dict_to_tensordict(rows[RANK * share : (RANK + 1) * share])
    asked = {"poise_regulator": "nthr", "calculate_entropy": True, "compute_loss": False, "temperature": verl_cpu.HOT}
    for key, value in asked.items():
        tu.assign_non_tensor_data(data, key, value)
    return made.infer_batch(data)["poise_scores0"].values()


if __name__ == "__main__":
    verl_cpu.CPUEngine._build_fsdp_module = FSDPEngineWithLMHead._build_fsdp_module
    transformer_impl.FSDP = Sharded
    torch.save({strategy: scores(strategy) for strategy in ("fsdp", "fsdp2")}, FOLDER / f"scores-{RANK}.pt")
