"""poise's core data types: a prompt, a rollout batch, and a phase of its update.

Shapes: B responses, T response tokens (padded), d hidden width, V vocabulary size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from poise._lib.device import send
from poise.lm_head import Head, HeadLike, as_head

Rows = slice | Tensor | list[int]
LazyHidden = Callable[[Tensor], Tensor]  # row indices (n,) -> hidden states (n, T, d)

_PER_TOKEN = ("old_logp", "ref_logp", "sampler_logp", "entropy")
_PER_RESPONSE = ("rewards",)


@dataclass(frozen=True)
class Prompt:
    """The tokens before a response. Responses to equal prompts share one pass over the prompt.

    ``key`` distinguishes prompts with equal tokens, such as prompts with different images.
    """

    tokens: tuple[int, ...]
    key: Hashable = None

    def then(self, tokens: Sequence[int]) -> Prompt:
        """Return this prompt with ``tokens`` appended."""
        return Prompt((*self.tokens, *tokens), self.key)


class Extent(NamedTuple):
    """A row's prompt and lengths, kept on the host so that packing needs no transfer from the device."""

    prompt: Prompt
    length: int  # response tokens up to the model's last token, including the environment's
    own: int  # number of these tokens that the model wrote


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A complete rollout batch with whole groups, before the split into mini- and micro-batches.

    The constructor checks every field and detaches tensors; ``rows`` slices without new checks. Where ``mask`` is
    False, values may be anything, including NaN. Boolean fields also accept 0 and 1.
    """

    # (B, T) log-probability of each sampled token under the old policy: the policy before this update
    old_logp: Tensor
    mask: Tensor  # (B, T) bool: response tokens; may have holes (multi-turn)
    advantages: Tensor  # (B,) or (B, T)
    groups: Tensor | None = None  # (B,) integers: the same number for all responses to one prompt
    rewards: Tensor | None = None  # (B,)
    correct: Tensor | None = None  # (B,) bool: the verifier's verdict, never inferred from advantages
    ref_logp: Tensor | None = None  # (B, T) under the reference policy, for the KL term
    sampler_logp: Tensor | None = None  # (B, T) log-probability from the sampling engine, if it differs from old_logp
    entropy: Tensor | None = None  # (B, T) of the old policy
    # (B, T, d), or a function from row indices to (n, T, d); hidden[b, t] predicts targets[b, t]
    hidden: Tensor | LazyHidden | None = None
    head: HeadLike | None = None  # (V, d) weight, a Head, or a callable hidden -> logits
    targets: Tensor | None = None  # (B, T) sampled token ids
    # (B, T) log-probability under the old policy after a min-p filter and renormalisation, for the surrogate lp-reg;
    # −inf for tokens that the filter removes
    min_p_logp: Tensor | None = None
    extents: Sequence[Extent] | None = None  # one per response, on the host; poise's own forward passes need them

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "extents":
                continue
            if isinstance(value, Tensor):
                integer_rewards = item.name == "rewards" and not value.is_floating_point()
                self._set(item.name, value.float() if integer_rewards else value.detach())
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
        """The dtype of token weights: the dtype of old_logp, but at least float32."""
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
        """The row numbers of each group, with the groups in order of first appearance."""
        if self.groups is None:
            raise ValueError("TokenBatch: groups is missing")
        members: dict[int, list[int]] = {}
        for row, group in enumerate(self.groups.tolist()):
            members.setdefault(group, []).append(row)
        return list(members.values())

    def hidden_of(self, rows: Tensor) -> Tensor:
        """Return the hidden states (n, T, d) of ``rows``, from the stored tensor or from the function."""
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
        _check_width(self.head, hidden)
        return hidden.detach()

    def rows(self, ix: Rows) -> TokenBatch:
        """Return the rows ``ix`` (a mini- or micro-batch) as a batch, without new checks. A slice copies no tensor."""
        part, index = copy.copy(self), _on_device(ix, self.mask)
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("head", "extents") or value is None:
                continue
            if isinstance(value, Tensor):
                part._set(item.name, value[index])
            else:
                row_numbers = torch.arange(len(self.mask), device=self.mask.device)[index]
                part._set(item.name, partial(_lazy_rows, value, row_numbers))
        if self.extents is not None:
            numbers = torch.arange(len(self.mask))[ix.cpu() if isinstance(ix, Tensor) else ix].tolist()
            part._set("extents", [self.extents[row] for row in numbers])
        return part


@dataclass(frozen=True, eq=False)
class Phase:
    """One pass of optimizer steps over the whole batch, with two weights per token.

    Weights are finite, not negative, and 0 outside the mask. A weight of 0 removes the term from the loss.
    """

    name: str
    policy: Tensor  # (B, T) multiplies the policy term
    kl: Tensor  # (B, T) multiplies the KL and entropy terms
    metrics: Mapping[str, float] = field(default_factory=dict)  # numbers that the regulator reports
    # (B, T) each: per-token values to record, such as NTHR's score
    tokens: Mapping[str, Tensor] = field(default_factory=dict)

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
        """Build a phase from raw weights: broadcast to (B, T), cast to ``batch.dtype``, 0 outside the mask."""

        def masked(weight: Tensor | float) -> Tensor:
            weight = torch.as_tensor(weight, dtype=batch.dtype, device=batch.mask.device)
            shape = tuple(weight.shape)
            if weight.dim() == 1:  # one weight per response
                weight = weight[:, None]
            if weight.dim() and weight.shape not in (batch.mask.shape, (len(batch.mask), 1)):
                expected = f"{tuple(batch.mask.shape)}, {tuple(batch.mask.shape[:1])} or a number"
                raise ValueError(f"phase {name!r}: weights must be {expected}, got shape {shape}")
            return torch.where(batch.mask, weight, 0.0)

        return cls(name, masked(policy), masked(kl), metrics or {}, tokens or {})

    def rows(self, ix: Rows) -> Phase:
        """Return the rows ``ix`` of the phase, to match ``TokenBatch.rows``. The recorded ``tokens`` are dropped."""
        index = _on_device(ix, self.policy)
        return Phase(self.name, self.policy[index], self.kl[index], self.metrics)

    def check(self, batch: TokenBatch) -> None:
        """Raise an error unless both weights are (B, T), finite, >= 0, and 0 outside the mask."""
        for name, weight in (("policy", self.policy), ("kl", self.kl)):
            where = f"phase {self.name!r}: {name}"
            if not isinstance(weight, Tensor):
                raise TypeError(f"{where} must be a tensor, got {type(weight).__name__}: build phases with Phase.of")
            if weight.shape != batch.mask.shape:
                expected = tuple(batch.mask.shape)
                raise ValueError(f"{where} must have the mask's shape {expected}, got {tuple(weight.shape)}")
            bad = torch.where(batch.mask, ~torch.isfinite(weight) | (weight < 0), weight != 0)
            if bad.any():
                value = float(weight[bad][0])
                raise ValueError(f"{where}{_first(bad)} = {value}: weights are finite, >= 0, and 0 outside the mask")


def padded_batch(
    prompts: Sequence[Prompt], tokens: Sequence[Tensor], device: torch.device, own: Sequence[Tensor] = (), **fields: Any
) -> TokenBatch:
    """Build a batch of these responses on ``device``. ``own`` marks the tokens that the model wrote; by default, all.

    ``fields`` are the fields of ``TokenBatch``; lists of (n,) tensors are padded. Old log-probabilities and advantages
    default to 0.
    """

    def padded(rows: Sequence[Tensor]) -> Tensor:
        return send(pad_sequence(list(rows), batch_first=True), device)

    own = own or [torch.ones_like(row, dtype=torch.bool) for row in tokens]
    extents = [Extent(p, len(row), int(mine.sum())) for p, row, mine in zip(prompts, tokens, own, strict=True)]
    known = {name: padded(value) if isinstance(value, list) else value for name, value in fields.items()}
    targets = padded(tokens)
    known.setdefault("old_logp", torch.zeros(targets.shape, device=device))
    known.setdefault("advantages", torch.zeros(len(targets), device=device))
    return TokenBatch(mask=padded(own), targets=targets, extents=extents, **known)


def _on_device(ix: Rows, values: Tensor) -> slice | Tensor:
    """Return row numbers on the device of ``values``: indexing with a list makes the host wait for the device."""
    if isinstance(ix, slice | Tensor):
        return ix
    return send(torch.arange(len(values))[ix], values.device)


def _lazy_rows(hidden: LazyHidden, row_numbers: Tensor, rows: Tensor) -> Tensor:
    return hidden(row_numbers[rows])


def _first(bad: Tensor) -> str:
    """The first index where ``bad`` is True, as Python writes it: ``[3, 17]``."""
    return str(bad.nonzero()[0].tolist())


def _as_bool(name: str, value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return value
    bad = (value != 0) & (value != 1)
    if bad.any():
        first = value[bad][0].item()
        raise ValueError(f"TokenBatch: {name}{_first(bad)} = {first}: must be True, False, 0 or 1")
    return value != 0


def _check_shapes(batch: TokenBatch) -> None:
    if batch.old_logp.dim() != 2 or 0 in batch.old_logp.shape:
        raise ValueError(f"TokenBatch: old_logp must be (B, T) and not empty, got {tuple(batch.old_logp.shape)}")
    shape, device = batch.old_logp.shape, batch.old_logp.device
    if batch.extents is not None and len(batch.extents) != len(batch.old_logp):
        raise ValueError(f"TokenBatch: extents must have {len(batch.old_logp)} entries, got {len(batch.extents)}")
    for item in fields(batch):
        name, value = item.name, getattr(batch, item.name)
        if not isinstance(value, Tensor):
            continue
        if name == "head":
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
        integer = name in ("groups", "targets")
        if integer and (value.is_floating_point() or value.dtype == torch.bool or value.is_complex()):
            raise TypeError(f"TokenBatch: {name} must hold integers, got {value.dtype}")
        real = name in (*_PER_TOKEN, "rewards", "advantages", "hidden", "min_p_logp")
        if real and not value.is_floating_point():
            raise TypeError(f"TokenBatch: {name} must be floating point, got {value.dtype}")
    if isinstance(batch.hidden, Tensor):
        _check_width(batch.head, batch.hidden)


def _check_width(head: HeadLike | None, hidden: Tensor) -> None:
    known = None if head is None else as_head(head)
    if isinstance(known, Head) and (width := known.weight.shape[1]) != hidden.shape[-1]:
        raise ValueError(f"TokenBatch: head has width {width}, hidden has {hidden.shape[-1]}: take both from one model")


def _check_values(batch: TokenBatch) -> None:
    """Reject NaN and infinity inside the mask, and targets outside the vocabulary. All checks share one host sync."""
    has_tokens = batch.mask.any(1)
    bad: dict[str, Tensor] = {}
    for name in (*_PER_TOKEN, *_PER_RESPONSE, "advantages", "hidden"):
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            finite = torch.isfinite(value) if value.dim() < 3 else torch.isfinite(value).all(-1)
            bad[name] = ~finite & (has_tokens if value.dim() == 1 else batch.mask)
    if batch.min_p_logp is not None:
        bad["min_p_logp"] = batch.mask & ~(batch.min_p_logp < torch.inf)
    head = as_head(batch.head) if batch.head is not None else None
    if batch.targets is not None:
        vocabulary = head.vocabulary if isinstance(head, Head) else torch.iinfo(torch.int64).max
        bad["targets"] = batch.mask & ((batch.targets < 0) | (batch.targets >= vocabulary))
    failed = torch.stack([flags.any() for flags in bad.values()]).tolist()
    for (name, flags), is_bad in zip(bad.items(), failed, strict=True):
        if is_bad:
            index = tuple(flags.nonzero()[0].tolist())
            value = getattr(batch, name)[index]
            shown = value.item() if value.dim() == 0 else "not finite"
            problem = {
                "targets": "not a token of the vocabulary",
                "min_p_logp": "must be a number or −inf inside the mask",
            }.get(name, "must be finite inside the mask")
            raise ValueError(f"TokenBatch: {name}{list(index)} = {shown}: {problem}")
