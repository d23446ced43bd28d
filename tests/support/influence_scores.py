"""NTHR's scores of a single group."""

import torch

from poise.head.influence import group_scores


def scores(head, positive, negative, **settings):
    """``group_scores`` of one group: (hidden, targets) of each correct response, and of all incorrect ones together."""
    parts = [*positive, negative]
    hidden, targets = (torch.cat(each) for each in zip(*parts, strict=True))
    return group_scores(head, hidden, targets, [[len(y) for _, y in parts]], **settings)
