"""verl's own engine, workers and queue on a CPU: a platform and an engine put into verl's registries.

Only what needs CUDA is replaced: the device, and the sharding of the model. Forward and backward pass, micro-batches,
loss, aggregation, optimizer and metrics are verl's.
"""

import contextlib
import copy
import functools
import os
from itertools import islice
from pathlib import Path

import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class Idle:
    """Where verl asks for memory and the like."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = {"mem_get_info": (0, 0), "get_device_name": "CPU"}.get(name, 0)
        return lambda *_, **__: found


class PlatformCPU(PlatformCUDA):
    device_name = "cpu"
    vendor_name = "none"
    device_module = Idle()

    def current_device(self):
        return "cpu"

    def communication_backend_name(self):
        return "gloo"


set_platform(PlatformCPU())

from verl.trainer.ppo.v1.trainer_base import get_trainer_cls  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # noqa: E402
from verl.workers.config import TrainingWorkerConfig  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

import poise.integrations.verl_trainer  # noqa: E402, F401  # makes its trainer known to verl
from poise.models.policy import EMBEDDED  # noqa: E402
from poise.tasks.knights_knaves import KnightsKnaves  # noqa: E402

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # tests talk to nobody
SCALE = Path(__file__).parents[2] / "examples/scale"
HOT = 3.0  # as hot as it takes for the embedded model to hesitate: probabilities from 0 to 1


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngine(FSDPEngineWithLMHead):
    def _build_fsdp_module(self, module):
        self._autocast_dtype = torch.float32
        return module

    def optimizer_step(self):
        self.gradients.append(
            torch.cat(
                [p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in self.module.parameters()]
            )
        )
        return super().optimizer_step()

    def parameters(self):
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])


OVERRIDES = {
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.calculate_log_probs": False,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.temperature": HOT,
    "actor_rollout_ref.model.path": EMBEDDED,
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.actor.optim.total_training_steps": 10,
    "algorithm.adv_estimator": "grpo",
    "trainer.n_gpus_per_node": 1,
}


def config(regulator=None, **settings):
    """verl's configuration; settings are those of ``actor_rollout_ref.actor``, with __ for a dot."""
    actor = {f"actor_rollout_ref.actor.{key.replace('__', '.')}": value for key, value in settings.items()}
    given = OVERRIDES | actor
    if regulator is not None:
        given |= {"trainer.v1.trainer_mode": "poise_sync", "+trainer.v1.poise_sync.regulator": f"'{regulator}'"}
    return composed([f"{key}={value}" for key, value in given.items()])


def composed(overrides):
    return copy.deepcopy(_composed(tuple(overrides)))


@functools.cache
def _composed(overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


# What the configurations of examples/scale need to run here, and no more: one process, the embedded model.
SMALL = {
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.rollout.calculate_log_probs": False,  # there is no sampler
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,  # where batches are not dynamic
    "actor_rollout_ref.rollout.temperature": HOT,
    "actor_rollout_ref.model.path": EMBEDDED,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 226,  # micro-batches of one row, and of two
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.actor.optim.total_training_steps": 10,
    "trainer.n_gpus_per_node": 1,
}


def shipped(name, **settings):
    """A configuration of examples/scale, made small; settings as in ``config``."""
    actor = {f"actor_rollout_ref.actor.{key.replace('__', '.')}": value for key, value in settings.items()}
    with initialize_config_dir(str(SCALE), version_base=None):
        return compose(name, overrides=[f"{key}={value}" for key, value in (SMALL | actor).items()])


def worker(settings, kind=TrainingWorker):
    """verl's training worker, alone in its process group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
                   "LOCAL_WORLD_SIZE": "1", "RAY_LOCAL_RANK": "0"}  # fmt: skip
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    settings = OmegaConf.to_container(settings, resolve=True)
    root = OmegaConf.create(settings)
    actor = omega_conf_to_dataclass(root.actor_rollout_ref.actor)
    actor.engine.use_dynamic_bsz = actor.use_dynamic_bsz
    actor.engine.infer_max_token_len_per_gpu = root.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
    actor.engine.infer_micro_batch_size_per_gpu = root.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
    actor.engine.max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu
    actor.engine.micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    model = omega_conf_to_dataclass(root.actor_rollout_ref.model)
    actor.engine.use_remove_padding = model.use_remove_padding
    made = kind(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    made.reset()
    made.engine.gradients = []
    made.set_loss_fn(lambda model_output, data, dp_group=None: ppo_loss(actor, model_output, data, dp_group))
    return made


class WorkerGroup:
    """One worker where verl has a group of them: its methods take verl's queue entries, as a group's do."""

    def __init__(self, settings, kind=TrainingWorker):
        self.worker = worker(settings, kind)
        self._dispatch_info = {"actor": [0]}
        self.updates = 0

    def compute_log_prob(self, batch):
        return self.worker.infer_batch(batch)

    def update_actor(self, batch):
        self.updates += 1
        return self.worker.train_mini_batch(batch)

    @property
    def engine(self):
        return self.worker.engine


def trainer(regulator=None, **settings):
    """verl's trainer, stock or with a regulator, and one worker with the model; no rollout servers, no data loader."""
    return assembled(config(regulator, **settings))


def assembled(made):
    """The same for a whole configuration."""
    built = get_trainer_cls(made.trainer.v1.trainer_mode)(made)
    built._init_resource_pool_mgr()  # verl chooses the class of its workers
    (kind,) = {workers.__ray_actor_class__ for workers in built.role_worker_mapping.values()}
    built.actor_rollout_wg = WorkerGroup(made, kind.actor_worker_cls)
    built.global_steps, built.distillation_config = 1, None
    return built


def prepare(built, batch, metrics):
    """verl's step up to the update."""
    batch = built._compute_old_log_prob(batch, metrics)
    if built.use_reference_policy:  # one that differs, so that there is a KL to speak of
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["old_log_probs"])
        data["ref_log_prob"] = torch.nested.nested_tensor_from_jagged(
            data["old_log_probs"].values() - torch.linspace(-0.5, 0.5, len(data["old_log_probs"].values())),
            data["old_log_probs"].offsets(),
        )
        batch = tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=data.select("ref_log_prob"))
    return built._compute_advantage(batch, metrics)


def step(built, batch):
    """verl's step from old log-probabilities on; returns its metrics."""
    metrics = {}
    batch = prepare(built, batch, metrics)
    assert built._update_actor(batch, metrics).keys == batch.keys
    return metrics


@contextlib.contextmanager
def queue(cpus=2):
    """Ray and verl's queue, for as long as it takes."""
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        yield
    finally:
        tq.close()
        ray.shutdown()


@functools.cache
def sampled(prompts, group):
    """Questions and the embedded model's answers to them, sampled hot and cut at uneven lengths."""
    tokenizer, model = AutoTokenizer.from_pretrained(EMBEDDED), AutoModelForCausalLM.from_pretrained(EMBEDDED)
    torch.manual_seed(0)
    made = []
    for problem in islice(KnightsKnaves(people="2").problems("train", seed=0), prompts):
        ids = tokenizer(problem.prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids.expand(group, -1), do_sample=True, temperature=HOT, max_new_tokens=9, min_new_tokens=9)
        made += [(ids[0], answer[: 4 + (3 * len(made) + i) % 6]) for i, answer in enumerate(out[:, ids.shape[1] :])]
    return made


def rows_of(prompts, group, name="a", rewards=None):
    """The fields of each rollout, as verl's agent loop has them; one has a hole, where a tool spoke."""
    rows = []
    for number, (question, answer) in enumerate(sampled(prompts, group)):
        ids, mask = torch.cat([question, answer]), torch.ones(len(answer), dtype=torch.int64)
        mask[1] = number > 0
        score = torch.zeros(len(answer))
        score[-1] = number % 3 + 0.5 if rewards is None else rewards[number]
        rows.append({"uid": f"{name}{number // group}", "prompts": question, "responses": answer, "input_ids": ids,
                     "position_ids": torch.arange(len(ids)), "response_mask": mask, "loss_mask": mask,
                     "rm_scores": score})  # fmt: skip
    return rows


def rollouts(prompts=4, group=2, name="a", rewards=None):
    """Rollouts in the queue, as verl's agent loop puts them there."""
    rows = rows_of(prompts, group, name, rewards)
    batch = tq.kv_batch_put(
        keys=[f"{row['uid']}_{number % group}_0" for number, row in enumerate(rows)],
        partition_id="train",
        fields=list_of_dict_to_tensordict(rows),
        tags=[{"seq_len": len(row["input_ids"])} for row in rows],
    )
    batch.extra_info["temperature"] = HOT
    return batch


def fields(batch, *names):
    data: TensorDict = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=list(names))
    return data.to_padded_tensor()
