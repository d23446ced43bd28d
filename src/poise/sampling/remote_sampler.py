"""Plays a task with a model on a server (``remote.Server``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from poise.models.prompts import as_text, plain
from poise.sampling.draws import streams
from poise.sampling.remote import Server, before_control, whole_text
from poise.sampling.requests import Completion, Engine, Session
from poise.sampling.sampler import Sampler, _Game
from poise.tasks import explained, heard


@dataclass(frozen=True, eq=False)
class RemoteSampler(Sampler):
    """Plays a one-turn task with the model on ``server``. Prompts and replies are sent as text.

    ``tokenizer`` has the server's chat template (default: the policy's tokenizer).
    """

    server: Server = None  # type: ignore[assignment]
    tokenizer: Any = None

    @classmethod
    def of(cls, sampler: Sampler, server: Server, tokenizer: Any = None) -> RemoteSampler:
        """Build a remote sampler with the task and settings of ``sampler``."""
        shared = {each.name: getattr(sampler, each.name) for each in fields(Sampler) if each.init}
        return cls(
            **shared | {"others": {}, "max_prompt": None},
            server=server,
            tokenizer=tokenizer or sampler.policy.tokenizer,
        )

    def _play(self, games: Sequence[_Game], engine: Engine | Session, seed: int) -> None:  # noqa: ARG002
        begun = [before_control(self.tokenizer, whole_text(self.policy, game.tokens)) for game in games]
        prompts = [
            as_text(self.tokenizer, game.messages) + game.prefill.text + text
            for game, text in zip(games, begun, strict=True)
        ]
        limits = [min(self.max_tokens - game.prefix, game.room) for game in games]
        seeds = streams(seed, torch.arange(len(games))).tolist()
        with self.counts.timed("rollout"):
            replies = self.server.complete(prompts, limits, seeds, self.sampling)
        for game, text, limit, reply in zip(games, begun, limits, replies, strict=True):
            tokens = torch.tensor(plain(self.tokenizer, reply.text)[:limit], dtype=torch.long)
            zeros = torch.zeros(len(tokens))
            whole = game.prefill.opening + game.prefill.text + text + reply.text
            with explained(game.task, game.problem, "step()"):
                heard(game.task, game.problem, game.episode.step(whole))
            game.answered(Completion(tokens, zeros, zeros, reply.finished), whole, [], None)
        with self.counts.timed("score"):
            self._score(games)
