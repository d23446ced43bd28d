"""Poise in verl: its loss on a batch of its own, and the gradients of its trainer."""

from dataclasses import dataclass

import torch
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from poise import Phase, Regulator
from support import verl_cpu


@dataclass(frozen=True)
class SquareRoot(Regulator):
    """One of a user's own, as in CONTRIBUTING.md."""

    scope = "token"

    def phases(self, batch):
        return [Phase.of(batch, batch.prob.sqrt())]


def actor(regulator=None, base="vanilla", **settings):
    """verl's dataclass for the actor, through its own way from the configuration."""
    prefix = "actor_rollout_ref.actor.policy_loss"
    given = verl_cpu.OVERRIDES | {f"actor_rollout_ref.actor.{key}": value for key, value in settings.items()}
    if regulator is None:
        given[f"{prefix}.loss_mode"] = base
    else:
        given |= {
            f"{prefix}._target_": "poise.integrations.verl.RegulatedPolicyLoss", f"{prefix}.loss_mode": "poise",
            f"+{prefix}.regulator": f"'{regulator}'", f"+{prefix}.base_loss": base,
        }  # fmt: skip
    composed = verl_cpu.composed([f"{key}={value}" for key, value in given.items()])
    return omega_conf_to_dataclass(composed.actor_rollout_ref.actor)


def micro_batch(weight=None):
    """A DataProto, padded left and right as rollouts are, taken to verl's packed form by verl; log-probabilities."""
    random = torch.Generator().manual_seed(0)
    rows, prompt, answer = 4, 3, 6
    ids = torch.randint(1, 50, (rows, prompt + answer), generator=random)
    attention = torch.ones_like(ids)
    attention[1, :2], attention[2, -3:] = 0, 0
    mask = attention[:, prompt:].clone()
    mask[0, 2] = 0
    old = -3 * torch.rand(rows, answer, generator=random)
    advantages = torch.randn(rows, 1, generator=random) * mask
    data = DataProto.from_dict(
        tensors={
            "input_ids": ids, "attention_mask": attention, "position_ids": attention.cumsum(1) - 1,
            "prompts": ids[:, :prompt], "responses": ids[:, prompt:], "response_mask": mask, "old_log_probs": old,
            "ref_log_prob": old + 0.1, "advantages": advantages if weight is None else advantages * weight(old.exp()),
        }
    )  # fmt: skip
    packed = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(packed, dp_size=1, batch_num_tokens=int(mask.sum()) + 5, global_batch_size=6)
    drift = 0.6 * (torch.rand(rows, answer, generator=random) - 0.5)  # off policy, so that clips matter
    full = torch.zeros(rows, prompt + answer)
    full[:, prompt - 1 : -1] = (old + drift).clamp(max=-1e-3)  # verl's engines: at the place that predicts the token
    values = full[attention.bool()].requires_grad_()
    return packed, values


def run(config, weight=None):
    packed, values = micro_batch(weight)
    logp = torch.nested.nested_tensor_from_jagged(values, packed["input_ids"].offsets())
    loss, metrics = ppo_loss(config, {"log_probs": logp}, packed)
    loss.backward()
    return loss.detach(), values.grad, metrics


def close(ours, theirs, tolerance=1e-5):
    assert theirs.norm() > 0
    return (ours - theirs).norm() <= tolerance * theirs.norm()


def gradients(built):
    """The gradient of each mini-batch, in the order of the optimizer steps."""
    return built.actor_rollout_wg.engine.gradients
