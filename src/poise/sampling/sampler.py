"""``Sampler`` plays many episodes at once with the policy. The trainer, evaluation and diagnose all use it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from poise.batch import Prompt
from poise.models.location import ModelError, first_line
from poise.models.policy import NO_LIMIT, Policy
from poise.models.prompts import PromptError, Tools, opened, tools_of
from poise.sampling import MAX_TOKENS
from poise.sampling.draws import Sampling
from poise.sampling.requests import Completion, Engine, Request, Session, session
from poise.sampling.trajectories import Trajectory
from poise.tasks import (
    Attempt,
    Episode,
    Message,
    Problem,
    Score,
    ScoresTogether,
    Task,
    begin,
    explained,
    heard,
    judge,
    judge_all,
    several_turns,
)
from poise.tasks.rewards import TrainerState

Opening = Callable[[int, list[Message]], list[Message]]
MAX_TURNS = 64  # a longer episode is cut off and scored
POLICY = "policy"  # the policy's name in ``Counts.tokens``


@dataclass(frozen=True, eq=False)
class Counts:
    """The counters of a sampler, which ``Sampler.at`` starts at 0."""

    tokens: Counter[str] = field(default_factory=Counter)  # sampled tokens, by the model's name
    # "continued": turns after the first that reused saved keys; "reread": turns after the first that read the whole
    # dialogue again; "too_long": problems whose prompt is too long
    turns: Counter[str] = field(default_factory=Counter)
    reported: dict[str, list[float]] = field(default_factory=dict)  # values that reward functions report, by name
    seconds: dict[str, float] = field(default_factory=dict)  # time by part of the step: "rollout", "score"

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent in this context to ``seconds[part]``."""
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, eq=False)
class Sampler:
    """A policy, the engine that samples from it, the task, and the settings of sampling.

    ``others`` maps the names of additional models to their samplers, for example of a frozen model (never trained) that
    continues the policy's text. ``at`` returns a copy for one step or one evaluation, with new ``counts``. Copies made
    with ``replace`` share their ``counts``.
    """

    policy: Policy
    engine: Engine
    task: Task
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    max_tokens: int = MAX_TOKENS  # per reply
    max_prompt: int | None = None  # in an episode's first prompt; None: no limit
    max_episode: int | None = None  # after the first prompt: replies and the environment's text; None: no limit
    others: Mapping[str, Sampler] = field(default_factory=dict)
    # The state of training that reward functions receive; ``global_step`` is the ``version`` of trajectories.
    progress: TrainerState = field(default_factory=TrainerState)
    prefill: str = ""  # ends the prompt of every turn; scored with the reply, but not in the loss
    name: str = POLICY
    counts: Counts = field(default_factory=Counts)
    _prompts: dict[str, Prompt] = field(default_factory=dict, init=False)  # by messages and tools

    def __post_init__(self) -> None:
        # Other models add to our token counts, but not to our counts of turns and seconds.
        counts = replace(self.counts, turns=Counter(), seconds={})
        others = {
            name: replace(other, name=name, counts=counts, progress=self.progress)
            for name, other in self.others.items()
        }
        object.__setattr__(self, "others", others)

    def at(self, progress: TrainerState | None = None) -> Sampler:
        """Return a copy for one step or one evaluation, with new counts. Reward functions receive ``progress``."""
        return replace(self, progress=progress or self.progress, counts=Counts())

    def play(
        self,
        problems: Sequence[Problem],
        seed: int,
        *,
        opening: Opening | None = None,
        begun: Sequence[Sequence[int]] | None = None,
    ) -> list[Trajectory]:
        """Attempt each problem once, in order. A problem may appear several times.

        An attempt depends on the seed, its index in the list and its problem, not on the other attempts.

        ``opening(i, messages)`` returns the first messages of attempt i; ``messages`` are the episode's own. The first
        reply of attempt i starts with the tokens ``begun[i]``, and the model continues from there. These tokens are
        scored as part of the reply and count towards the reply's limit, but ``own`` is False for them.
        """
        games = self._start(problems, opening, begun)
        self._prompts.clear()  # the next call has other problems
        if several_turns(self.task):
            longest = max((len(game.prompt.tokens) + game.room for game in games), default=None)
            with session(self.engine, longest if self.max_episode else None) as engine:
                self._play(games, engine, seed)
                self.counts.turns.update(continued=engine.continued, reread=engine.reread)
        else:
            self._play(games, self.engine, seed)
        self.counts.tokens[self.name] += sum(sum(game.own) for game in games)
        return [game.trajectory(self.progress.global_step) for game in games]

    def _play(self, games: Sequence[_Game], engine: Engine | Session, seed: int) -> None:
        """Play turns until all episodes have ended. A ``Session`` may keep keys and values between turns."""
        turn, live, keep = 0, list(range(len(games))), isinstance(engine, Session)
        ends = self.policy.end_tokens
        while live:
            playing = [games[i] for i in live]
            requests = [
                Request(
                    game.prompt.then(game.tokens) if game.tokens else game.prompt,
                    min(self.max_tokens - (0 if turn else game.prefix), game.room),
                    ends,
                    number,
                    keep=keep,
                    continues=number if keep and turn else None,
                )
                for number, game in zip(live, playing, strict=True)
            ]
            own_seed = seed + (turn * 0x9E3779B97F4A7C15) % (1 << 62)  # the first turn uses the step's seed
            self._turn(playing, engine, requests, own_seed)
            turn += 1
            if turn >= MAX_TURNS:
                for game in playing:
                    game.cut_off()
            with self.counts.timed("score"):
                self._score([game for game in playing if game.over])
            live = [i for i in live if not games[i].over]

    def _turn(self, games: Sequence[_Game], engine: Engine | Session, requests: Sequence[Request], seed: int) -> None:
        """Sample a reply in every game, and get the environments' answers.

        A task with ``concurrent = True`` answers each reply in a second thread, as soon as the reply has ended. Any
        other task answers after sampling, in the trainer's thread: a verifier that uses signals for its time limit
        does not work in a second thread.
        """
        answers: dict[int, Future[tuple[str, list[Message], Score | None]]] = {}
        pool = ThreadPoolExecutor(1)

        def ask(i: int, tokens: list[int]) -> None:
            answers[i] = pool.submit(games[i].answer_to, tokens)

        try:
            with self.counts.timed("rollout"):
                done = ask if getattr(self.task, "concurrent", False) else None
                completions = engine.sample(requests, self.sampling, seed, done)
            with self.counts.timed("score"):
                for i, (game, completion) in enumerate(zip(games, completions, strict=True)):
                    answer = answers[i].result() if i in answers else game.answer_to(completion.tokens.tolist())
                    game.answered(completion, *answer)
        finally:
            pool.shutdown(cancel_futures=True)

    def greedy(self) -> Sampler:
        """Return a copy with temperature 0, which always picks the most likely token."""
        return replace(self, sampling=Sampling(temperature=0.0))

    def _score(self, games: Sequence[_Game]) -> None:
        """Score finished games that have no score yet."""
        waiting = [game for game in games if game.score is None]
        if waiting and isinstance(self.task, ScoresTogether):
            scores = judge_all(self.task, [game.attempt(self.progress, self.counts.reported) for game in waiting])
        else:
            scores = [judge(game.task, game.problem, game.episode) for game in waiting]
        for game, score in zip(waiting, scores, strict=True):
            game.score = score

    def _start(
        self,
        problems: Sequence[Problem],
        opening: Opening | None = None,
        begun: Sequence[Sequence[int]] | None = None,
    ) -> list[_Game]:
        """Start an episode for each problem. Equal first prompts are encoded once."""
        most = self.policy.longest
        prefill = Prefill(self.prefill, self.policy.encode_prefill(self.prefill), opened(self.policy.tokenizer))
        games = []
        for index, problem in enumerate(problems):
            episode = begin(self.task, problem)
            with explained(self.task, problem, "start()"):
                messages = episode.start()
            if opening is not None:
                messages = opening(index, messages)
            if not problem.prompt:  # the environment wrote the prompt; recorded tokens show it
                problem = replace(problem, prompt=messages[-1]["content"])
            tools = tools_of(episode)
            key = repr((messages, tools))
            if key not in self._prompts:
                self._prompts[key] = self._encode(problem, messages, tools, prefill.tokens)
            start = self._prompts[key]
            room = self._room(most - len(start.tokens))
            game = _Game(self.policy, self.task, problem, episode, messages, len(messages), start, room, tools, prefill)
            if begun is not None and len(begun[index]):
                game.prefix = len(begun[index])
                game.follow(begun[index])
            games.append(game)
        return games

    def fits(self, problem: Problem) -> bool:
        """Whether the prompt of a problem has at most ``max_prompt`` tokens.

        If the user's own episode writes the prompt, return True without a check: this method never runs user code.
        """
        if getattr(self.task, "pure_start", False) or not hasattr(self.task, "episode"):
            try:
                self._start([problem])
            except LongPromptError:
                self.counts.turns["too_long"] += 1
                return False
        return True

    def _room(self, left: int) -> int:
        """Token budget after the prompt, over all turns; ``left`` is the number of positions the model has left."""
        # If not even the first reply fits, the engine refuses the request.
        return min(max(self.max_tokens, left), self.max_episode or NO_LIMIT)

    def _encode(self, problem: Problem, messages: list[Message], tools: Tools, prefill: list[int]) -> Prompt:
        """Encode a problem's prompt. If the prompt is too long or cannot be encoded, the error names the problem."""
        try:
            ids = [*self.policy.encode(messages, tools), *prefill]
        except PromptError as error:
            raise ModelError(f"problem {problem.id}: {error}") from error
        except Exception as error:  # a chat template is a program and may raise anything
            raise ModelError(
                f"problem {problem.id}: the model's tokenizer or chat template fails on its prompt "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
        if self.max_prompt is not None and len(ids) > self.max_prompt:
            raise LongPromptError(
                f"the prompt of problem {problem.id} has {len(ids)} tokens, more than rollout.max_prompt="
                f"{self.max_prompt}: raise it, or shorten the task's prompts"
            )
        described = f"the prompt of problem {problem.id} with {len(ids)} tokens"
        self.policy.check_positions(len(ids), self.max_tokens, described)
        return Prompt(tuple(ids))


class LongPromptError(ModelError):
    """A prompt has more than ``rollout.max_prompt`` tokens."""


class Prefill(NamedTuple):
    """The start of every reply: ``tokens`` are the last tokens of the prompt, but ``text`` is part of the reply.

    The chat template itself writes ``opening``, such as ``<think>``, before ``text``.
    """

    text: str = ""
    tokens: list[int] = []  # noqa: RUF012 (never changed)
    opening: str = ""


@dataclass(eq=False)
class _Game:
    """One episode in progress. Each reply and each answer of the environment appends tokens."""

    policy: Policy
    task: Task
    problem: Problem
    episode: Episode
    messages: list[Message]  # the dialogue so far
    opening: int  # number of messages before the first reply
    prompt: Prompt
    room: int  # remaining token budget
    tools: Tools = ()
    prefill: Prefill = Prefill()  # noqa: RUF009 (immutable)
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)  # whether the model wrote the token
    # One tensor per reply and per environment text; zeros for tokens that the model did not write.
    logp: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    sampler_logp: list[Tensor | None] = field(default_factory=list)
    end: int = 0  # the number of tokens up to the model's last token
    replies: list[str] = field(default_factory=list)
    score: Score | None = None
    over: bool = False
    finished: bool = True
    prefix: int = 0  # tokens at the start of the first reply that are not the model's own

    def follow(self, tokens: Sequence[int], completion: Completion | None = None) -> None:
        """Append tokens: the model's own if ``completion`` is set, else tokens that the model only reads."""
        self.tokens += tokens
        self.own += [completion is not None] * len(tokens)
        self.logp.append(torch.zeros(len(tokens)) if completion is None else completion.logp)
        self.entropy.append(torch.zeros(len(tokens)) if completion is None else completion.entropy)
        self.sampler_logp.append(None if completion is None else completion.sampler_logp)
        self.end = self.end if completion is None else len(self.tokens)
        self.room -= len(tokens)

    def answer_to(self, tokens: list[int]) -> tuple[str, list[Message], Score | None]:
        """Return a reply's text, the environment's answer, and the score if the episode has ended.

        For a task that scores several episodes in one call, the score is None.
        """
        prefix = [] if self.replies else self.tokens  # the beginning of the first reply
        text = self.policy.decode([*self.prefill.tokens, *prefix, *tokens])
        # Decoding drops special tokens, so the prefill's text is added again.
        text = self.prefill.opening + self.prefill.text + text.removeprefix(self.prefill.text)
        with explained(self.task, self.problem, "step()"):
            answer = heard(self.task, self.problem, self.episode.step(text))
        together = isinstance(self.task, ScoresTogether)  # then one call scores all episodes that have ended
        return text, answer, None if answer or together else judge(self.task, self.problem, self.episode)

    def answered(self, completion: Completion, reply: str, answer: list[Message], score: Score | None) -> None:
        """Add the model's reply and the environment's answer, which is empty if the episode has ended."""
        self.follow(completion.tokens.tolist(), completion)
        self.replies.append(reply)
        self.finished &= completion.finished
        self.score, self.over = score, not answer
        self.messages = [*self.messages, {"role": "assistant", "content": reply}]
        if answer:
            following = self.policy.encode_next(self.messages, answer, self.tokens[-1], self.tools)
            following = [*following, *self.prefill.tokens]
            if self.room - len(following) < 1:  # no room for another reply
                self.cut_off()
                return
            self.follow(following)
            self.messages = [*self.messages, *answer]

    def cut_off(self) -> None:
        """End the episode, and mark it as cut off unless it was already over."""
        self.finished &= self.over
        self.over = True

    def attempt(self, progress: TrainerState, reported: dict[str, list[float]]) -> Attempt:
        """The episode as reward functions receive it."""
        prompt, completion = self.messages[: self.opening], self.messages[self.opening :]
        return Attempt(self.problem, self.episode, prompt, completion, list(self.tokens), progress, reported)

    def trajectory(self, version: int) -> Trajectory:
        """The training row: all tokens up to the model's last one."""
        assert self.score is not None
        reported = any(values is not None for values in self.sampler_logp)
        of_sampler = [p if q is None else q for p, q in zip(self.logp, self.sampler_logp, strict=True)]
        return Trajectory(
            self.problem,
            self.prompt,
            torch.tensor(self.tokens[: self.end], dtype=torch.long),
            torch.tensor(self.own[: self.end], dtype=torch.bool),
            self.score,
            "\n".join(self.replies),
            self.finished,
            logp=torch.cat(self.logp)[: self.end],
            entropy=torch.cat(self.entropy)[: self.end],
            messages=self.messages[self.opening :],
            episode=self.episode,
            sampler_logp=torch.cat(of_sampler)[: self.end] if reported else None,
            version=version,
        )
