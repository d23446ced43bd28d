"""Regulators inside verl, as a policy loss: for methods that treat each token separately (AR, TR-GRPO, amplify).

actor_rollout_ref.actor.policy_loss:
  _target_: poise.integrations.verl.RegulatedPolicyLoss
  loss_mode: poise
  regulator: ar(alpha=0.2)
  base_loss: vanilla        # any loss of verl that is a sum of token terms, each proportional to its advantage

A policy loss sees one micro-batch, but not the KL and entropy terms. For methods that read the whole batch or update in
several phases, use the trainer (``verl_trainer``). Loss and trainer are entry points of the group ``verl.plugins``,
which ``import verl`` loads in every process. verl hides errors in plugins; ``poise doctor verl`` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from poise._lib.errors import how_to_install

try:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
    from verl.workers.config import PolicyLossConfig
except ImportError as error:
    raise ImportError(f"poise.integrations.verl needs verl ({error}); {how_to_install('verl')}") from error

from poise.batch import TokenBatch
from poise.integrations.demands import CannotRegulateError
from poise.integrations.verl_checks import LOSS, check_linear, check_policy_loss, check_verl

_tried: set[tuple[str, str]] = set()  # pairs (loss, loss_agg_mode) that passed check_linear


@dataclass
class RegulatedPolicyLoss(PolicyLossConfig):  # type: ignore[misc]
    """Settings of the regulated policy loss: verl's settings, the regulator as text, and the loss to weight."""

    loss_mode: str = LOSS
    regulator: str = ""
    base_loss: str = "vanilla"

    def __post_init__(self) -> None:
        check_verl()
        if self.loss_mode != LOSS:
            raise CannotRegulateError(
                f"policy_loss.loss_mode is {self.loss_mode!r}, so {self.regulator} would have no effect; set it to "
                f"{LOSS!r}, and base_loss to {self.loss_mode!r}"
            )
        check_policy_loss(self.regulator, self.base_loss)


@register_policy_loss(LOSS)  # type: ignore[untyped-decorator, unused-ignore]
def regulated_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Compute ``base_loss`` with advantages multiplied by the regulator's weights."""
    settings = config.policy_loss
    if not isinstance(settings, RegulatedPolicyLoss):
        raise CannotRegulateError(
            f"loss_mode={LOSS!r} needs its own settings: set policy_loss._target_ to "
            "poise.integrations.verl.RegulatedPolicyLoss, and policy_loss.regulator"
        )
    base = get_policy_loss_fn(settings.base_loss)
    regulator, wants = check_policy_loss(settings.regulator, settings.base_loss)
    if not wants.plain and (key := (settings.base_loss, loss_agg_mode)) not in _tried:
        check_linear(base, config, *key)
        _tried.add(key)
    (phase,) = regulator(TokenBatch(old_log_prob.float(), response_mask, advantages.float()))
    loss, metrics = base(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages * phase.policy,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )
    mean = phase.policy.sum() / response_mask.sum().clamp(min=1)
    return loss, {**metrics, "reg/weight_mean": mean.item()}
