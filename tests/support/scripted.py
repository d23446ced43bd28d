"""An engine that says what it is told to."""

from collections import Counter

import torch

from poise.sampling.requests import Completion


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
        width = max(len(row) for row in rows)
        logp = [-torch.arange(1.0 + i * width, 1.0 + i * width + len(row)) for i, row in enumerate(rows)]
        ended = [int(row[-1]) in self.policy.end_tokens for row in rows]
        return [Completion(row, p, -p, end) for row, p, end in zip(rows, logp, ended, strict=True)]

    def _reply(self, request):
        said = self.say(request.number, self.turns[request.number], list(request.prompt.tokens))
        self.turns[request.number] += 1
        ids = self.policy.tokenizer(said)["input_ids"] if isinstance(said, str) else said
        return ids[: request.max_tokens]
