"""What an attention layer does to its queries and keys before they meet: a norm of each head, and the rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Turn(NamedTuple):
    """Norm and rotation of one token in every row; a part that is None is left out."""

    cosine: Tensor | None = None  # (n, D) of the rotary embedding
    sine: Tensor | None = None
    query_weight: Tensor | None = None  # (D,) of the norm
    key_weight: Tensor | None = None
    epsilon: float = 0.0

    def query(self, x: Tensor) -> Tensor:
        """(n, H, D) queries as they meet the keys."""
        return self._turned(x, self.query_weight)

    def key(self, x: Tensor) -> Tensor:
        """(n, G, D) keys as they are stored."""
        return self._turned(x, self.key_weight)

    def _turned(self, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.float()
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * weight.float()
        if self.cosine is not None and self.sine is not None:
            first, second = wide.chunk(2, -1)
            partners = torch.cat([-second, first], -1)
            wide = wide * self.cosine[:, None].float() + partners * self.sine[:, None].float()
        return wide.to(x.dtype)
