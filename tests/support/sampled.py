"""What engines return, side by side in padded tensors, to compare and to score."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from poise import TokenBatch
from poise.batch import padded_batch
from poise.sampling.requests import Completion


@dataclass(frozen=True, eq=False)
class Sampled:
    """B responses, padded with 0 to T tokens, on the policy's device. ``batch`` is what the policy can score."""

    completions: list[Completion]
    batch: TokenBatch
    logp: Tensor
    entropy: Tensor
    finished: Tensor
    sampler_logp: Tensor | None

    @property
    def tokens(self):
        return self.batch.targets

    @property
    def mask(self):
        return self.batch.mask

    @property
    def lengths(self):
        return [len(each.tokens) for each in self.completions]

    @property
    def prompts(self):
        return [list(extent.prompt.tokens) for extent in self.batch.extents]


def ask(engine, requests, sampling, seed=0, done=None):
    """The engine's, or the session's, responses to these requests."""
    found = engine.sample(requests, sampling, seed, done)
    device = getattr(engine, "engine", engine).policy.device

    def padded(name):
        rows = [getattr(each, name) for each in found]
        return None if any(row is None for row in rows) else pad_sequence(rows, batch_first=True).to(device)

    batch = padded_batch([request.prompt for request in requests], [each.tokens for each in found], device)
    finished = torch.tensor([each.finished for each in found], device=device)
    return Sampled(found, batch, padded("logp"), padded("entropy"), finished, padded("sampler_logp"))
