"""The language-model head: hidden states to logits, for the whole vocabulary or a slice of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poise._lib.device import accumulator
from poise._lib.errors import check_range


@dataclass(frozen=True, eq=False)
class Head:
    """``softcap · tanh(scale · (W h + b) / softcap) / temperature``: the logits that sampling used.

    Everything after ``W h`` is elementwise, so a slice of the vocabulary can be computed alone, and no tensor of size
    tokens × vocabulary is needed. A callable ``hidden → logits`` can replace a ``Head`` only where complete rows are
    computed, as in diagnostics.
    """

    weight: Tensor  # (V, d)
    bias: Tensor | None = None  # (V,)
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    master: Tensor | None = None  # (V, d) float32 master copy: receives the gradient instead of weight

    def __post_init__(self) -> None:
        if self.weight.dim() != 2:
            raise ValueError(f"Head: weight must be (V, d), got shape {tuple(self.weight.shape)}")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            expected = tuple(self.weight.shape[:1])
            raise ValueError(f"Head: bias must be {expected}, got {tuple(self.bias.shape)}")
        if self.master is not None and self.master.shape != self.weight.shape:
            expected = tuple(self.weight.shape)
            raise ValueError(f"Head: master must be {expected} like weight, got {tuple(self.master.shape)}")
        check_range("Head", "temperature", self.temperature, 1e-6)
        check_range("Head", "scale", self.scale, 1e-6)
        if self.softcap is not None:
            check_range("Head", "softcap", self.softcap, 1e-6)

    @classmethod
    def of(cls, output: Any, config: Any, temperature: float = 1.0, master: Tensor | None = None) -> Head:
        """Build a head from a transformers model's output embeddings and the scale and soft-cap of its config."""
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(output.weight, getattr(output, "bias", None), temperature, scale, softcap, master)

    @property
    def vocabulary(self) -> int:
        """Vocabulary size V."""
        return self.weight.shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of ``hidden`` (N, d) for the whole vocabulary."""
        return self.logits(hidden, slice(None))

    def logits(self, hidden: Tensor, vocabulary: slice) -> Tensor:
        """Logits of ``hidden`` (N, d) for a slice of the vocabulary, in float32 at least."""
        return self.finish(hidden @ self.weight[vocabulary].to(hidden.dtype).T, vocabulary)

    def finish(self, product: Tensor, vocabulary: slice | Tensor = slice(None)) -> Tensor:
        """Turn ``W h`` into logits, for a slice of the vocabulary or for an index of token ids.

        The result is at least float32, as in the kernels: if sampling rounded scale, cap or temperature to half
        precision, sampling and update would compute different log-probabilities.
        """
        logits = product.to(accumulator(product.dtype))
        if self.bias is not None:
            logits = logits + self.bias[vocabulary].to(logits.dtype)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits / self.temperature if self.temperature != 1.0 else logits


HeadLike = Tensor | Head | Callable[[Tensor], Tensor]


def as_head(head: HeadLike) -> Head | Callable[[Tensor], Tensor]:
    """Wrap a weight or a plain ``nn.Linear`` in a ``Head``; return any other callable unchanged."""
    if isinstance(head, Tensor):
        return Head(head)
    if type(head) is torch.nn.Linear:
        return Head(head.weight, head.bias)
    return head
