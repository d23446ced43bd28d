"""A regulator that knows which words of a worked solution decide, as no real one can: the most that weighting tokens by
what they are for can bring. For Knights & Knaves in the compact style, and for sums of digits.

    poise train tiny regulator="experiments.comparison.oracles.words(model='runs/models/kk-w1', wording=0.0)" …
    poise train tiny regulator="experiments.comparison.oracles.digits(model='runs/models/sums-w16')" …
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from paraphrases import CLASH, FALSE, FITS, TRUE, TRY  # of experiments/embedded-model
from torch import Tensor

import poise
from poise.batch import Phase, TokenBatch

WORDS = {
    "try": [form.split()[0] for form in TRY if not form.startswith("{")],  # before an assignment: mere wording
    "verdict": [*TRUE, *FALSE],  # decide, and are worded in seven ways
    "fits": [*FITS, *CLASH],  # follow from the verdict and the role: almost mere wording
    "role": ["knight", "knave"],
}


def word_kinds(texts: list[str]) -> dict[str, Tensor]:
    """(V,) bool for each kind of word: which tokens are of it."""
    words = [text.strip().lower() for text in texts]
    found = {kind: torch.tensor([word in group for word in words]) for kind, group in WORDS.items()}
    return {**found, "other": ~torch.stack(list(found.values())).any(0)}


def has_digit(texts: list[str]) -> Tensor:
    """(V,) bool: which tokens have a digit."""
    return torch.tensor([any(map(str.isdigit, text)) for text in texts])


def texts_of(tokenizer: Any) -> list[str]:
    """The text of each token."""
    return [tokenizer.decode([i]) for i in range(len(tokenizer))]


@cache
def kinds_of(model: str) -> dict[str, Tensor]:
    """(V,) bool for each kind of token that a model has, from its folder."""
    from transformers import AutoTokenizer

    texts = texts_of(AutoTokenizer.from_pretrained(str(Path(model))))
    return word_kinds(texts) | {"digit": has_digit(texts)}


@poise.regulator
def words(
    batch: TokenBatch, model: str = "", wording: float = 0.0, verdict: float = 1.0, rest: float = 1.0
) -> list[Phase]:
    """Weight ``wording`` for words that have synonyms and decide nothing, ``verdict`` for those that decide."""
    assert batch.targets is not None
    of = kinds_of(model)
    weight = torch.full((len(of["try"]),), rest)
    weight[of["try"] | of["fits"]] = wording
    weight[of["verdict"]] = verdict
    return [Phase.of(batch, weight.to(batch.mask.device)[batch.targets.clamp(min=0)])]


words.needs = ("targets",)  # type: ignore[attr-defined]
words.scope = "token"  # type: ignore[attr-defined]


@poise.regulator
def sided(
    batch: TokenBatch, alpha: float = 1.0, relative: bool = True, right: bool = True, wrong: bool = True
) -> list[Phase]:
    """The parts of ``surprise``: by p·e^H or by p alone, in right responses alone or in wrong ones alone."""
    assert batch.entropy is not None
    likely = torch.exp(batch.old_logp + (batch.entropy if relative else 0.0)).clamp(max=1.0)
    praise = 1 - alpha * (1 - likely) if right else torch.ones_like(likely)
    blame = 1 - alpha * likely if wrong else torch.ones_like(likely)
    return [Phase.of(batch, torch.where(batch.token_advantages > 0, praise, blame))]


sided.needs = ("entropy",)  # type: ignore[attr-defined]
sided.scope = "token"  # type: ignore[attr-defined]


@poise.regulator
def digits(batch: TokenBatch, model: str = "", rest: float = 0.0, digit: float = 1.0) -> list[Phase]:
    """Weight ``digit`` for digits and ``rest`` for all other tokens: for sums with words that do not matter."""
    assert batch.targets is not None
    decides = kinds_of(model)["digit"].to(batch.mask.device)[batch.targets.clamp(min=0)]
    return [Phase.of(batch, torch.where(decides, digit, rest))]


digits.needs = ("targets",)  # type: ignore[attr-defined]
digits.scope = "token"  # type: ignore[attr-defined]
