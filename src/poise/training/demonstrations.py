"""Worked solutions of a task as rows to train on: batches that the seed and their number fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from poise._lib.transfer import send
from poise.models.policy import Policy
from poise.models.prompts import plain
from poise.rollout.types import Rollouts
from poise.tasks import Demonstrates, Message, Problem, Task, begin

MOST_TURNS = 64  # of an expert that finds no end


@dataclass(frozen=True)
class Row:
    """One demonstration: the prompt, what follows it, and which of that is the expert's."""

    prompt: list[int]
    tokens: list[int]
    own: list[bool]


def check_shows(task: Task) -> None:
    """Refuse a task that cannot show how it is done."""
    if isinstance(task, Demonstrates):
        return
    try:
        shows = hasattr(begin(task, next(iter(task.problems("train", 0)))), "expert")
    except StopIteration:
        shows = False
    if not shows:
        raise TypeError(
            f"task {task.name!r} shows no worked solutions: for a warm start it needs demonstration(problem, seed, "
            "noise) -> str, or an episode with expert() -> str, the reply to give now"
        )


def dialogue(task: Task, problem: Problem, seed: int) -> Iterator[tuple[list[Message], str]]:
    """Turn by turn what is said to the expert, and the expert's reply."""
    episode = begin(task, problem)
    said = episode.start()
    if isinstance(task, Demonstrates):
        yield said, task.demonstration(problem, seed=seed)
        return
    for _ in range(MOST_TURNS):
        if not said:
            return
        reply = episode.expert()  # type: ignore[attr-defined]
        yield said, reply
        said = episode.step(reply)


def encode_row(policy: Policy, turns: Iterator[tuple[list[Message], str]]) -> Row:
    """A demonstration as the model will see and write it: through its chat template, each reply with its end."""
    tokenizer = policy.tokenizer
    messages: list[Message] = []
    prompt: list[int] = []
    tokens: list[int] = []
    own: list[bool] = []
    for said, reply in turns:
        if not prompt:
            prompt = policy.encode(said)
        else:
            between = policy.encode_next(messages, said, tokens[-1])
            tokens, own = tokens + between, own + [False] * len(between)
        written = [*plain(tokenizer, reply), tokenizer.eos_token_id]
        tokens, own = tokens + written, own + [True] * len(written)
        messages = [*messages, *said, {"role": "assistant", "content": reply}]
    return Row(prompt, tokens, own)


class Demonstrations(Dataset[list[Row]]):
    """Batch number i, made from the seed and i alone, so that the count of worker processes does not matter."""

    def __init__(self, task: Task, policy: Policy, *, batches: int, batch: int, seed: int) -> None:
        self.task, self.policy, self.batches, self.batch, self.seed = task, policy, batches, batch, seed

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> list[Row]:
        seed = self.seed * 1_000_003 + index
        problems = islice(self.task.problems("train", seed + 1), self.batch)
        return [
            encode_row(self.policy, dialogue(self.task, problem, seed * 10_007 + number))
            for number, problem in enumerate(problems)
        ]


def as_rollouts(rows: Sequence[Row], device: torch.device) -> Rollouts:
    """The rows side by side, as the packed passes take them. Nobody sampled them: log-probabilities are 0."""

    def padded(parts: list[Tensor]) -> Tensor:
        return send(pad_sequence(parts, batch_first=True), device)

    tokens = padded([torch.tensor(row.tokens) for row in rows])
    nothing = torch.zeros(tokens.shape, device=device)
    return Rollouts(
        prompts=[row.prompt for row in rows],
        tokens=tokens,
        mask=padded([torch.tensor(row.own) for row in rows]),
        logp=nothing,
        entropy=nothing,
        finished=torch.ones(len(rows), dtype=torch.bool, device=device),
        extents=[(len(row.tokens), sum(row.own)) for row in rows],
    )
