"""Regulators inside TRL: ``RegulatedGRPOTrainer``, and ``RegulatorMixin`` for your own subclass of ``GRPOTrainer``.

>>> trainer = RegulatedGRPOTrainer(model, reward, GRPOConfig(num_iterations=2, ...), dataset, regulator="lopti")

TRL's loop, loss, checkpoints and logging do not change. Groups are complete only directly after TRL has generated and
scored them (``_generate_and_score_completions``), so the regulator runs there. It adds its weights to the batch as
tensors, which TRL shuffles and splits. ``_compute_loss`` accepts advantages of shape (B, T). Because weights are not
negative, weighting the advantage weights the clipped policy term. Weighting ``beta`` weights the KL term. ``trl_loss``
tests both. If every weight is 1, the batch does not change.

The phases of a regulator are iterations of TRL (``num_iterations``): the step counter and the learning-rate schedule
advance in each phase. ``trl_checks`` rejects settings that TRL cannot express. Evaluation uses no weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from poise._lib.errors import how_to_install

try:
    from accelerate.utils import gather_object
    from transformers import TrainerCallback
    from trl import GRPOTrainer
except ImportError as error:
    raise ImportError(f"poise.integrations.trl needs TRL ({error}); {how_to_install('trl')}") from error

import poise
from poise.batch import Phase, TokenBatch
from poise.integrations.demands import ALL, CannotRegulateError, Demands, demands, probe
from poise.integrations.token_export import TokenExport, lines
from poise.integrations.trl_checks import check_config, check_start, check_trainer, check_trl
from poise.integrations.trl_loss import check_loss, kl_weights
from poise.integrations.trl_metadata import KEY, check_resume, describe, tell_trackers, write_card
from poise.lm_head import Head
from poise.regulators import Regulator, parse, summary

WEIGHTS, KL_WEIGHTS = "poise_weights", "poise_kl_weights"  # (B, phases, T) in TRL's batch
USES = "poise_uses"  # (B,): how often the loss has used a row; this is the index of its next phase
_FIELDS = {  # fields of TokenBatch, and TRL's names for them
    "targets": "completion_ids",
    "ref_logp": "ref_per_token_logps",
    "sampler_logp": "sampling_per_token_logps",
}
_Mixed: Any = object  # TRL's trainer, whose methods the mixin calls through super()
Correct = str | Callable[[Tensor], Tensor]
Method = str | Regulator | Callable[[TokenBatch], Any]


@dataclass
class _State:
    """The mixin's state between TRL's calls."""

    demands: Demands
    rewards: Tensor | None = None  # (all rows, reward functions), for the last generation batch
    scored_ids: list[list[int]] = field(default_factory=list)  # this process's responses that got these rewards
    uses_left: int = 0  # with several phases: remaining uses of the batch's micro-batches by the loss
    loss_called: bool = False  # whether the current training step went through our _compute_loss
    head_checked: bool = False
    loss_checked: bool = False
    plain: bool = False  # whether every weight of the last generation batch is 1


class RegulatorMixin(_Mixed):  # type: ignore[misc]
    """Adds a regulator to a subclass of TRL's ``GRPOTrainer``: ``class Mine(RegulatorMixin, MyTrainer)``.

    ``regulator`` is a text form, a ``Regulator``, or a function from a batch to phases. ``correct`` determines which
    responses are correct, for methods that need this (NTHR): the name of a reward function that returns 0 or 1, or a
    function that maps the rewards (B, reward functions) to bool (B,). A checkpoint records its regulator; to resume
    with another one, set ``change_regulator``. ``export`` names a file for the responses and tokens of the first and
    every ``export_every``-th generation batch (``poise report FILE``).
    """

    def __init__(
        self,
        *args: Any,
        regulator: Method,
        correct: Correct | None = None,
        change_regulator: bool = False,
        export: str | Path | None = None,
        export_every: int = 10,
        **kwargs: Any,
    ) -> None:
        check_trl(type(self))
        self._token_export = None if export is None else TokenExport(export, export_every)
        self.regulator = parse(regulator)
        self._regulator_name = regulator if isinstance(regulator, str) else describe(self.regulator)
        self._change_regulator = change_regulator
        self._correct = correct
        self._poise = _State(demands=probe(self.regulator))
        if "correct" in self.regulator.needs and correct is None:
            raise CannotRegulateError(
                f"{self._regulator_name} needs to know which responses are correct: pass correct=, the name of a "
                "reward function that returns 0 or 1, or a function of the rewards (B, reward functions) that returns "
                "bool (B,)"
            )
        for value in (*args, *kwargs.values()):  # before the model is loaded
            if hasattr(value, "steps_per_generation"):
                check_config(value, self.regulator, self._poise.demands, self._regulator_name)
        super().__init__(*args, **kwargs)
        check_config(self.args, self.regulator, self._poise.demands, self._regulator_name)
        check_trainer(self, self.regulator, self._poise.demands, self._regulator_name)
        if isinstance(correct, str) and correct not in self.reward_func_names:
            known = ", ".join(self.reward_func_names)
            raise CannotRegulateError(f"correct={correct!r} is not a reward function; the reward functions are {known}")
        self.add_callback(_Callback(self))

    # --- Overrides of TRL's methods, in the order in which a step calls them

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's step, and check that it called our loss."""
        self._poise.loss_called = False
        loss = super().training_step(*args, **kwargs)
        if not self._poise.loss_called:
            raise RuntimeError(
                f"the loss bypassed poise, so {self._regulator_name} had no effect. Something overrides compute_loss "
                "or _compute_loss: put RegulatorMixin first among the bases, and call super() in your override"
            )
        return loss

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        self._poise.scored_ids = completion_ids_list
        self._poise.rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._poise.rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return {**output, **self._weights(output)} if self.model.training else output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._poise.loss_called = True
        if not self.model.training or self._poise.plain:
            return super()._compute_loss(model, inputs)
        if WEIGHTS not in inputs:
            raise RuntimeError(f"the batch carries no weights of {self._regulator_name}: its generation bypassed poise")
        weighted = {name: value for name, value in inputs.items() if name not in (WEIGHTS, KL_WEIGHTS, USES)}
        if not self._poise.loss_checked:
            self._poise.loss_checked = check_loss(
                self, super()._compute_loss, model, weighted, self._regulator_name, kl=KL_WEIGHTS in inputs
            )
        phase = self._next_phase(inputs)
        advantages = inputs["advantages"]
        weighted["advantages"] = advantages.view(len(advantages), -1) * inputs[WEIGHTS][:, phase]
        with kl_weights(self, inputs[KL_WEIGHTS][:, phase] if KL_WEIGHTS in inputs else None):
            return super()._compute_loss(model, weighted)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, with a section about the regulator."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            write_card(self.args.output_dir, describe(self.regulator))

    # --- The mixin's own methods

    def _next_phase(self, inputs: dict[str, Any]) -> int:
        """Count this use of the batch, and return the index of its phase."""
        phases = self._poise.demands.phases
        if len(phases) == 1:
            return 0
        phase = int(inputs[USES][0])
        if phase == len(phases):
            raise RuntimeError(f"a batch is used more often than {self._regulator_name} has phases ({phase})")
        inputs[USES] += 1  # in place: TRL keeps the batch for its next use
        self._poise.uses_left -= 1
        return phase

    @torch.no_grad()
    def _weights(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """Run the regulator on a new generation batch, log its metrics, and return the tensors to add to the batch."""
        wants = self._poise.demands
        batch, rows = self._token_batch(output)
        phases = self.regulator(batch)
        self._poise.plain = self._check_phases(phases, batch)
        for name, value in self._summary(phases, batch).items():
            self._metrics["train"][name].append(value)
        if (ratio := output.get("importance_sampling_ratio")) is not None:
            mask = output["completion_mask"] * output.get("tool_mask", 1)
            dropped = torch.stack([((ratio == 0) * mask).sum(), mask.sum()])
            dropped, every = self.accelerator.reduce(dropped, "sum").tolist()
            self._metrics["train"]["reg/dropped_share"].append(dropped / max(1, every))
        if self._token_export is not None and self._token_export.wants_next():
            self._write_tokens(self._token_export, output, batch.rows(rows), [phase.rows(rows) for phase in phases])
        if self._poise.plain:
            return {}

        if self._poise.uses_left:
            raise RuntimeError(f"new rollouts begin in the middle of the phases of {self._regulator_name}")
        if len(phases) > 1:
            self._poise.uses_left = self.args.steps_per_generation * len(phases)
        count, length = output["completion_mask"].shape
        tensors = {WEIGHTS: torch.stack([phase.policy[rows, :length] for phase in phases], 1)}
        tensors[USES] = torch.zeros(count, dtype=torch.long, device=tensors[WEIGHTS].device)
        if wants.kl != ALL and self.beta != 0:
            tensors[KL_WEIGHTS] = torch.stack([phase.kl[rows, :length] for phase in phases], 1)
        return tensors

    def _write_tokens(
        self, export: TokenExport, output: dict[str, Any], batch: TokenBatch, phases: list[Phase]
    ) -> None:
        """Export the responses of all processes. ``batch`` and ``phases`` are this process's."""
        processor: Any = self.processing_class
        decode = getattr(processor, "tokenizer", processor).decode
        prompts, responses = (
            [ids[read.bool()] for ids, read in zip(output[f"{name}_ids"], output[f"{name}_mask"], strict=True)]
            for name in ("prompt", "completion")
        )
        made: list[dict[str, Any]] = gather_object(lines(batch, phases, prompts, responses, decode))
        if self.is_world_process_zero():
            groups = ({**line, "group": row // self.num_generations} for row, line in enumerate(made))
            export.write(self.state.global_step + 1, groups)

    def _check_phases(self, phases: list[Phase], batch: TokenBatch) -> bool:
        """Raise an error if the phases need more from TRL than in the trial before training.

        Returns True if all weights are 1.
        """
        wants, now = self._poise.demands, demands(phases, batch)
        if len(phases) != len(wants.phases):
            names = ", ".join(phase.name for phase in phases)
            raise CannotRegulateError(
                f"{self._regulator_name} returned {len(phases)} phases ({names}), but {len(wants.phases)} in the trial "
                "before training: always return all phases, even those with no tokens"
            )
        if (wants.plain and not now.plain) or now.kl not in (ALL, wants.kl):
            check_config(self.args, self.regulator, now, self._regulator_name)
        if self.beta != 0 and now.kl != ALL == wants.kl:
            raise CannotRegulateError(
                f"{self._regulator_name} weights KL terms, but did not in the trial before training"
            )
        return wants.plain and now.plain

    def _token_batch(self, output: dict[str, Any]) -> tuple[TokenBatch, slice]:
        """Return the generation batch of all processes, and the slice of this process's rows.

        Hidden states are not gathered. If the regulator needs them, it sees only this process's batch, in whole groups.
        """
        needs = self.regulator.needs
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        old_logp, entropy, hidden = self._old_policy(output)
        count, rank = len(mask), self.accelerator.process_index
        ours = slice(rank * count, (rank + 1) * count)
        alone = hidden is not None

        def whole(values: Tensor) -> Tensor:
            if alone or self.accelerator.num_processes == 1:
                return values
            if values.dim() == 2:
                values = self.accelerator.pad_across_processes(values, dim=1)
            return self.accelerator.gather(values.contiguous())  # type: ignore[no-any-return]

        fields: dict[str, Any] = self._scores(output, ours if alone else slice(None))
        if entropy is not None:
            fields["entropy"] = whole(entropy.float())
        if hidden is not None:
            fields |= {"hidden": hidden, "head": head_of(self)}
        for name in needs & _FIELDS.keys():
            fields[name] = whole(self._field(output, name, old_logp))
        batch = TokenBatch(
            whole(old_logp.float()),
            whole(mask.long()),
            whole(output["advantages"].float()),
            groups=torch.arange(count if alone else count * self.accelerator.num_processes, device=mask.device)
            // self.num_generations,  # TRL keeps a prompt's responses together
            **fields,
        )
        return batch, slice(None) if alone else ours

    def _scores(self, output: dict[str, Any], rows: slice) -> dict[str, Tensor]:
        """Rewards and correctness; empty if a subclass replaced responses after scoring."""
        rewards = self._poise.rewards
        if rewards is None or not _same_responses(output, self._poise.scored_ids):
            if needs := sorted(self.regulator.needs & {"rewards", "correct"}):
                raise CannotRegulateError(
                    f"{self._regulator_name} needs {' and '.join(needs)}, but the batch's responses are not those that "
                    f"TRL scored: {type(self).__name__} replaces responses after scoring"
                )
            return {}
        scores = rewards[rows]
        fields = {"rewards": (scores * self.reward_weights.to(scores.device)).nansum(1)}
        return fields if self._correct is None else fields | {"correct": self._is_correct(scores)}

    def _field(self, output: dict[str, Any], name: str, old_logp: Tensor) -> Tensor:
        """An optional field of ``TokenBatch``, from TRL's batch."""
        if (values := output.get(_FIELDS[name])) is None:  # check_config rules out all other reasons
            raise CannotRegulateError(
                f"{self._regulator_name} needs {name}, but rollout_func returned logprobs=None: return the "
                "log-probability of each sampled token there"
            )
        if name == "sampler_logp":  # NaN means unknown; like TRL, use a ratio of 1 there
            values = torch.where(values.isnan(), old_logp.to(values.dtype), values)
        return values

    def _old_policy(self, output: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities, entropies and hidden states of the sampled tokens, before the update.

        If generation and update are aligned, TRL stores no old log-probabilities, and its loss uses the current ones.
        In this case poise computes old log-probabilities only for the weights, without dropout, which would add noise
        and consume random numbers.
        """
        needs = self.regulator.needs
        logp = output.get("old_per_token_logps")
        if logp is not None and not needs & {"entropy", "hidden"}:
            return logp, None, None
        length = output["completion_ids"].shape[1]
        known = inspect.signature(self._get_per_token_logps_and_entropies).parameters
        images = {name: output[name] for name in known if name in output}
        states: list[Tensor] = []
        hook = hidden_states_hook(self, states, length) if "hidden" in needs else nullcontext()
        with self._without_dropout(), hook:
            current, entropy, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
                length,
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy="entropy" in needs or self._token_export is not None,
                **images,
            )
        hidden = torch.cat(states) if states else None
        if hidden is not None and not self._poise.head_checked:
            check_head(self, hidden, current, output, self._regulator_name)
            self._poise.head_checked = True
        return current if logp is None else logp, entropy, hidden

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def _is_correct(self, rewards: Tensor) -> Tensor:
        if callable(self._correct):
            return self._correct(rewards)
        values = rewards[:, self.reward_func_names.index(self._correct)].nan_to_num(0.0)
        if ((values != 0) & (values != 1)).any():
            value = values[(values != 0) & (values != 1)][0].item()
            raise CannotRegulateError(
                f"the reward function {self._correct!r} returned {value:g}, so it does not say what is correct (0 or "
                "1); pass correct=, a function of the rewards (B, reward functions) that returns bool (B,)"
            )
        return values == 1

    def _summary(self, phases: list[Phase], batch: TokenBatch) -> dict[str, float]:
        """The regulator's metrics (``reg/…``) over all processes."""
        numbers = summary(phases, batch)
        if batch.hidden is None or self.accelerator.num_processes == 1:
            return numbers
        gathered = gather_object([numbers])  # each process has its own batch
        by_name = {name: [one[name] for one in gathered if name in one] for one in gathered for name in one}
        return {name: sum(values) / len(values) for name, values in by_name.items()}

    def _start(self) -> None:
        """Prepare for training, which begins with new rollouts even if ``train`` resumes or is called again."""
        wants = self._poise.demands
        check_start(self.args, self.state, wants, self._regulator_name)
        method = describe(self.regulator)
        if not self._change_regulator:
            check_resume(self.state, method)
        # TRL writes this into trainer_state.json with every checkpoint.
        self.state.stateful_callbacks[KEY] = {"regulator": method, "version": poise.__version__}
        if self.is_world_process_zero():
            tell_trackers(self.callback_handler.callbacks, method)
        if len(wants.phases) > 1:
            self._step, self._buffered_inputs, self._poise.uses_left = 0, None, 0

    def _skip_idle_step(self) -> None:
        """If there is no gradient, prevent momentum from moving the model.

        Optimizers skip a parameter whose gradient is None, and do not change its state. With one phase poise behaves
        like TRL, which takes a step even on a batch without advantages.
        """
        if len(self._poise.demands.phases) == 1:
            return
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moves = any(_nonzero(parameter.grad) for parameter in parameters if parameter.grad is not None)
        idle = not self.accelerator.reduce(torch.tensor(int(moves), device=self.accelerator.device), "sum")
        self._metrics["train"]["reg/idle_steps"].append(float(idle))
        if idle:
            for parameter in parameters:
                parameter.grad = None


def _same_responses(output: dict[str, Any], scored: list[list[int]]) -> bool:
    """Whether the batch contains exactly the scored responses."""
    lengths = output["completion_mask"].sum(1).tolist()  # 0 if TRL masks a truncated response
    return len(lengths) == len(scored) and all(
        row[: len(ids)] == list(ids) and length <= len(ids)
        for row, length, ids in zip(output["completion_ids"].tolist(), lengths, scored, strict=True)
    )


def _nonzero(gradient: Tensor) -> bool:
    """Whether the gradient, or this process's shard of it, has an entry other than 0."""
    return bool(getattr(gradient, "to_local", lambda: gradient)().any())


class _Callback(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: RegulatorMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer._start()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer._skip_idle_step()


class RegulatedGRPOTrainer(RegulatorMixin, GRPOTrainer):  # type: ignore[misc]
    """TRL's ``GRPOTrainer`` with ``regulator=``, for example ``"ar(alpha=0.3) | lopti(threshold=0.5)"``."""


def causal_model(trainer: Any) -> Any:
    """The trainer's language model, without the wrappers of accelerate and PEFT."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "peft_config") else model


def head_of(trainer: Any) -> Head:
    """The model's head at the trainer's temperature.

    Parts that FSDP2 has sharded are gathered, on all processes at once.
    """
    model = causal_model(trainer)
    head = Head.of(model.get_output_embeddings(), model.config.get_text_config(), trainer.temperature)
    parts = {"weight": head.weight, "bias": head.bias}
    whole: dict[str, Any] = {name: part.full_tensor() for name, part in parts.items() if isinstance(part, DTensor)}
    return replace(head, **whole)


def hidden_states_hook(trainer: Any, states: list[Tensor], length: int) -> AbstractContextManager[Any]:
    """Within this context, a hook appends to ``states`` the hidden states that predict the last ``length`` tokens."""
    hook: AbstractContextManager[Any] = causal_model(trainer).base_model.register_forward_hook(
        lambda _module, _args, out: states.append(out.last_hidden_state[:, -length - 1 : -1].detach())
    )
    return hook


def check_head(trainer: Any, hidden: Tensor, logp: Tensor, output: dict[str, Any], name: str) -> None:
    """Raise an error unless log-probabilities from these hidden states equal TRL's, for some tokens of the batch."""
    row, column = (places[:64] for places in output["completion_mask"].nonzero(as_tuple=True))
    logits = head_of(trainer)(hidden[row, column]).float()
    ours = logits.log_softmax(-1).gather(-1, output["completion_ids"][row, column][:, None])[:, 0]
    gap = float((ours - logp[row, column].float()).abs().max()) if len(row) else 0.0
    exact = hidden.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"
    if not gap <= (1e-3 if exact else 0.3):
        raise CannotRegulateError(
            f"{type(causal_model(trainer)).__name__} does something between its base model and its head that poise "
            f"does not support (log-probabilities differ by {gap:.2g}): {name} cannot be used with it"
        )
