"""verl's workers on CPUs in processes of their own: two that share the model by FSDP2 over gloo.

Ray's processes load this file when they import verl (VERL_USE_EXTERNAL_MODULES). The functions below are for the
controller.
"""

import os
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.workers import engine_workers
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker

from poise.integrations import verl_scores
from support import verl_cpu

WORKER = "POISE_TEST_WORKER"  # set in the workers' environment


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def joined(tensors):
    return torch.cat([whole(tensor).detach().flatten() for tensor in tensors])


def gloo(timeout_second=None, backend=None):  # verl would ask for "cpu:gloo,cpu:gloo"
    del timeout_second, backend
    if not torch.distributed.is_initialized():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)


def _optimizer_step(self):
    self.gradients.append(
        joined(torch.zeros_like(p) if p.grad is None else p.grad for p in self.module.parameters()).clone()
    )
    return FSDPEngineWithLMHead.optimizer_step(self)


if os.environ.get(WORKER):
    torch.set_num_threads(1)
    engine_workers.initialize_global_process_group_ray = gloo
    verl_cpu.CPUEngine._build_fsdp_module = FSDPEngineWithLMHead._build_fsdp_module
    verl_cpu.CPUEngine.optimizer_step = _optimizer_step


class ShardedWorker(ActorRolloutRefWorker):
    """verl's worker, with an actor that scores, as poise's trainer has it, and that shows what it did.

    verl takes a class of the name Worker for its own base class.
    """

    actor_worker_cls = verl_scores.ScoringWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        super().init_model()
        self.actor.engine.gradients = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def found(self):
        weights = list(self.actor.engine.module.parameters())
        own = sum(weight.to_local().numel() for weight in weights)
        return {
            "process": os.getpid(),
            "own": own,
            "weights": joined(weights),
            "gradients": self.actor.engine.gradients,
        }


@contextmanager
def queue():
    """Ray, with processes that know verl on a CPU, and verl's queue."""
    tests = Path(__file__).parents[1]
    given = {
        "VERL_USE_EXTERNAL_MODULES": "support.verl_two", "VERL_USE_EXTERNAL_PLUGINS": "none",
        "RAY_USAGE_STATS_ENABLED": "0", "TRANSFER_QUEUE_ENABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    try:
        with verl_cpu.queue(cpus=8):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@contextmanager
def workers(config):
    """A group of two, started by Ray as verl does it, with the model of the configuration."""
    kind = RayClassWithInitArgs(cls=ray.remote(ShardedWorker), config=config.actor_rollout_ref, role="actor")
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls(class_dict={"actor": kind}),
        device_name="cpu",
        worker_env={WORKER: "1"},
    )
    try:
        actor = group.spawn(prefix_set={"actor"})["actor"]
        actor.init_model()
        yield actor
    finally:
        for worker in group._workers:
            ray.kill(worker)
        for placement in group.resource_pool.pgs:
            ray.util.remove_placement_group(placement)
