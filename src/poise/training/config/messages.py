"""Pydantic's validation errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from poise._lib.errors import LONGEST, short
from poise.training.config.documents import SHORT_FORMS

_PHRASES = {
    "missing": "is missing",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_too_long": "is too long",
    "int_type": "must be a whole number",
    "int_parsing_size": "is too large",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "dict_type": "must be a group of settings, {key: value}",
    "list_type": "must be a list",
    "model_type": "must be a group of settings, {key: value}",
    "dataclass_type": "must be a group of settings, {key: value}",
    "tuple_type": "must be a list",
}
# What a text setting expects, for the message about a value of another type.
_TEXTS = {
    "task.name": "the name of a task (poise tasks lists them), or file.py:Class",
    "regulator": "a method, or several joined by |, such as ar(alpha=0.3) | lopti; poise compare tries one after the "
    "other",
    "algorithm": "a name such as grpo, rltr or erl, with its settings in brackets: rltr(transfer=0.5)",
    "advantage": "a name such as group-zscore, or your own function, file.py:name",
    "model": "a folder, or a name on the hub; a number goes in quotes: model='\"3\"'",
    "run": "a folder; a number goes in quotes: run='\"3\"'",
}
# TRL's and verl's names for our settings, unless the spelling is similar.
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.grad_clip",
    "ppo_mini_batch_size": "optim.mini_batch",
    "gradient_accumulation_steps": "optim.micro_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_prompt_length": "rollout.max_prompt",
    "use_vllm": "rollout.engine",
    "num_generations": "group",
    "per_device_train_batch_size": "prompts",
    "train_batch_size": "prompts",
    "batch_size": "prompts",
    "max_steps": "steps",
    "output_dir": "run",
    "model_name_or_path": "model",
    "model_revision": "revision",
    "chat_template_kwargs": "template",
    "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints",
    "eval_steps": "evaluation.every",
    "report_to": "tracking",
    "bf16": "dtype",
    "beta": "objective.kl_coef",
    "kl_loss_coef": "objective.kl_coef",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "loss_type": "objective.aggregation",
    "lora_r": "lora.rank",
    "vllm_gpu_memory_utilization": "rollout.vllm_memory",
    "trust_remote_code": "remote_code",
    "torch_compile": "compile",
    "use_cpu": "device",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "delta": "objective.dual_clip",
    "importance_sampling_level": "objective.surrogate",
    "scale_rewards": "advantage",
    "num_iterations": "regulator",
    "log_completions": "rollouts_every",
}
# TRL settings whose values are written differently in poise.
_VALUES = {
    "num_iterations": 'num_iterations=2 is regulator="grpo(passes=2)"',
    "scale_rewards": "scale_rewards=none is advantage=group-centered",
    "importance_sampling_level": "importance_sampling_level=sequence is objective.surrogate=gspo",
}
# TRL's settings that poise does not have, and what to use instead.
_NOT_HERE = {
    "num_train_epochs": "poise counts steps, not epochs: set steps=",
    "lr_scheduler_type": "the learning rate is constant after optim.warmup_steps",
    "gradient_checkpointing": "poise turns it on where memory requires it",
    "logging_steps": "metrics.jsonl has every step",
    "eval_strategy": "evaluation.every= is a number of steps",
    "save_strategy": "checkpoint_every= is a number of steps",
}
# TRL's names for arguments of poise.train.
_ARGUMENTS_ELSEWHERE = {
    "train_dataset": "data",
    "eval_dataset": "task.test_file",
    "reward_funcs": "reward",
    "processing_class": "tokenizer",
    "environment_factory": "environment",
    "peft_config": "lora",
    "resume_from_checkpoint": "resume",
    "args": "recipe",
}
_WORDS = {
    "Input should": "must",
    "Tuple should": "must",
    " after validation": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def explain(problem: ErrorDetails, known: Sequence[str]) -> str:
    """Describe a problem in one line: the field, its value and what is allowed. ``known`` lists all dotted keys."""
    path = ".".join(str(part)[:LONGEST] for part in problem["loc"])
    kind, value = problem["type"], problem["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(path, known)
    if kind == "unknown_setting":
        about: dict[str, Any] = problem["ctx"]
        known = list(dict.fromkeys([*known, *(f"{path}.{name}" for name in about["allowed"])]))
        return unknown_key(f"{path}.{about['key'][:LONGEST]}", known) + str(about["hint"])
    if kind == "invalid_key":  # a number, or a word that YAML reads as true, false or null
        return unknown_key(".".join([*path.split(".")[:-1], str(value)[:LONGEST]]), known)
    if kind == "value_error":
        reason = problem["msg"].removeprefix("Value error, ")
        if isinstance(value, dict):  # a message about a whole group names the field already
            return f"{path}: {reason.removeprefix(f'{path}: ')}" if path else reason
        return f"{path} = {short(value)}: {reason}"
    reason = _PHRASES.get(kind) or problem["msg"]
    for theirs, ours in _WORDS.items():
        reason = reason.replace(theirs, ours)
    if kind == "string_type":
        reason += f": {_TEXTS[path]}" if path in _TEXTS else ""
    if kind == "literal_error":
        near = get_close_matches(short(value).strip("'").lower(), re.findall(r"'([^']*)'", reason), n=1, cutoff=0.5)
        reason += f"; did you mean {near[0]!r}?" if near else ""
    return f"{path} = {short(value)}: {reason}"


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Return a message for each argument that has TRL's name, with the argument's name in ``poise.train``."""
    return [
        f"unknown argument {name!r}; did you mean {_ARGUMENTS_ELSEWHERE[name]!r}? docs/python.md has TRL's other names"
        for name in names
        if name in _ARGUMENTS_ELSEWHERE
    ]


def unknown_key(path: str, known: Sequence[str]) -> str:
    """Return the message for an unknown key. It suggests similar keys, also from other groups."""
    group, dot, name = path.rpartition(".")
    if group == "task" and name in SHORT_FORMS:  # task.environment for environment
        return f"unknown key {path!r}; did you mean {name!r}?"
    if (ours := _ELSEWHERE.get(name.lower())) in known:
        return f"unknown key {path!r}; did you mean {ours!r}? {_VALUES.get(name.lower(), '')}".rstrip()
    if name.lower() in _NOT_HERE:
        return f"unknown key {path!r}: {_NOT_HERE[name.lower()]}"
    if joined := [key for key in known if "." in key and key.replace(".", "_") == path]:  # lora_rank
        return f"unknown key {path!r}; did you mean {joined[0]!r}?"
    # Compare only the last words, because the mistake may be the group.
    near = {key: SequenceMatcher(None, name.lower(), re.findall(r"\w+", key)[-1]).ratio() for key in known}
    best = max(near.values())
    if best >= 0.6:
        nearest = [key for key in near if near[key] == best]
        own = [key for key in nearest if key.rpartition(".")[0] == group]
        return f"unknown key {path!r}; did you mean {' or '.join(map(repr, own or nearest))}?"
    dotted = [key for key in known if "=" not in key]
    siblings = {key.removeprefix(group + dot).split(".")[0] for key in dotted if key.startswith(group + dot)}
    return f"unknown key {path!r} (allowed{dot and f' in {group}'}: {', '.join(sorted(siblings))})"
