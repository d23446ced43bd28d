"""Checks before training: reject what verl cannot do with a regulator. Each message says what to do instead.

The functions import verl only when called, because verl imports its plugins, and they import this file.
"""

from __future__ import annotations

import os
import warnings
from difflib import get_close_matches
from functools import cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from poise.integrations.demands import ALL, PART, CannotRegulateError, Demands, part_beyond, probe
from poise.regulators import Regulator, parse
from poise.regulators.base import STATES, scorers, with_scores

TESTED = "0.9.1"
UNTESTED = "POISE_UNTESTED_VERL"  # environment variable: 1 allows other versions
LOSS, TRAINER = "poise", "poise_sync"  # our names in verl's registries
# verl's losses in which weights on advantages do not weight tokens, or also have other effects.
UNFIT = {
    "geo_mean": "has one ratio and one advantage for a whole response, so token weights collapse to their mean",
    "clip_cov": "selects tokens by their advantages, so weights would change the selection; use poise's 'clip-cov'",
    "kl_cov": "selects tokens by their advantages, so weights would change the selection",
    "dro": "has a penalty that does not depend on the advantage, so weights would not reach it",
}
# Losses and averages in which response_mask only removes tokens. Other losses compute a ratio or length of the response
# within the mask, so a smaller mask would change the loss of the remaining tokens.
MASKABLE = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "cispo")
LENGTH_FREE = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
ENGINES = ("fsdp", "fsdp2")  # strategies in which a hook sees the hidden states and the whole output weight
# The optional fields of TokenBatch that the trainer can fill.
AVAILABLE = frozenset({"groups", "rewards", "correct", "targets", "entropy", "ref_logp", "sampler_logp"})


def check_verl() -> None:
    """Raise an error unless verl has the tested version. Only warn if the user allows other versions."""
    import verl

    if verl.__version__ == TESTED:
        return
    found = (
        f"poise.integrations.verl is tested with verl {TESTED}, this is {verl.__version__}: its internals may differ"
    )
    if os.environ.get(UNTESTED) != "1":
        raise CannotRegulateError(
            f"{found}. Install 'verl=={TESTED}'; to try yours, set {UNTESTED}=1 on every node, and first compare a run "
            "with the regulator grpo to a run of stock verl: both must have the same metrics"
        )
    warnings.warn(f"{found} ({UNTESTED}=1)", stacklevel=3)


def correct_at(config: Any) -> float | None:
    """The trainer's setting correct_at: the smallest reward of a correct response."""
    mode = config.trainer.v1.trainer_mode
    settings = config.trainer.v1.get(mode) or {}
    for key in settings:
        if key != "correct_at" and get_close_matches(str(key), ["correct_at"], cutoff=0.8):
            raise CannotRegulateError(f"trainer.v1.{mode}.{key} is unknown; did you mean correct_at?")
    value = settings.get("correct_at")
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return float(value)
    raise CannotRegulateError(
        f"trainer.v1.{mode}.correct_at is {value!r}: set it to a number, such as 1.0, or remove it"
    )


@cache
def check_policy_loss(text: str, base: str) -> tuple[Regulator, Demands]:
    """Raise an error unless the regulator works in a policy loss, which sees few responses at a time and no KL term."""
    if not text:
        raise CannotRegulateError("policy_loss.regulator is missing: set it, for example to 'ar(alpha=0.2)'")
    regulator = parse(text)
    wants = probe(regulator)
    part = part_beyond(regulator, "token")
    if len(wants.phases) > 1 or part is not None or regulator.needs:
        why = f"needs {', '.join(sorted(regulator.needs))}" if part is None else f"contains {type(part).__name__}"
        why = why if len(wants.phases) == 1 else f"has {len(wants.phases)} phases"
        raise CannotRegulateError(
            f"{text} {why}, but a policy loss sees only the log-probabilities and advantages of one micro-batch: leave "
            f"policy_loss as it is and use poise's trainer, trainer.v1.trainer_mode={TRAINER} "
            f"+trainer.v1.{TRAINER}.regulator=\"'{text}'\""
        )
    if wants.kl != ALL:
        raise CannotRegulateError(
            f"{text} weights the KL and entropy terms, which verl adds after the policy loss; set kl_weighted=False, "
            "as in 'tr-grpo(kl_weighted=False)'. Without KL and entropy terms this changes nothing"
        )
    if base == LOSS:
        raise CannotRegulateError(
            "policy_loss.base_loss is the loss to weight: set it to one of verl's, such as 'vanilla'"
        )
    if not wants.plain:
        _check_fit(base, text)
    return regulator, wants


def check_config(config: Any, regulator: Regulator, wants: Demands, name: str) -> None:
    """Run all checks that need verl's complete configuration. ``name`` is the regulator as the user wrote it."""
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    if not config.trainer.get("use_v1", True):
        raise CannotRegulateError(
            f"trainer.use_v1=False selects verl's old trainer, which ignores {name}; set it to True"
        )
    if loss == LOSS:
        raise CannotRegulateError(
            f"loss_mode={LOSS!r} and trainer_mode={TRAINER!r} would both weight the tokens; set "
            "actor_rollout_ref.actor.policy_loss.loss_mode to one of verl's losses, such as 'vanilla'"
        )
    if not wants.plain:
        _check_fit(loss, name)
    _check_needs(config, regulator, name)
    correct_at(config)
    _check_terms(actor, wants, loss, name)
    if len(wants.phases) > 1:
        _check_phases(config, wants, name)


def check_linear(function: Any, config: Any, base: str, mode: str) -> None:
    """Raise an error unless a weight on a token's advantage scales that token's loss term and no other's.

    The check uses random tokens. Our tests cover verl's own losses; this check is for losses that users register.
    """
    random = torch.Generator().manual_seed(0)
    old = -torch.rand(2, 3, generator=random, dtype=torch.float64) - 0.1
    new = (old + 0.8 * (torch.rand(2, 3, generator=random, dtype=torch.float64) - 0.5)).clamp(max=-1e-3)
    advantages = torch.tensor([[1.0], [-0.7]], dtype=torch.float64).expand(2, 3)
    weights = torch.rand(2, 3, generator=random, dtype=torch.float64) + 0.2

    def run(values: Tensor) -> tuple[Tensor, Tensor]:
        logp = new.clone().requires_grad_()
        loss, _ = function(
            old_log_prob=old,
            log_prob=logp,
            advantages=values,
            response_mask=torch.ones(2, 3, dtype=torch.bool),
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=None,
        )
        loss.backward()
        assert logp.grad is not None
        return loss.detach(), logp.grad

    loss, gradient = run(advantages * weights)
    local = True
    for place in range(6):
        one = torch.zeros(6, dtype=torch.float64)
        one[place] = 1.0
        part, pull = run(advantages * one.view(2, 3))
        loss = loss - weights.flatten()[place] * part
        gradient = gradient - weights.flatten()[place] * pull
        local &= bool((pull.flatten() * (1 - one)).abs().max() < 1e-9)
    if not (local and loss.abs() < 1e-6 and gradient.abs().max() < 1e-6):
        raise CannotRegulateError(
            f"the loss {base!r} with loss_agg_mode={mode!r} is not a sum of one term per token, "
            "proportional to its advantage, so weighting the advantages would not weight the tokens. Use one of "
            + ", ".join(MASKABLE)
        )


def _optional(config: Any, path: str) -> Any:
    """A setting of verl's configuration; None if the setting or its group is missing."""
    from omegaconf import OmegaConf

    return OmegaConf.select(config, path)


def _check_fit(loss: str, name: str) -> None:
    if loss in UNFIT:
        raise CannotRegulateError(f"the loss {loss!r} {UNFIT[loss]}: {name} cannot be used with it; try 'vanilla'")


def _check_needs(config: Any, regulator: Regulator, name: str) -> None:
    parts = scorers(regulator)
    needs = with_scores(regulator, [None] * len(parts)).needs
    if needs & STATES - {"targets"}:
        raise CannotRegulateError(
            f"{name} reads hidden states, which only verl's workers have: derive it from poise.regulators.Scorer "
            "(docs/verl.md), or use poise's own trainer, or TRL"
        )
    if parts:
        _check_states(config, name)
    if missing := sorted(needs - AVAILABLE):
        raise CannotRegulateError(f"{name} needs {', '.join(missing)}, which verl's batches do not have")
    if "correct" in needs and (why := _unclear_rewards(config)) and correct_at(config) is None:
        raise CannotRegulateError(
            f"{name} needs to know which responses are correct, but with {why} the rewards may not show it: set "
            f"trainer.v1.{config.trainer.v1.trainer_mode}.correct_at, the smallest reward of a correct response"
        )
    rollout = config.actor_rollout_ref.rollout
    if "entropy" in needs and _optional(config, "algorithm.rollout_correction.bypass_mode"):
        raise CannotRegulateError(
            f"{name} needs entropies, which verl computes with the old log-probabilities; set "
            "algorithm.rollout_correction.bypass_mode=False"
        )
    if "sampler_logp" in needs and not rollout.calculate_log_probs:
        raise CannotRegulateError(f"{name} needs actor_rollout_ref.rollout.calculate_log_probs=True")
    if "ref_logp" in needs and not (config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        raise CannotRegulateError(f"{name} needs a reference policy: actor_rollout_ref.actor.use_kl_loss=True")


def _unclear_rewards(config: Any) -> str:
    """The setting that may cause rewards other than 1, 0 and −1; "" if there is none."""
    if _optional(config, "reward.reward_kwargs.overlong_buffer_cfg.enable"):
        return "a length penalty (overlong_buffer_cfg)"
    own = _optional(config, "reward.custom_reward_function.path")
    return f"your reward function (custom_reward_function, {own})" if own else ""


def _check_states(config: Any, name: str) -> None:
    """Check that a worker's forward pass gives access to hidden states, the whole output weight, and whole groups."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    why = f"{name} reads hidden states in verl's forward pass, before the update; "
    if actor.strategy not in ENGINES:
        known = " or ".join(ENGINES)
        raise CannotRegulateError(f"{why}poise supports this with actor.strategy {known}, not {actor.strategy!r}")
    for place, part in (("actor", actor), ("actor.fsdp_config", actor.fsdp_config)):
        if int(part.get("ulysses_sequence_parallel_size") or 1) > 1:
            raise CannotRegulateError(
                f"{why}with sequence parallelism no process has all hidden states: set "
                f"actor_rollout_ref.{place}.ulysses_sequence_parallel_size=1"
            )
    if model.get("use_fused_kernels", False):
        raise CannotRegulateError(
            f"{why}fused kernels run the output layer without exposing hidden states: set "
            "actor_rollout_ref.model.use_fused_kernels=False"
        )
    if _optional(config, "algorithm.rollout_correction.bypass_mode"):
        raise CannotRegulateError(
            f"{why}with bypass_mode verl does not run this pass: set algorithm.rollout_correction.bypass_mode=False"
        )
    if config.actor_rollout_ref.rollout.n < 2:
        raise CannotRegulateError(
            f"{name} compares the responses of a group: set actor_rollout_ref.rollout.n to 2 or more"
        )
    workers = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    if config.data.train_batch_size % workers:
        raise CannotRegulateError(
            f"{name} needs whole groups on each of the {workers} workers: set data.train_batch_size (now "
            f"{config.data.train_batch_size}) to a multiple of {workers}"
        )


def _check_terms(actor: Any, wants: Demands, loss: str, name: str) -> None:
    """Check the KL loss and the entropy bonus. response_mask can remove them from a phase, but not weight them."""
    if not has_terms(actor) or wants.kl == ALL:
        return
    if wants.kl != PART:
        raise CannotRegulateError(
            f"{name} weights the KL and entropy terms token by token, which verl cannot express; set use_kl_loss=False "
            "and entropy_coeff=0, or kl_weighted=False if the method has it, as in 'tr-grpo(kl_weighted=False)'"
        )
    if loss not in MASKABLE:
        raise CannotRegulateError(
            f"{name} masks the KL and entropy terms, but with loss_mode={loss!r} a mask would change the loss of the "
            f"other tokens too; set use_kl_loss=False and entropy_coeff=0, or use one of {', '.join(MASKABLE)}"
        )
    if actor.loss_agg_mode not in LENGTH_FREE:
        raise CannotRegulateError(
            f"{name} masks the KL and entropy terms, but loss_agg_mode={actor.loss_agg_mode!r} divides by the number "
            "of unmasked tokens; set use_kl_loss=False and entropy_coeff=0, or use one of " + ", ".join(LENGTH_FREE)
        )


def has_terms(actor: Any) -> bool:
    """Whether verl's loss has a KL or entropy term besides the policy term."""
    return bool(actor.use_kl_loss) or float(actor.entropy_coeff) != 0


def _check_phases(config: Any, wants: Demands, name: str) -> None:
    listed = ", ".join(wants.phases)
    if config.actor_rollout_ref.actor.shuffle:
        raise CannotRegulateError(
            f"with actor.shuffle=True poise cannot know which mini-batches have no token in a phase of {name} "
            f"({listed}), where momentum alone would move the model; set actor_rollout_ref.actor.shuffle=False"
        )
    mtp = "actor_rollout_ref.model.mtp"
    for path, on in (
        (f"{mtp}.enable_train", _optional(config, f"{mtp}.enable") and _optional(config, f"{mtp}.enable_train")),
        ("distillation.enabled", _optional(config, "distillation.enabled")),
    ):
        if on:
            raise CannotRegulateError(f"the loss of {path} would act in every phase of {name} ({listed}); turn it off")
