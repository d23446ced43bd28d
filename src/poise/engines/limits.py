"""Refuse prompts and responses that do not fit into the positions of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from poise.models.places import ModelError
from poise.rollout.types import Request

if TYPE_CHECKING:
    from poise.models.policy import Policy

NO_LIMIT = 1 << 62
STRETCHED = ("linear", "dynamic", "yarn")  # rotary embeddings whose factor max_position_embeddings does not include


def positions(policy: Policy) -> int | None:
    """How many tokens a prompt and its response may have together; None where the model's config sets no limit."""
    config = policy.base.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return None
    rotary: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # One set of parameters for all layers, or one per kind of layer.
    for parameters in (rotary, *(part for part in rotary.values() if isinstance(part, dict))):
        if parameters.get("rope_type") in STRETCHED:
            trained = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
            most = max(most, int((parameters.get("factor") or 1) * trained))
    return most


def most_tokens(policy: Policy) -> int:
    """How many tokens a prompt and its response may have together, in this model and as it is run here."""
    return min((limit for limit in (positions(policy), policy.length_limit) if limit is not None), default=NO_LIMIT)


def check_positions(policy: Policy, prompt: int, max_tokens: int, asked: str, setting: str = "max_tokens") -> None:
    """Refuse a prompt of ``prompt`` tokens whose longest response would not fit.

    ``asked`` describes it to the user, and ``setting`` is what bounds the response.

    A table of learned positions ends there. Rotary embeddings go on, with angles that the model was never trained on:
    it would learn from noise, or be measured on it. vLLM refuses such lengths too; transformers only warns, and a
    warning is lost in the log of a long run. Users who have stretched the positions say so in the model's config.json.
    """
    most = positions(policy)
    if most is None or prompt + max_tokens <= most:
        return
    room = most - prompt
    remedy = f"set {setting} to {room} or less" if room > 0 else "shorten the prompt"
    raise ModelError(
        f"{type(policy.base).__name__} has {most} positions (max_position_embeddings), but {asked} and "
        f"max_tokens={max_tokens} need {prompt + max_tokens}: {remedy}, or use a model with more positions"
    )


def check_settings(policy: Policy, max_prompt: int, max_tokens: int) -> None:
    """Before a run: refuse settings whose longest prompt and longest response do not fit together."""
    asked = f"prompts of up to rollout.max_prompt={max_prompt} tokens"
    check_positions(policy, max_prompt, max_tokens, asked, "rollout.max_tokens")


def check_lengths(policy: Policy, requests: Sequence[Request]) -> None:
    """Refuse a request whose longest response would not fit, into the positions or a fixed rotary embedding."""
    need, longest = max((len(request.prompt) + request.max_tokens, len(request.prompt)) for request in requests)
    check_positions(policy, longest, need - longest, f"a prompt of {longest} tokens")
    policy.check_length(need)
