"""Which rows of a file are held out, and whether the rows are those of another time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from poise.tasks.base import Problem


def share(key: str) -> float:
    """A number from 0 to 1 by a hash of the key: a row stays in its split whatever rows are added beside it."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fingerprint(problems: Mapping[str, Sequence[Problem]]) -> str:
    """A hash of the problems of both splits."""
    digest = hashlib.blake2b(digest_size=16)
    for split in ("train", "test"):
        for problem in problems[split]:
            digest.update(json.dumps([split, problem.id, problem.data], sort_keys=True).encode())
    return digest.hexdigest()
