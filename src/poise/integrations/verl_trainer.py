"""Regulators inside verl, as a trainer: for methods that look at the whole batch, or update in several phases.

trainer.v1:
  trainer_mode: poise_sync                # verl's synchronous trainer, and
  poise_sync:
    regulator: ar(alpha=0.3) | lopti(threshold=0.5)

The controller of verl has the whole batch of a step, groups included, in its queue. Right before the actor is updated
the regulator sees it, once; then, for each of its phases, weighted advantages take the place of the plain ones, verl
updates the actor, and the plain ones come back. Weights are not negative, so weighting the advantage is weighting the
clipped policy term. A phase that leaves out KL and entropy terms does so by ``response_mask``; the count that verl
divides by comes from ``loss_mask``, which stays. What verl cannot express is refused by ``verl_checks``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls, register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_to_nested

from poise.batch import Phase, TokenBatch
from poise.integrations.demands import ALL, PART, CannotRegulateError, Demands, demands, probe
from poise.integrations.verl_checks import TRAINER, check_config, check_linear, check_verl, has_terms
from poise.regulators import parse, summary

ADVANTAGES, MASK = "advantages", "response_mask"  # what a phase changes in verl's queue
_FIELDS = {  # of TokenBatch, as verl names them
    "entropy": "entropy",
    "ref_logp": "ref_log_prob",
    "sampler_logp": "rollout_log_probs",
    "targets": "responses",
}
_Mixed: Any = object  # the mixin's methods call those of verl's trainer by super()


class RegulatorMixin(_Mixed):  # type: ignore[misc]
    """Puts a regulator into a subclass of verl's ``PPOTrainer``: ``class Mine(RegulatorMixin, MyTrainer)``.

    The regulator is ``trainer.v1.<trainer_mode>.regulator`` in verl's configuration, in its text form. ``base_mode`` is
    the mode of verl whose trainer this is: verl's own code asks for it by name.
    """

    base_mode = "sync"

    def __init__(self, config: Any) -> None:
        check_verl()
        if not isinstance(self, get_trainer_cls(self.base_mode)):
            raise CannotRegulateError(
                f"{type(self).__name__} is not made from verl's trainer {self.base_mode!r}: set base_mode in the class "
                "to the name of the one that it is made from"
            )
        mode = config.trainer.v1.trainer_mode
        settings = config.trainer.v1.get(mode) or {}
        self._regulator_name = str(settings.get("regulator") or "")
        if not self._regulator_name:
            raise CannotRegulateError(
                f"which regulator? Set it with +trainer.v1.{mode}.regulator=\"'lopti(threshold=0.4)'\""
            )
        self.regulator = parse(self._regulator_name)
        self._wants: Demands = probe(self.regulator)
        check_config(config, self.regulator, self._wants, self._regulator_name)
        if not self._wants.plain:
            actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
            loss = actor.policy_loss.loss_mode
            check_linear(get_policy_loss_fn(loss), actor, loss, actor.loss_agg_mode)
        config = OmegaConf.merge(config, {"trainer": {"v1": {"trainer_mode": self.base_mode}}})
        super().__init__(config)

    def _init_dataloader(self) -> None:
        """verl's, which also says how long the learning-rate schedule is: it ticks in each phase."""
        super()._init_dataloader()
        self.config.actor_rollout_ref.actor.optim.total_training_steps *= len(self._wants.phases)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's, once for each phase, with advantages that carry its weights."""
        found, stored = self._token_batch(batch)
        phases = self.regulator(found)
        self._check_phases(phases, found)
        metrics.update(summary(phases, found))
        for phase in phases:
            rows = self._live_rows(found, phase)
            if not len(rows):
                continue  # no token takes part: momentum alone must not move the model
            piece = batch if len(rows) == len(batch) else batch.select_keys([batch.keys[row] for row in rows])
            made: dict[str, Any] = {}
            with self._in_queue(batch, stored, self._weighted(stored, found, phase)):
                super()._update_actor(piece, made)
            if len(phases) > 1:
                own = [key for key in made if key.startswith("actor/") and "/perf/" not in key]
                made |= {f"reg/{phase.name}/{key}": made[key] for key in own}
            metrics.update(made)  # verl's own names hold the last phase
            batch.extra_info.update(piece.extra_info)
        return batch

    def _token_batch(self, batch: Any) -> tuple[TokenBatch, TensorDict]:
        """The batch of this step as the regulator sees it, from verl's queue; and what of the queue will change."""
        extra = {ours: theirs for ours, theirs in _FIELDS.items() if ours in self.regulator.needs}
        names = ["uid", MASK, "rm_scores", "old_log_probs", ADVANTAGES, *extra.values()]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        numbers: dict[str, int] = {}
        owners = [
            key if tag.get("is_padding", False) else str(uid)  # verl fills up batches with copies that have no token
            for key, tag, uid in zip(batch.keys, batch.tags, data.pop("uid").tolist(), strict=True)
        ]
        groups = [numbers.setdefault(name, len(numbers)) for name in owners]
        stored = data.select(ADVANTAGES, MASK)
        data = data.to_padded_tensor()
        found = TokenBatch(
            data["old_log_probs"].float(),
            data[MASK],
            data[ADVANTAGES].float(),
            groups=torch.tensor(groups),
            rewards=data["rm_scores"].float().sum(1),
            **{ours: data[theirs] if ours == "targets" else data[theirs].float() for ours, theirs in extra.items()},
        )
        return found, stored

    def _check_phases(self, phases: list[Phase], batch: TokenBatch) -> None:
        """The regulator must do what it did when it was tried, as far as verl cares."""
        now = demands(phases, batch)
        if len(now.phases) > 1 and len(self._wants.phases) == 1:
            raise CannotRegulateError(
                f"{self._regulator_name} has made {len(now.phases)} phases ({', '.join(now.phases)}), where there was "
                "one when it was tried: return all phases every time, even those without a token"
            )
        if now.kl not in (ALL, self._wants.kl):
            check_config(self.config, self.regulator, now, self._regulator_name)

    def _weighted(self, stored: TensorDict, batch: TokenBatch, phase: Phase) -> TensorDict:
        """What takes the place of the plain advantages, and of the mask where there are terms to be left out."""
        lengths = stored[MASK]
        weighted = {ADVANTAGES: response_to_nested(batch.token_advantages * phase.policy, lengths)}
        if has_terms(self.config.actor_rollout_ref.actor) and demands([phase], batch).kl == PART:
            kept = (phase.kl != 0).to(lengths.values().dtype)
            weighted[MASK] = response_to_nested(kept, lengths)
        return TensorDict(weighted, batch_size=len(stored))

    @contextmanager
    def _in_queue(self, batch: Any, stored: TensorDict, weighted: TensorDict) -> Iterator[None]:
        place = {"keys": batch.keys, "partition_id": batch.partition_id}
        tq.kv_batch_put(**place, fields=weighted)
        try:
            yield
        finally:
            tq.kv_batch_put(**place, fields=stored.select(*weighted.keys()))

    def _live_rows(self, batch: TokenBatch, phase: Phase) -> list[int]:
        """The rows of those mini-batches in which some token takes part; all rows where there is but one phase.

        verl hands each process a run of rows, and each takes its mini-batches from its run in order. Whole mini-batches
        are left out, so the others stay what they are.
        """
        count = len(batch.mask)
        if len(self._wants.phases) == 1:
            return list(range(count))
        terms = phase.kl != 0 if has_terms(self.config.actor_rollout_ref.actor) else torch.zeros_like(batch.mask)
        moving = ((phase.policy * batch.token_advantages != 0) | terms).any(1)
        processes = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1  # known since verl balanced the batch
        size = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        rows = torch.arange(count).view(processes, -1, size // processes)  # process, mini-batch, row
        live: Tensor = moving[rows].any(2).any(0)
        return rows[:, live].flatten().tolist()


@register_trainer(TRAINER)
class RegulatedTrainer(RegulatorMixin, PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer with a regulator."""
