"""Regulators inside verl, as a trainer: for methods that read the whole batch, or update in several phases.

trainer.v1:
  trainer_mode: poise_sync                # verl's synchronous trainer with a regulator
  poise_sync:
    regulator: ar(alpha=0.3) | lopti(threshold=0.5)

Other settings of ``poise_sync``: ``correct_at``, for methods that need to know which responses are correct; ``export``
and ``export_every``, to write responses and their tokens to a file.

The queue of verl's controller has the whole batch of a step, with whole groups. The regulator runs once on this batch
before each update of the actor. Then, for each phase, poise puts weighted advantages into the queue, verl updates the
actor, and poise restores the original advantages. Because weights are not negative, weighting the advantage weights
the clipped policy term. A phase removes KL and entropy terms by ``response_mask``; verl divides by a token count from
``loss_mask``, which does not change. Scores from hidden states come from the workers (``verl_scores``). ``verl_checks``
rejects settings that verl cannot express.
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
from poise.integrations.token_export import TokenExport, lines
from poise.integrations.verl_checks import TRAINER, check_config, check_linear, check_verl, correct_at, has_terms
from poise.integrations.verl_scores import SCORES, group_numbers, is_correct, owners, request, use_scoring_workers
from poise.regulators import Regulator, parse, summary
from poise.regulators.base import scorers, with_scores

ADVANTAGES, MASK = "advantages", "response_mask"  # the fields that a phase replaces in verl's queue
_FIELDS = {  # fields of TokenBatch, and verl's names for them
    "entropy": "entropy",
    "ref_logp": "ref_log_prob",
    "sampler_logp": "rollout_log_probs",
    "targets": "responses",
}
_Mixed: Any = object  # verl's trainer, whose methods the mixin calls through super()


class RegulatorMixin(_Mixed):  # type: ignore[misc]
    """Adds a regulator to a subclass of verl's ``PPOTrainer``: ``class Mine(RegulatorMixin, MyTrainer)``.

    ``trainer.v1.<trainer_mode>.regulator`` in verl's configuration is the text of the regulator. ``base_mode`` is the
    trainer_mode of the base class, because verl's own code compares the mode by name.
    """

    base_mode = "sync"

    def __init__(self, config: Any) -> None:
        check_verl()
        if not isinstance(self, get_trainer_cls(self.base_mode)):
            raise CannotRegulateError(
                f"{type(self).__name__} does not inherit from verl's trainer {self.base_mode!r}: set base_mode in the "
                "class to the trainer_mode of its base class"
            )
        mode = config.trainer.v1.trainer_mode
        settings = config.trainer.v1.get(mode) or {}
        self._regulator_name = str(settings.get("regulator") or "")
        if not self._regulator_name:
            raise CannotRegulateError(
                f"the regulator is missing: set it with +trainer.v1.{mode}.regulator=\"'lopti(threshold=0.4)'\""
            )
        self.regulator = parse(self._regulator_name)
        self._correct_at = correct_at(config)
        export = settings.get("export")
        self._token_export = None if export is None else TokenExport(str(export), int(settings.get("export_every", 10)))
        self._wants: Demands = probe(self.regulator)
        check_config(config, self.regulator, self._wants, self._regulator_name)
        if not self._wants.plain:
            actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
            loss = actor.policy_loss.loss_mode
            check_linear(get_policy_loss_fn(loss), actor, loss, actor.loss_agg_mode)
        config = OmegaConf.merge(config, {"trainer": {"v1": {"trainer_mode": self.base_mode}}})
        super().__init__(config)

    def _init_dataloader(self) -> None:
        """Extend verl's method: multiply the length of the learning-rate schedule, which advances in each phase."""
        super()._init_dataloader()
        self.config.actor_rollout_ref.actor.optim.total_training_steps *= len(self._wants.phases)

    def _init_resource_pool_mgr(self) -> None:
        """Extend verl's method: use workers that score, if the regulator needs scores."""
        super()._init_resource_pool_mgr()
        if scorers(self.regulator):
            use_scoring_workers(self.role_worker_mapping)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Override verl's method: a regulator that reads hidden states gets its scores from the same pass."""
        if not scorers(self.regulator):
            return super()._compute_old_log_prob(batch, metrics)
        scoring_batch = request(batch, self._processes(), self._regulator_name, self._correct_at)
        return super()._compute_old_log_prob(scoring_batch, metrics).select_keys(batch.keys)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Call verl's method once per phase, with advantages multiplied by the phase's weights."""
        tokens, stored, regulator = self._token_batch(batch)
        phases = regulator(tokens)
        self._check_phases(phases, tokens)
        metrics.update(summary(phases, tokens))
        if self._token_export is not None and self._token_export.wants_next():
            self._write_tokens(self._token_export, batch, tokens, phases)
        for phase in phases:
            rows = self._live_rows(tokens, phase)
            if not len(rows):
                continue  # no active token: momentum alone must not move the model
            piece = batch if len(rows) == len(batch) else batch.select_keys([batch.keys[row] for row in rows])
            phase_metrics: dict[str, Any] = {}
            with self._in_queue(batch, stored, self._weighted(stored, tokens, phase)):
                super()._update_actor(piece, phase_metrics)
            if len(phases) > 1:
                own = [key for key in phase_metrics if key.startswith("actor/") and "/perf/" not in key]
                phase_metrics |= {f"reg/{phase.name}/{key}": phase_metrics[key] for key in own}
            metrics.update(phase_metrics)  # verl's own names keep the last phase's values
            batch.extra_info.update(piece.extra_info)
        return batch

    def _token_batch(self, batch: Any) -> tuple[TokenBatch, TensorDict, Regulator]:
        """Return this step's batch from verl's queue, the fields that phases will replace, and the regulator."""
        score_fields = [f"{SCORES}{number}" for number in range(len(scorers(self.regulator)))]
        needs = with_scores(self.regulator, [None] * len(score_fields)).needs
        bypass = OmegaConf.select(self.config, "algorithm.rollout_correction.bypass_mode")
        if self._token_export is not None and not bypass:
            needs |= {"entropy"}  # for the export; verl has computed entropies anyway
        extra = {ours: theirs for ours, theirs in _FIELDS.items() if ours in needs}
        names = ["uid", MASK, "rm_scores", "old_log_probs", ADVANTAGES, *extra.values(), *score_fields]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        groups = group_numbers(owners(batch, data.pop("uid").tolist()))
        stored = data.select(ADVANTAGES, MASK)
        data = data.to_padded_tensor()
        rewards = data["rm_scores"].float().sum(1)
        tokens = TokenBatch(
            data["old_log_probs"].float(),
            data[MASK],
            data[ADVANTAGES].float(),
            groups=groups,
            rewards=rewards,
            correct=is_correct(rewards, self._correct_at) if "correct" in needs else None,
            **{ours: data[theirs] if ours == "targets" else data[theirs].float() for ours, theirs in extra.items()},
        )
        return tokens, stored, with_scores(self.regulator, [data[name] for name in score_fields])

    def _write_tokens(self, export: TokenExport, batch: Any, tokens: TokenBatch, phases: list[Phase]) -> None:
        """Export the responses of a step, except the empty rows with which verl pads its batches."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts", "responses"])
        prompts, responses = (data[name].unbind() for name in ("prompts", "responses"))
        made = lines(tokens, phases, prompts, responses, self.tokenizer.decode)
        export.write(self.global_steps, (line for line in made if line["tokens"]))

    def _processes(self) -> int:
        """The number of processes that share the batch. verl sets it when it balances the batch."""
        return int(max(self.actor_rollout_wg._dispatch_info["actor"])) + 1

    def _check_phases(self, phases: list[Phase], batch: TokenBatch) -> None:
        """Raise an error if the phases need more from verl than in the trial before training."""
        now = demands(phases, batch)
        if len(now.phases) > 1 and len(self._wants.phases) == 1:
            raise CannotRegulateError(
                f"{self._regulator_name} returned {len(now.phases)} phases ({', '.join(now.phases)}), but one in the "
                "trial before training: always return all phases, even those with no tokens"
            )
        if now.kl not in (ALL, self._wants.kl):
            check_config(self.config, self.regulator, now, self._regulator_name)

    def _weighted(self, stored: TensorDict, batch: TokenBatch, phase: Phase) -> TensorDict:
        """Return the weighted advantages of a phase; also its mask, if the phase excludes KL or entropy terms."""
        lengths = stored[MASK]
        weighted = {ADVANTAGES: response_to_nested(batch.token_advantages * phase.policy, lengths)}
        if has_terms(self.config.actor_rollout_ref.actor) and demands([phase], batch).kl == PART:
            mask = (phase.kl != 0).to(lengths.values().dtype)
            weighted[MASK] = response_to_nested(mask, lengths)
        return TensorDict(weighted, batch_size=len(stored))

    @contextmanager
    def _in_queue(self, batch: Any, stored: TensorDict, weighted: TensorDict) -> Iterator[None]:
        """Put the weighted fields into verl's queue; afterwards put the stored fields back."""
        place = {"keys": batch.keys, "partition_id": batch.partition_id}
        tq.kv_batch_put(**place, fields=weighted)
        try:
            yield
        finally:
            tq.kv_batch_put(**place, fields=stored.select(*weighted.keys()))

    def _live_rows(self, batch: TokenBatch, phase: Phase) -> list[int]:
        """The rows of the mini-batches that have an active token; all rows if there is only one phase.

        verl gives each process a contiguous block of rows, which the process splits into mini-batches in order. Only
        whole mini-batches are removed, so the other mini-batches do not change.
        """
        count = len(batch.mask)
        if len(self._wants.phases) == 1:
            return list(range(count))
        terms = phase.kl != 0 if has_terms(self.config.actor_rollout_ref.actor) else torch.zeros_like(batch.mask)
        active = ((phase.policy * batch.token_advantages != 0) | terms).any(1)
        processes = self._processes()
        size = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        rows = torch.arange(count).view(processes, -1, size // processes)  # process, mini-batch, row
        live: Tensor = active[rows].any(2).any(0)
        return rows[:, live].flatten().tolist()


@register_trainer(TRAINER)
class RegulatedTrainer(RegulatorMixin, PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer with a regulator."""
