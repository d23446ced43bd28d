"""Converts a line of prime-rl's token exports (``schema_version`` 1) to a line of a token file.

prime-rl writes ``token_exports/step_N/rank_R.jsonl`` if ``trainer.enable_token_export`` is set. A line is one sequence,
including the prompt: token ids without texts, and for each field one number per token. ``trainer_logprobs`` are the
trainer's log-probabilities before the update; ``inference_logprobs`` are the sampler's. A line has neither a reward nor
a group; responses to the same prompt form a group.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from poise.referee.report.reader import check
from poise.referee.report.token_row import checked_ids
from poise.referee.report.token_texts import Decoder, response_texts

VERSION = 1


def is_export(data: Any) -> bool:
    """Whether a line comes from prime-rl."""
    return isinstance(data, dict) and "schema_version" in data and "token_ids" in data


def convert(data: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Convert one line. A token that the loss ignores (``is_masked``) has the weight 0."""
    version = data["schema_version"]
    check(version == VERSION, f"schema_version is {version!r}: poise reads version {VERSION} of prime-rl's exports")
    ids = checked_ids(data["token_ids"])

    def values(name: str) -> list[Any]:
        found = data[name]
        check(isinstance(found, list) and len(found) == len(ids), f"{name} is not a list of {len(ids)} values")
        return list(found)

    def column(name: str) -> list[Any]:
        return [value for value, is_own in zip(values(name), own, strict=True) if is_own]

    own = [bool(value) for value in values("loss_mask")]
    check(any(own), "loss_mask marks no token")
    begin = own.index(True)
    prompt, environment = ids[:begin], data.get("env_name") or ""
    weights = zip(column("rl_weights"), column("is_masked"), strict=True)
    group = f"{crc32(repr(prompt).encode()):08x}"
    return {
        "step": data["step"],
        "prompt": decoder.text(prompt) if prompt else "",
        "problem": f"{environment} {group}".strip(),
        "group": group,
        **response_texts(ids[begin:], own[begin:], decoder),
        "logp": column("trainer_logprobs"),
        "sampler_logp": column("inference_logprobs"),
        "entropy": column("entropy"),
        "advantage": column("advantages"),
        "weight": [0.0 if masked else 1.0 if weight is None else weight for weight, masked in weights],
    }
