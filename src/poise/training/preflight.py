"""Before the first evaluation: try the task, the model and the regulator on a few tokens, and check the disk.

Mistakes then appear within a second, not after an evaluation or at the first checkpoint. The trial does not change the
run: it draws none of the run's random numbers, and uses neither the engine nor the engine's cache or graphs.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from poise._lib.device import same_random_numbers
from poise._lib.errors import bytes_text
from poise._lib.user_code import blamed
from poise.batch import Prompt
from poise.models.policy import Policy
from poise.runs.folder import CheckpointError
from poise.sampling.requests import Completion, Request
from poise.sampling.trajectories import Trajectory
from poise.tasks import draw, several_turns
from poise.training.building import Components
from poise.training.checkpoints import Checkpoints
from poise.training.config.schema import Config
from poise.training.resume import TrainError
from poise.training.update import NotFiniteError

PROBLEMS, ATTEMPTS, TOKENS = 2, 2, 16  # two groups of two short replies, enough for every regulator
CONTEXT = 64  # the trial reads at most this many tokens of a prompt, and of its response
EPISODE = 256  # most tokens of an episode with several turns


def preflight(config: Config, run: Components) -> None:
    """If the run cannot work, raise an error that says what to do."""
    sampler = run.sampler
    check_disk(config, run.checkpoints)
    episode = min(sampler.max_episode or EPISODE, EPISODE) if several_turns(sampler.task) else None
    with same_random_numbers(sampler.policy.device):
        problems = draw(sampler.task, "train", config.seed, PROBLEMS, sampler.fits)
        echo = replace(
            sampler, engine=Echo(sampler.policy), max_tokens=min(sampler.max_tokens, TOKENS), max_episode=episode
        )
        samples = echo.play([problem for problem in problems for _ in range(ATTEMPTS)], 0)
        try:
            batch = run.make_batch([_short(sample, number) for number, sample in enumerate(samples)])
        except NotFiniteError as error:
            raise TrainError(f"model={config.model}: {error}, before any training: set dtype=float32") from error
        with blamed("regulator", config.regulator):
            copy.deepcopy(config.build_regulator())(batch)  # a copy: the run's regulator may have state


def check_disk(config: Config, checkpoints: Checkpoints) -> None:
    """Raise CheckpointError unless all kept checkpoints and the one being written fit on the disk."""
    folder, free = checkpoints.folder, shutil.disk_usage(checkpoints.folder.path).free
    size = checkpoints.size(config.optim.moment_bytes)
    number = -(-config.steps // config.checkpoint_every) + 1 if config.checkpoint_every else 1
    number = max(1, min(number, config.keep_checkpoints + 1) - len(folder.checkpoints()))
    if number * size > free:
        raise CheckpointError(
            f"run folder {folder.path}: {number} checkpoints of {bytes_text(size)} need {bytes_text(number * size)}, "
            f"but the disk has {bytes_text(free)} free (keep_checkpoints={config.keep_checkpoints}, and one more while "
            "it is written): free some space, lower keep_checkpoints, or choose a run=DIR on another disk"
        )


class Echo:
    """An engine that replies with a few tokens of the prompt."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def sample(self, requests: Sequence[Request], *_: Any, **__: Any) -> list[Completion]:
        """Return a reply to each request. Replies differ in length, and end with an end token if the limit allows."""
        ends = self.policy.end_tokens
        replies = []
        for number, request in enumerate(requests):
            prompt = request.prompt.tokens
            words = [token for token in prompt if token not in ends] or list(prompt)
            length = max(1, min(request.max_tokens, TOKENS - number % ATTEMPTS))
            finished, reply = bool(ends) and length > 1, (words * length)[:length]
            tokens, zeros = torch.tensor([*reply[:-1], ends[0]] if finished else reply), torch.zeros(length)
            replies.append(Completion(tokens, zeros, zeros, finished))
        return replies


def _short(sample: Trajectory, number: int) -> Trajectory:
    """Shorten a sample for a quick pass, remove its log-probabilities, and set its reward to 0 or 1 in turn."""
    score = replace(sample.score, reward=float(number % ATTEMPTS), correct=number % ATTEMPTS == 1, failed=None)
    prompt = Prompt(sample.prompt.tokens[-CONTEXT:], sample.prompt.key)
    tokens, own = sample.tokens[:CONTEXT], sample.own[:CONTEXT]
    return replace(sample.unscored(), score=score, group=number // ATTEMPTS, prompt=prompt, tokens=tokens, own=own)
