"""Worked solutions of a task as rows to train on. The seed and a batch's number determine the batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Dataset

from poise.batch import Prompt, TokenBatch, padded_batch
from poise.models.policy import Policy
from poise.models.prompts import PromptError, Tools, _controls, _encode, _pieces, encode_next, plain, tools_of
from poise.tasks import Message, Problem, Task, begin

MOST_TURNS = 64  # an expert that has not finished by then is cut off


@runtime_checkable
class Demonstrates(Protocol):
    """A task that can also show how it is done."""

    def demonstration(self, problem: Problem, seed: int = 0, noise: float | None = None) -> str:
        """A complete response; with ``noise`` > 0 an imperfect one. ``None`` means the task's own setting."""
        ...


@dataclass(frozen=True)
class Row:
    """One demonstration: the prompt, the tokens after it, and which of them the expert wrote."""

    prompt: list[int]
    tokens: list[int]
    own: list[bool]


def check_shows(task: Task) -> None:
    """Refuse a task without worked solutions."""
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
    """For each turn, the messages to the expert and the expert's reply."""
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


def encode_row(policy: Policy, turns: Iterator[tuple[list[Message], str]], tools: Tools = ()) -> Row:
    """Encode a demonstration through the chat template, each reply with the end of its turn."""
    tokenizer = policy.tokenizer
    end = turn_end(tokenizer, policy.end_tokens)
    ends = {*policy.end_tokens, end[-1]}
    messages: list[Message] = []
    prompt: list[int] = []
    tokens: list[int] = []
    own: list[bool] = []
    for said, reply in turns:
        if not prompt:
            prompt = policy.encode(said, tools)
        else:
            between = encode_next(tokenizer, messages, said, tokens[-1], ends, tools)
            tokens, own = tokens + between, own + [False] * len(between)
        reply_ids = [*plain(tokenizer, reply), *end]
        tokens, own = tokens + reply_ids, own + [True] * len(reply_ids)
        messages = [*messages, *said, {"role": "assistant", "content": reply}]
    return Row(prompt, tokens, own)


class Demonstrations(Dataset[list[Row]]):
    """Batch i depends on the seed and i alone, so that the number of worker processes does not matter."""

    def __init__(self, task: Task, policy: Policy, *, batches: int, batch: int, seed: int) -> None:
        self.task, self.policy, self.batches, self.batch, self.seed = task, policy, batches, batch, seed

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> list[Row]:
        seed = self.seed * 1_000_003 + index
        problems = islice(self.task.problems("train", seed + 1), self.batch)
        return [
            encode_row(
                self.policy, dialogue(self.task, problem, seed * 10_007 + number), tools_of(begin(self.task, problem))
            )
            for number, problem in enumerate(problems)
        ]


def as_batch(rows: Sequence[Row], device: torch.device) -> TokenBatch:
    """The rows as a batch for packed passes. They were not sampled, so log-probabilities are 0."""
    tokens, own = [torch.tensor(row.tokens) for row in rows], [torch.tensor(row.own) for row in rows]
    return padded_batch([Prompt(tuple(row.prompt)) for row in rows], tokens, device, own)


def turn_end(tokenizer: Any, ends: Collection[int]) -> list[int]:
    """What the chat template writes behind a reply, up to the token that ends the turn.

    That token is the first of ``ends``, else the first control token. Without one it is the tokenizer's end token.
    """
    nothing = [int(tokenizer.eos_token_id)]
    if not tokenizer.chat_template:
        return nothing
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    try:
        behind = _pieces(tokenizer, dialogue, {"add_generation_prompt": False})[-1:]
    except PromptError:
        return nothing
    controls = _controls(tokenizer, ends)
    ids, _ = _encode(tokenizer, behind, controls, ends)
    for wanted in (ends, controls.values()):
        if place := next((at for at, token in enumerate(ids, 1) if token in wanted), 0):
            return ids[:place]
    return nothing
