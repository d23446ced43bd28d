"""A model whose gradients are known by hand."""

import torch

from poise import TokenBatch
from poise.diagnostics import ForwardLoop


class Table:
    """A softmax model by hand: every token has logits of its own, so that its gradient touches no other's."""

    def __init__(self, seed=0, rows=8, length=12, vocabulary=2):
        g = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(rows, length, vocabulary, generator=g, dtype=torch.float64).mul_(2).requires_grad_()
        drawn = torch.rand(rows, length, generator=g, dtype=torch.float64)[..., None]
        self.targets = (self.logits.detach().softmax(-1).cumsum(-1) < drawn).sum(-1).clamp(max=vocabulary - 1)
        mask = torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1), generator=g)
        signs = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).double()
        self.batch = TokenBatch(self.logp().detach(), mask, signs, groups=torch.arange(rows) // 2, correct=signs > 0)

    def logp(self):
        return self.logits.log_softmax(-1).gather(-1, self.targets[..., None])[..., 0]

    def loop(self):
        return ForwardLoop(self.batch, [self.logits], self.logp)
