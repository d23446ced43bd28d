"""One line of a token file: a response from any trainer, as a JSON object. docs/report.md lists its fields.

Only ``step`` and the tokens are required; the page does not show missing fields. Lines may be damaged or malicious.

A line of prime-rl's token exports (``schema_version`` 1) is converted first. prime-rl writes
``token_exports/step_N/rank_R.jsonl`` if ``trainer.enable_token_export`` is set. A line is one sequence, including the
prompt: token ids without texts, and for each field one number per token. ``trainer_logprobs`` are the trainer's
log-probabilities before the update; ``inference_logprobs`` are the sampler's. A line has neither a reward nor a group;
responses to the same prompt form a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import nan
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from poise.referee.report.reader import Step, check, check_record
from poise.referee.report.token_texts import Decoder, response_texts
from poise.runs.folder import LAST_STEP

COLUMNS = ("logp", "entropy", "advantage", "sampler_logp")  # numbers per token; a single number applies to all tokens
UNKNOWN: dict[str, Any] = {
    "prompt": "",
    "difficulty": "",
    "reward": None,
    "correct": None,
    "finished": None,
    "parts": {},
}
RECORD = (*UNKNOWN, "problem", "group", "text", "gold", "answer", "environment")
PRIME_RL = 1  # the version of prime-rl's exports that poise reads
POSITIVE = 0.01  # larger values are not log-probabilities, even after rounding


class Row(NamedTuple):
    """A response: its record for the page, the texts of its n tokens, and arrays (n,)."""

    step: int
    record: dict[str, Any]
    words: list[str]
    arrays: dict[str, Tensor]


def parse(data: Any, decoder: Decoder) -> Row:
    """Parse a line into a response. A damaged line raises one of the errors in ``reader.DAMAGED``."""
    check(isinstance(data, dict), "it is not a JSON object")
    if "schema_version" in data and "token_ids" in data:
        data = _from_prime_rl(data, decoder)
    step, words = data.get("step"), data.get("tokens")
    check(type(step) is int and 0 <= step <= LAST_STEP, "step is not a whole number of at least 0")
    if words is None and isinstance(data.get("ids"), list):
        words = [decoder.word(token) for token in _checked_ids(data["ids"])]
    texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
    check(texts, "it has neither tokens (a list of texts) nor ids (a list of numbers)")
    group = data.get("group")
    check(isinstance(group, str | int | None), "group is neither text nor a whole number")
    record = {**UNKNOWN, "text": "".join(words), "problem": "" if group is None else f"group {group}"}
    record |= {name: data[name] for name in RECORD if data.get(name) is not None}
    check_record(record, "it")
    columns = {name: data[name] for name in COLUMNS if data.get(name) is not None}
    weight = data.get("weight")
    weights = weight if isinstance(weight, Mapping) else {} if weight is None else {"all": weight}
    columns |= {f"weight/{phase}": values for phase, values in weights.items()}
    return Row(step, record, words, {name: _column(name, values, len(words)) for name, values in columns.items()})


def _from_prime_rl(data: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Convert a line of prime-rl. A token that the loss ignores (``is_masked``) has the weight 0."""
    version = data["schema_version"]
    check(version == PRIME_RL, f"schema_version is {version!r}: poise reads version {PRIME_RL} of prime-rl's exports")
    ids = _checked_ids(data["token_ids"])

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


def _column(name: str, values: Any, count: int) -> Tensor:
    numbers = [values] * count if isinstance(values, int | float) else values
    check(isinstance(numbers, list) and len(numbers) == count, f"{name} is not a list of {count} numbers")
    check(all(isinstance(number, int | float | None) for number in numbers), f"{name} has values that are not numbers")
    column = torch.tensor([nan if number is None else number for number in numbers], dtype=torch.float32)
    check(name != "logp" or not (column > POSITIVE).any(), "logp is positive: these are not log-probabilities")
    check(not name.startswith("weight/") or not (column < 0).any(), f"{name} is negative")
    return column


def _checked_ids(ids: Sequence[Any]) -> list[int]:
    """Check that the token ids are valid input for a tokenizer, and return them."""
    check(all(type(token) is int and 0 <= token < 2**31 for token in ids), "a token id is not a whole number")
    return list(ids)


def joined(rows: Sequence[Row]) -> Step:
    """Join the responses of a step. Missing numbers are NaN."""
    words: dict[str, int] = {}
    ids = [words.setdefault(word, len(words)) for row in rows for word in row.words]
    names = sorted({name for row in rows for name in row.arrays})
    absent = [torch.full((len(row.words),), nan) for row in rows]
    arrays = {
        name: torch.cat([row.arrays.get(name, gap) for row, gap in zip(rows, absent, strict=True)]) for name in names
    }
    arrays["id"] = torch.tensor(ids, dtype=torch.int32)
    arrays["start"] = torch.tensor([0, *accumulate(len(row.words) for row in rows)], dtype=torch.int32)
    return Step([row.record for row in rows], arrays, {number: word for word, number in words.items()})
