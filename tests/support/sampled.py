"""What engines return, side by side in padded tensors, to compare and to score."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from poise import TokenBatch
from poise.batch import Prompt
from poise.rollout.types import Completion, padded_batch


@dataclass(frozen=True, eq=False)
class Sampled:
    """B responses, padded with 0 to T tokens. ``batch`` is what the policy can score."""

    completions: list[Completion]
    prompts: list[list[int]]
    lengths: list[int]
    tokens: Tensor
    mask: Tensor
    logp: Tensor
    entropy: Tensor
    finished: Tensor
    batch: TokenBatch


def ask(engine, requests, sampling, seed=0, done=None):
    """The engine's, or the session's, responses to these requests."""
    found = engine.sample(requests, sampling, seed, done)
    names = ("tokens", "logp", "entropy")
    tokens, logp, entropy = (pad_sequence([getattr(x, name) for x in found], batch_first=True) for name in names)
    lengths = [len(each.tokens) for each in found]
    owner = getattr(engine, "engine", engine)
    batch = padded_batch([Prompt.of(r.prompt) for r in requests], [each.tokens for each in found], owner.policy.device)
    return Sampled(
        found,
        [list(request.prompt.tokens) for request in requests],
        lengths,
        tokens,
        torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None],
        logp,
        entropy,
        torch.tensor([each.finished for each in found]),
        batch,
    )
