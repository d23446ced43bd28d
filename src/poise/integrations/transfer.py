"""RLTR's transfer as a reward with TRL's signature. ``sampling/rltr.py`` has the method; docs/rltr.md shows its use.

>>> transfer = Transfer("http://receiver:8000/v1", reward="math", tokenizer="Qwen/Qwen2.5-7B-Instruct")
>>> GRPOTrainer(model, [right, transfer], GRPOConfig(reward_weights=[1.0, 0.5], ...), dataset)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from poise.models.loading import load_policy, load_tokenizer
from poise.models.policy import Policy
from poise.models.prompts import as_text
from poise.sampling import MAX_TOKENS
from poise.sampling.choose import choose
from poise.sampling.draws import Sampling
from poise.sampling.remote import Loaded, Receiver, Server, before_control, is_address, whole_text
from poise.sampling.rltr import Rltr, first_tokens
from poise.tasks.rewards import Rewards, TrainerState, text_of


@dataclass(frozen=True)
class _Words:
    """A tokenizer in the form that ``first_tokens`` needs."""

    tokenizer: Any
    end_tokens: list[int]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class Transfer:
    """The share of a receiver's continuations that ``reward`` scores as correct: a number from 0 to 1 per completion.

    ``receiver`` is the address of an OpenAI-compatible server, a model's name, a loaded ``Policy``, or any object with
    ``complete`` (``sampling.remote.Receiver``). ``reward`` is a reward that ``poise.Rewards`` accepts; it receives the
    data's columns. ``tokenizer`` is the receiver's tokenizer or its name; required if ``receiver`` is an address. The
    prefix and its continuation together have at most ``max_tokens`` of the receiver's tokens. ``server`` holds settings
    of ``Server``, such as ``timeout=60``. The other settings are the same as in ``rltr``. Random numbers depend only on
    ``seed``, the step, the prompt and the completion.
    """

    __name__ = "transfer"  # TRL logs rewards under this name

    def __init__(
        self,
        receiver: str | Policy | Receiver,
        reward: str | Callable[..., Any],
        tokenizer: Any = None,
        *,
        continuations: int = 1,
        low: float = 0.0,
        high: float = 1.0,
        marks: Sequence[str] = Rltr.marks,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        seed: int = 0,
        **server: Any,
    ) -> None:
        checked = Rltr(continuations=continuations, low=low, high=high, marks=tuple(marks))
        self.continuations, self.low, self.high, self.marks = continuations, low, high, checked.marks
        self.max_tokens, self.sampling, self.seed = max_tokens, sampling or Sampling(), seed
        self.rewards = Rewards(reward)
        if isinstance(receiver, str) and not is_address(receiver):
            receiver = load_policy(receiver)
        if isinstance(receiver, Policy):
            tokenizer = tokenizer or receiver.tokenizer
            receiver = Loaded(receiver, choose(receiver, note=lambda _: None))
        if tokenizer is None:
            raise ValueError(
                "transfer: pass tokenizer=, the name of the receiver's model: its tokenizer encodes the prompts"
            )
        ends = [tokenizer.eos_token_id] if not isinstance(tokenizer, str) else []
        if isinstance(tokenizer, str):
            tokenizer, ends = load_tokenizer(tokenizer)
        self.words = _Words(tokenizer, ends)
        if isinstance(receiver, str):
            receiver = Server(receiver, **server)
            receiver.check()
        self.receiver: Receiver = receiver

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], trainer_state: Any = None, **columns: Any
    ) -> list[float | None]:
        """Return a score per completion, as TRL expects; None for one whose continuations all have no grade."""
        step = getattr(trainer_state, "global_step", 0)
        texts = [text_of(completion) for completion in completions]
        asked: dict[tuple[str, str], int] = {}  # (prompt, prefix) → the first row with these
        keys = []
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            key = (as_text(self.words.tokenizer, prompt), self._prefix(step, prompt, text))
            keys.append(key)
            if key[1]:
                asked.setdefault(key, row)
        shares = self._shares(step, asked, prompts, columns)
        return [shares.get(key, 0.0) for key in keys]

    def _prefix(self, step: int, prompt: Any, text: str) -> str:
        tokens = self.words.tokenizer(text, add_special_tokens=False)["input_ids"]
        point = random.Random(repr((self.seed, step, prompt, text))).random()
        begun = first_tokens(self.words, tokens, self.high - (self.high - self.low) * point, self.marks)
        return before_control(self.words.tokenizer, whole_text(self.words, begun[: self.max_tokens - 1]))

    def _shares(
        self, step: int, asked: dict[tuple[str, str], int], prompts: Sequence[Any], columns: dict[str, Any]
    ) -> dict[tuple[str, str], float | None]:
        """Return the share of correct continuations for each pair of prompt and prefix."""
        every = [(key, row, number) for key, row in asked.items() for number in range(self.continuations)]
        if not every:
            return {}
        spent = [len(self.words.tokenizer(key[1], add_special_tokens=False)["input_ids"]) for key, *_ in every]
        replies = self.receiver.complete(
            [prompt + begun for (prompt, begun), *_ in every],
            [max(1, self.max_tokens - used) for used in spent],
            [random.Random(repr((self.seed, step, key, number))).getrandbits(62) for key, _, number in every],
            self.sampling,
        )
        whole = [key[1] + reply.text for (key, *_), reply in zip(every, replies, strict=True)]
        rows = [row for _, row, _ in every]
        lists = {name: values for name, values in columns.items() if isinstance(values, list | tuple)}
        of_data = {name: values for name, values in lists.items() if len(values) == len(prompts)}
        grades = self.rewards.score(
            [prompts[row] for row in rows],
            whole if isinstance(prompts[0], str) else [[{"role": "assistant", "content": text}] for text in whole],
            [self.words.tokenizer(text, add_special_tokens=False)["input_ids"] for text in whole],
            {name: [values[row] for row in rows] for name, values in of_data.items()},
            [f"continuation {number} of row {row}" for _, row, number in every],
            TrainerState(global_step=step),
        )
        found: dict[tuple[str, str], list[bool]] = {key: [] for key in asked}
        for (key, *_), grade in zip(every, grades, strict=True):
            if grade.failed is None and grade.applies:
                found[key].append(grade.correct)
        return {key: sum(right) / len(right) if right else None for key, right in found.items()}
