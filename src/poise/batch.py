"""One rollout batch, and the phases of the update made from it.

Shapes in names and comments: B responses, T tokens at most, d hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from poise.lm_head import Head, HeadLike, as_head

Rows = slice | Tensor | list[int]
LazyHidden = Callable[[Tensor], Tensor]  # row indices (n,) -> hidden states (n, T, d)

_PER_TOKEN = ("old_logp", "ref_logp", "sampler_logp", "entropy")
_PER_RESPONSE = ("rewards",)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A rollout batch, before any micro-batching, with whole groups.

    Checked once, here; ``rows`` slices without checking again. Values where ``mask`` is False may be anything, NaN
    included. Gradients are cut: a batch is data. Boolean fields also come as 0/1 numbers.
    """

    old_logp: (
        Tensor  # (B, T) log-probability of each sampled token under the policy that is being updated, before it is
    )
    mask: Tensor  # (B, T) bool: response tokens; may have holes (multi-turn)
    advantages: Tensor  # (B,) or (B, T)
    groups: Tensor | None = None  # (B,) integers; responses with the same one answer the same prompt
    rewards: Tensor | None = None  # (B,)
    correct: Tensor | None = None  # (B,) bool: the verifier's word, never guessed from advantages
    ref_logp: Tensor | None = None  # (B, T) under the reference policy, for the KL term
    sampler_logp: Tensor | None = None  # (B, T) as the sampling engine reported it, where that differs from old_logp
    entropy: Tensor | None = None  # (B, T) of the old policy
    hidden: Tensor | LazyHidden | None = (
        None  # (B, T, d), or a function of row indices; hidden[b, t] predicts targets[b, t]
    )
    head: HeadLike | None = None  # (V, d), a Head, or a callable hidden -> logits
    targets: Tensor | None = None  # (B, T) sampled token ids

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                whole = item.name == "rewards" and not value.is_floating_point()
                self._set(item.name, value.float() if whole else value.detach())
            elif value is None and item.name in ("old_logp", "mask", "advantages"):
                raise TypeError(f"TokenBatch: {item.name} is missing")
            elif value is not None and not (item.name in ("hidden", "head") and callable(value)):
                raise TypeError(f"TokenBatch: {item.name} must be a torch tensor, got {type(value).__name__}")
        _check_shapes(self)
        for name in ("mask", "correct"):
            if (value := getattr(self, name)) is not None:
                self._set(name, _as_bool(name, value))
        _check_values(self)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights: old_logp's, at least float32."""
        return torch.promote_types(self.old_logp.dtype, torch.float32)

    @property
    def prob(self) -> Tensor:
        """(B, T) ``exp(old_logp)``, the probability p of each sampled token; 0 outside the mask."""
        logp = torch.where(self.mask, self.old_logp.to(self.dtype), -torch.inf)
        if (positive := logp > 0.01).any():  # beyond the rounding of half precision
            raise ValueError(
                f"TokenBatch: old_logp{_first(positive)} = {float(logp[positive][0]):.4g} is positive; "
                "pass log-probabilities, not probabilities or logits"
            )
        return logp.exp().clamp_(max=1.0)

    @property
    def token_advantages(self) -> Tensor:
        """(B, T) advantages; 0 outside the mask."""
        advantages = self.advantages if self.advantages.dim() == 2 else self.advantages[:, None]
        return torch.where(self.mask, advantages.to(self.dtype), 0.0)

    @property
    def lengths(self) -> Tensor:
        """(B,) count of response tokens."""
        return self.mask.sum(1)

    def group_members(self) -> list[list[int]]:
        """The rows of each group, in the order in which groups first appear."""
        if self.groups is None:
            raise ValueError("TokenBatch: groups is missing")
        members: dict[int, list[int]] = {}
        for row, group in enumerate(self.groups.tolist()):
            members.setdefault(group, []).append(row)
        return list(members.values())

    def group_rows(self) -> Iterator[Tensor]:
        """The same, as indices."""
        for rows in self.group_members():
            yield torch.tensor(rows, device=self.mask.device)

    def hidden_of(self, rows: Tensor) -> Tensor:
        """Hidden states (n, T, d) of the given rows, whichever way they were given."""
        if self.hidden is None:
            raise ValueError("TokenBatch: hidden is missing")
        if isinstance(self.hidden, Tensor):
            return self.hidden[rows]
        hidden = self.hidden(rows)
        if not isinstance(hidden, Tensor):
            raise TypeError(f"TokenBatch: hidden(rows) must return a tensor, got {type(hidden).__name__}")
        if hidden.dim() != 3 or hidden.shape[:2] != (len(rows), self.mask.shape[1]):
            expected = f"({len(rows)}, {self.mask.shape[1]}, d)"
            raise ValueError(f"TokenBatch: hidden(rows) must return {expected}, got {tuple(hidden.shape)}")
        return hidden.detach()

    def rows(self, ix: Rows) -> TokenBatch:
        """The batch of some rows, for mini- and micro-batches. Nothing is checked again; a slice makes no copy."""
        piece = copy.copy(self)
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "head" or value is None:
                continue
            if isinstance(value, Tensor):
                piece._set(item.name, value[ix])
            else:
                chosen = torch.arange(len(self.mask), device=self.mask.device)[ix]
                piece._set(item.name, partial(_lazy_rows, value, chosen))
        return piece


@dataclass(frozen=True, eq=False)
class Phase:
    """One complete pass of optimizer steps over the batch, and how much each token may pull in it.

    Weights are finite, not negative, and 0 outside the mask. 0 means that the token takes no part.
    """

    name: str
    policy: Tensor  # (B, T) multiplies the policy term
    kl: Tensor  # (B, T) multiplies the KL and entropy terms
    metrics: Mapping[str, float] = field(default_factory=dict)  # what else the regulator has to report
    tokens: Mapping[str, Tensor] = field(default_factory=dict)  # (B, T) each: what it found out about every token

    @classmethod
    def of(
        cls,
        batch: TokenBatch,
        policy: Tensor | float = 1.0,
        kl: Tensor | float = 1.0,
        *,
        name: str = "all",
        metrics: Mapping[str, float] | None = None,
        tokens: Mapping[str, Tensor] | None = None,
    ) -> Phase:
        """A phase from raw weights: brought to the batch's shape and dtype, and to 0 outside the mask."""

        def inside(weight: Tensor | float) -> Tensor:
            weight = torch.as_tensor(weight, dtype=batch.dtype, device=batch.mask.device)
            given = tuple(weight.shape)
            if weight.dim() == 1:  # one for each response
                weight = weight[:, None]
            if weight.dim() and weight.shape not in (batch.mask.shape, (len(batch.mask), 1)):
                expected = f"{tuple(batch.mask.shape)}, {tuple(batch.mask.shape[:1])} or a number"
                raise ValueError(f"phase {name!r}: weights must be {expected}, got shape {given}")
            return torch.where(batch.mask, weight, 0.0)

        return cls(name, inside(policy), inside(kl), metrics or {}, tokens or {})

    def rows(self, ix: Rows) -> Phase:
        """The phase of some rows, beside ``TokenBatch.rows``."""
        return Phase(self.name, self.policy[ix], self.kl[ix], self.metrics)

    def check(self, batch: TokenBatch) -> None:
        """Raise unless both weights keep the promises of the class."""
        for name, weight in (("policy", self.policy), ("kl", self.kl)):
            where = f"phase {self.name!r}: {name}"
            if weight.shape != batch.mask.shape:
                expected = tuple(batch.mask.shape)
                raise ValueError(f"{where} must have the mask's shape {expected}, got {tuple(weight.shape)}")
            bad = torch.where(batch.mask, ~torch.isfinite(weight) | (weight < 0), weight != 0)
            if bad.any():
                value = float(weight[bad][0])
                raise ValueError(f"{where}{_first(bad)} = {value}: weights are finite, >= 0, and 0 outside the mask")


def _lazy_rows(hidden: LazyHidden, chosen: Tensor, rows: Tensor) -> Tensor:
    return hidden(chosen[rows])


def _first(bad: Tensor) -> str:
    """The first offending index, as it is written in code: ``[3, 17]``."""
    return str(bad.nonzero()[0].tolist())


def _as_bool(name: str, value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return value
    bad = (value != 0) & (value != 1)
    if bad.any():
        found = value[bad][0].item()
        raise ValueError(f"TokenBatch: {name}{_first(bad)} = {found}; {name} is bool, or 0 and 1")
    return value != 0


def _check_shapes(batch: TokenBatch) -> None:
    if batch.old_logp.dim() != 2 or 0 in batch.old_logp.shape:
        raise ValueError(f"TokenBatch: old_logp must be (B, T) and not empty, got {tuple(batch.old_logp.shape)}")
    shape, device = batch.old_logp.shape, batch.old_logp.device
    for item in fields(batch):
        name, value = item.name, getattr(batch, item.name)
        if not isinstance(value, Tensor):
            continue
        if name == "head":
            as_head(value)
            continue
        expected: tuple[Any, ...] = tuple(shape)
        if name in ("groups", "rewards", "correct") or (name == "advantages" and value.dim() == 1):
            expected = tuple(shape[:1])
        elif name == "hidden":
            expected = (*shape, value.shape[-1] if value.dim() == 3 else "d")
        if tuple(value.shape) != expected:
            allowed = f"{tuple(shape[:1])} or {tuple(shape)}" if name == "advantages" else str(expected)
            raise ValueError(f"TokenBatch: {name} must have shape {allowed}, got {tuple(value.shape)}")
        if value.device != device:
            raise ValueError(f"TokenBatch: {name} is on {value.device}, old_logp on {device}")
        whole = name in ("groups", "targets")
        if whole and (value.is_floating_point() or value.dtype == torch.bool or value.is_complex()):
            raise TypeError(f"TokenBatch: {name} must hold integers, got {value.dtype}")
        real = name in (*_PER_TOKEN, "rewards", "advantages", "hidden")
        if real and not value.is_floating_point():
            raise TypeError(f"TokenBatch: {name} must be floating point, got {value.dtype}")


def _check_values(batch: TokenBatch) -> None:
    """NaN and infinity inside the mask, and targets outside the vocabulary: one host sync for all of them."""
    occupied = batch.mask.any(1)
    bad: dict[str, Tensor] = {}
    for name in (*_PER_TOKEN, *_PER_RESPONSE, "advantages", "hidden"):
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            finite = torch.isfinite(value) if value.dim() < 3 else torch.isfinite(value).all(-1)
            bad[name] = ~finite & (occupied if value.dim() == 1 else batch.mask)
    head = as_head(batch.head) if batch.head is not None else None
    if batch.targets is not None:
        vocabulary = head.vocabulary if isinstance(head, Head) else torch.iinfo(torch.int64).max
        bad["targets"] = batch.mask & ((batch.targets < 0) | (batch.targets >= vocabulary))
    failed = torch.stack([flags.any() for flags in bad.values()]).tolist()
    for (name, flags), is_bad in zip(bad.items(), failed, strict=True):
        if is_bad:
            index = tuple(flags.nonzero()[0].tolist())
            value = getattr(batch, name)[index]
            found = value.item() if value.dim() == 0 else "not finite"
            problem = "not a token of the vocabulary" if name == "targets" else "must be finite inside the mask"
            raise ValueError(f"TokenBatch: {name}{list(index)} = {found}: {problem}")
