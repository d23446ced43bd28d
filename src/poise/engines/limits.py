"""Whether a prompt and its response fit into the positions that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poise.models.policy import ModelError, Policy
from poise.rollout.types import Request

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


def check_lengths(policy: Policy, requests: Sequence[Request]) -> None:
    """Refuse a request whose longest response would not fit, in positions or in a rotary embedding's frequencies."""
    need, longest = max((len(request.prompt) + request.max_tokens, len(request.prompt)) for request in requests)
    check_positions(policy, longest, need - longest, f"a prompt of {longest} tokens")
    policy.check_length(need)
