"""Whether a prompt and its response fit into the positions that a model has."""

from __future__ import annotations

from typing import Any

from poise.policy import ModelError, Policy, first_line
from poise.prompts import PromptError
from poise.tasks import Problem

STRETCHED = ("linear", "dynamic", "yarn")  # rotary embeddings whose factor is not part of max_position_embeddings yet


def positions(policy: Policy) -> int | None:
    """How many tokens a prompt and its response may have together; None where the model's config sets no limit."""
    config = policy.base.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return None
    rotary: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for own in (rotary, *(part for part in rotary.values() if isinstance(part, dict))):  # one, or one per kind of layer
        if own.get("rope_type") in STRETCHED:
            trained = own.get("original_max_position_embeddings") or config.max_position_embeddings
            most = max(most, int((own.get("factor") or 1) * trained))
    return most


def check_positions(policy: Policy, prompt: int, max_tokens: int, asked: str) -> None:
    """Refuse ``asked``, a prompt of so many tokens, where its longest response would not fit.

    A table of learned positions simply ends there. Rotary embeddings go on, with angles that the model was never
    trained on: it would learn from noise, or be measured on it. vLLM refuses such lengths too, and transformers warns;
    a warning is lost in the log of a long run, so it is a refusal here, for every engine. Who has stretched the
    positions says so in the model's config.json.
    """
    most = positions(policy)
    if most is None or prompt + max_tokens <= most:
        return
    room = most - prompt
    remedy = f"set max_tokens to {room} or less" if room > 0 else "shorten the prompt"
    raise ModelError(
        f"{type(policy.base).__name__} has {most} positions (max_position_embeddings), but {asked} and "
        f"max_tokens={max_tokens} need {prompt + max_tokens}: {remedy}, or use a model with more positions"
    )


def check_settings(policy: Policy, max_prompt: int, max_tokens: int) -> None:
    """Before a run: whether the longest prompt and the longest response that the settings allow fit together."""
    check_positions(policy, max_prompt, max_tokens, f"prompts of up to rollout.max_prompt={max_prompt} tokens")


def encode_problem(policy: Policy, problem: Problem, max_tokens: int, max_prompt: int | None = None) -> list[int]:
    """A problem's prompt; one that cannot be encoded, or is too long, is refused by its name."""
    try:
        ids = policy.encode(problem.prompt)
    except PromptError as error:
        raise ModelError(f"problem {problem.id}: {error}") from error
    except Exception as error:  # a chat template is a program of the model's, and may raise anything
        raise ModelError(
            f"problem {problem.id}: the model's tokenizer or chat template fails on its prompt "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    if max_prompt is not None and len(ids) > max_prompt:
        raise ModelError(
            f"the prompt of problem {problem.id} has {len(ids)} tokens, more than rollout.max_prompt={max_prompt}: "
            "raise it, or make the task's prompts shorter"
        )
    check_positions(policy, len(ids), max_tokens, f"the prompt of problem {problem.id} with {len(ids)} tokens")
    return ids
