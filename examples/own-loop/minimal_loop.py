"""GRPO with a token regulator, in one file: a tiny random model learns to count upwards from its prompt.

python examples/own-loop/minimal_loop.py "ar(alpha=0.3) | lopti(threshold=0.5)"
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from poise import TokenBatch, objective, regulators
from poise.advantages import group_zscore

VOCABULARY, LENGTH, PROMPTS, GROUP = 8, 6, 16, 8


class Model(nn.Module):
    """A tiny recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Map token ids (B, T) to hidden states (B, T, d) and logits (B, T, V)."""
        hidden = self.rnn(self.embed(tokens))[0]
        return hidden, self.head(hidden)


@torch.no_grad()
def sample(model: Model, prompts: Tensor) -> Tensor:
    """Sample a response to each prompt; return prompts and responses, (B, 1 + T)."""
    tokens = prompts
    for _ in range(LENGTH):
        chosen = torch.multinomial(model(tokens)[1][:, -1].softmax(-1), 1)
        tokens = torch.cat([tokens, chosen], 1)
    return tokens


def score_tokens(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability and entropy of every response token, and the hidden state that predicted it."""
    hidden, logits = model(tokens[:, :-1])
    logp = logits.log_softmax(-1)
    return logp.gather(2, tokens[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1), hidden


def train(method: str = "ar(alpha=0.2)", steps: int = 60, seed: int = 0) -> list[float]:
    """Train and return the mean reward of every step."""
    torch.manual_seed(seed)
    model, settings = Model(), objective.Settings()
    regulator = regulators.parse(method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for step in range(steps):
        prompts = torch.randint(VOCABULARY, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
        groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
        tokens = sample(model, prompts)
        hits = tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY
        rewards = hits.float().mean(1)
        with torch.no_grad():
            old_logp, entropy, hidden = score_tokens(model, tokens)
        batch = TokenBatch(
            old_logp, torch.ones_like(hits), group_zscore(rewards, groups), groups, rewards, correct=hits.all(1),
            entropy=entropy, hidden=hidden, head=model.head.weight, targets=tokens[:, 1:],
        )  # fmt: skip
        mini_batches = torch.randperm(len(tokens)).chunk(2)
        for phase in regulator(batch):
            for rows in mini_batches:
                mini, mini_phase = batch.rows(rows), phase.rows(rows)
                if not objective.active(mini, mini_phase, settings).any():
                    continue  # no active token: momentum alone must not move the model
                logp, *_ = score_tokens(model, tokens[rows])
                norm = objective.normalizer(mini, settings)
                loss, _ = objective.policy_loss(logp, mini, mini_phase, settings, normalizer=norm)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        history.append(float(rewards.mean()))
        if step % 10 == 9:
            print(f"step {step + 1:3d}  reward {history[-1]:.2f}  entropy {float(entropy.mean()):.2f}")
    return history


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "ar(alpha=0.2)")
