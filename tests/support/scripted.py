"""An engine that says what it is told to."""

from collections import Counter

import torch

from poise.rollout.types import Rollouts


class Scripted:
    """``say(number, turn, prompt)`` is the reply of request ``number`` in its turn, as text or as token ids.

    Log-probabilities are −1, −2, … along the batch, so that no two tokens share theirs. ``asked`` keeps the requests.
    """

    def __init__(self, policy, say):
        self.policy, self.say, self.turns, self.asked = policy, say, Counter(), []

    def sample(self, requests, sampling, seed, done=None):
        del sampling, seed, done
        self.asked.append(requests)
        rows = [torch.tensor(self._reply(request)) for request in requests]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        ended = torch.tensor([int(row[-1]) in self.policy.end_tokens for row in rows])
        logp = -torch.arange(1.0, tokens.numel() + 1).view(tokens.shape) * mask
        return Rollouts([list(request.prompt) for request in requests], tokens, mask, logp, -logp, ended)

    def _reply(self, request):
        said = self.say(request.number, self.turns[request.number], list(request.prompt))
        self.turns[request.number] += 1
        ids = self.policy.tokenizer(said)["input_ids"] if isinstance(said, str) else said
        return ids[: request.max_tokens]
