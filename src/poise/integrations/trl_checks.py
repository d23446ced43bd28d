"""Checks before training: reject what TRL cannot do with a regulator. Each message says what to do instead."""

from __future__ import annotations

import warnings
from typing import Any

import trl

from poise.integrations.demands import ALL, CannotRegulateError, Demands, part_beyond
from poise.regulators import Regulator

MINORS = range(10, 17)  # tested versions 1.x
TESTED = f"1.{MINORS[0]} to 1.{MINORS[-1]}"
# The methods that the mixin overrides or calls. TRL's GRPOTrainer or its base classes must define them.
HOOKS = (
    "training_step",
    "_prepare_inputs",
    "compute_loss",
    "_compute_loss",
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_get_per_token_logps_and_entropies",
)
# TRL's other online trainers, and why they cannot be regulated.
OTHERS = {
    "RLOOTrainer": "its loss has one ratio for a whole response, so there are no per-token terms to weight",
    "AsyncGRPOTrainer": "it packs responses from a queue for its own loss, for which poise has no adapter",
    "OnlineDPOTrainer": "its loss compares pairs of whole responses and has no advantages",
}


def check_trl(trainer: type) -> None:
    """Raise an error unless the trainer's methods are TRL's own. Warn about an untested version."""
    base = next((kind for kind in trainer.__mro__ if kind.__name__ == "GRPOTrainer" and _is_trl(kind)), None)
    if base is None:
        raise CannotRegulateError(f"{trainer.__name__} does not inherit from TRL's GRPOTrainer: {_other(trainer)}")
    for name in HOOKS:
        if not hasattr(base, name):
            raise CannotRegulateError(
                f"GRPOTrainer.{name}, which poise hooks into, does not exist in TRL {trl.__version__}; install TRL "
                f"{TESTED}, as poise's extra 'trl' does"
            )
        if not _is_trl(method := getattr(base, name)):
            raise CannotRegulateError(
                f"GRPOTrainer.{name} is not TRL's own but comes from {method.__module__}: its loss may bypass poise. "
                "Train without the library that patches it"
            )
    if trl.__version__.split(".")[:2] not in [["1", str(minor)] for minor in MINORS]:
        warnings.warn(
            f"poise.integrations.trl is tested with TRL {TESTED}, this is {trl.__version__}. poise "
            "checks the loss on the first batch, but other changes in this version may go unnoticed",
            stacklevel=3,
        )


def _is_trl(thing: Any) -> bool:
    return str(thing.__module__).split(".")[0] == "trl"


def _other(trainer: type) -> str:
    """Why a trainer that is not a GRPOTrainer cannot be regulated."""
    names = [kind.__name__ for kind in trainer.__mro__]
    names = names[names.index("RegulatorMixin") + 1 :]
    for name, reason in OTHERS.items():
        if name in names:
            return f"{name} cannot be regulated, because {reason}. Use GRPOTrainer, or a subclass of it"
    if substitute := next((name for name in names if name.endswith("GRPOTrainer")), None):
        return (
            f"another library, such as Unsloth, has replaced GRPOTrainer by its own {substitute}, whose loss bypasses "
            "poise. Train without that library"
        )
    return "put RegulatorMixin before GRPOTrainer or a subclass of it, as in class Mine(RegulatorMixin, Yours)"


def check_config(args: Any, regulator: Regulator, wants: Demands, name: str) -> None:
    """Run all checks that need only the GRPOConfig. ``name`` is the regulator as the user wrote it."""
    if "ref_logp" in regulator.needs and args.beta == 0:
        raise CannotRegulateError(
            f"{name} needs ref_logp, the reference policy's log-probabilities, which TRL computes only for a KL term; "
            "set beta in GRPOConfig to a value other than 0, such as 0.001"
        )
    if args.importance_sampling_level != "token" and not wants.plain:
        raise CannotRegulateError(
            f"importance_sampling_level={args.importance_sampling_level!r} has one ratio for a whole response, in "
            f"which the token weights of {name} collapse to their mean; set importance_sampling_level='token'"
        )
    if wants.kl != ALL and (args.entropy_coef != 0 or args.use_adaptive_entropy):
        raise CannotRegulateError(
            f"{name} weights the entropy bonus, and TRL cannot weight it token by token; set entropy_coef=0 and "
            "use_adaptive_entropy=False" + ("" if wants.split else ", or kl_weighted=False if the method has it")
        )
    count = len(wants.phases)
    if count == 1:
        return
    listed = ", ".join(wants.phases)
    if args.num_iterations != count:
        raise CannotRegulateError(
            f"{name} updates in {count} phases ({listed}), and each is an iteration of TRL: set num_iterations={count} "
            f"in GRPOConfig, not {args.num_iterations}"
        )
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise CannotRegulateError(
            f"one optimizer step would mix the phases ({listed}) of {name}: steps_per_generation "
            f"({args.steps_per_generation}) must be a multiple of gradient_accumulation_steps "
            f"({args.gradient_accumulation_steps})"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise CannotRegulateError(
            f"optim={optimizer!r} updates the weights inside the backward pass, so poise could not skip the step of a "
            f"phase of {name} with no tokens; use another optimizer, such as 'adamw_torch_fused'"
        )
    if args.fp16 and not args.max_grad_norm:
        raise CannotRegulateError(
            f"with fp16 and no gradient clipping, poise cannot skip the step of a phase of {name} with no tokens; set "
            "max_grad_norm (1e9 clips nothing), or bf16=True"
        )
    steps = period(args)
    if args.max_steps > 0:
        _check_multiple("max_steps", args.max_steps, steps, name)
    field, value = _save_interval(args, args.save_steps, args.eval_steps)
    if value is not None and value >= 1:  # a value below 1 is a share of the steps, whose number is unknown here
        _check_multiple(field, value, steps, name)


def period(args: Any) -> int:
    """Optimizer steps per generation batch, over all iterations."""
    return int(args.steps_per_generation * args.num_iterations) // int(args.gradient_accumulation_steps)


def check_start(args: Any, state: Any, wants: Demands, name: str) -> None:
    """Run the checks for the start of training, when the number of steps and the first step are known."""
    if len(wants.phases) == 1:
        return
    steps = period(args)
    if state.global_step % steps:
        whole = state.global_step // steps * steps
        remedy = f"Resume from checkpoint-{whole}" if whole else "Start again"
        raise CannotRegulateError(
            f"step {state.global_step} lies between the phases of {name}: a generation batch takes {steps} optimizer "
            f"steps, and its rollouts are not in the checkpoint. {remedy}, or from another multiple of {steps}"
        )
    _check_multiple("max_steps", state.max_steps, steps, name)
    _check_multiple(*_save_interval(args, state.save_steps, state.eval_steps), steps, name)


def check_trainer(trainer: Any, regulator: Regulator, wants: Demands, name: str) -> None:
    """Run the checks that need the trainer itself: its model, engine, processes and rewards."""
    if trainer.aux_loss_enabled and wants.split:
        raise CannotRegulateError(
            f"the MoE auxiliary loss would act in every phase of {name}; set router_aux_loss_coef=0 in GRPOConfig"
        )
    if trainer.is_deepspeed_enabled and len(wants.phases) > 1:
        raise CannotRegulateError(
            f"DeepSpeed takes the optimizer step inside the backward pass, so poise could not skip the step of a phase "
            f"of {name} with no tokens; use FSDP or DDP"
        )
    if "sampler_logp" in regulator.needs and not trainer.use_vllm and trainer.rollout_func is None:
        raise CannotRegulateError(
            f"{name} needs sampler_logp, the sampling engine's log-probabilities, which TRL has only with "
            "use_vllm=True in GRPOConfig, or from a rollout_func that returns logprobs"
        )
    if "hidden" not in regulator.needs:
        return
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        raise CannotRegulateError(
            f"{name} needs the whole output weight, which poise can gather only under FSDP2: use FSDP2 "
            "(fsdp_version: 2) or DDP, not DeepSpeed or the older FSDP"
        )
    if trainer.accelerator.num_processes == 1:
        return
    if (part := part_beyond(regulator, "group")) is not None:
        raise CannotRegulateError(
            f"{type(part).__name__} may read the whole batch, but hidden states, which {name} needs, are not "
            f"gathered from other processes; use one process, or remove {type(part).__name__}"
        )
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if rows % trainer.num_generations:
        raise CannotRegulateError(
            f"{name} needs whole groups on each process: per_device_train_batch_size × steps_per_generation ({rows}) "
            f"must be a multiple of num_generations ({trainer.num_generations})"
        )


def _save_interval(args: Any, save_steps: float, eval_steps: float | None) -> tuple[str, float | None]:
    kind = getattr(args.save_strategy, "value", args.save_strategy)
    if kind == "steps":
        return "save_steps", save_steps
    by_steps = getattr(args.eval_strategy, "value", args.eval_strategy) == "steps"
    return "eval_steps", eval_steps if kind == "best" and by_steps else None


def _check_multiple(field: str, value: float | None, steps: int, name: str) -> None:
    if value is not None and value % steps:
        raise CannotRegulateError(
            f"{field} ({value:g}) must be a multiple of {steps}: with {name} a generation batch takes {steps} "
            "optimizer steps, and training cannot resume between its phases"
        )
