"""RLTR (arXiv 2602.08489): reward reasoning that leads another model to the correct answer.

``R = the task's reward + transfer · [the receiver is right]``, normalised in its group as in GRPO. The prefix is the
first ``⌊τ·n⌋`` of a response's n reasoning tokens, with τ uniform in (low, high]. A frozen model, the receiver,
continues the prefix, and the task scores prefix and continuation together. docs/rltr.md has the details.

**Ours:** the values of all settings. ``n`` counts the tokens before the answer; the paper counts all tokens. A prefix
that contains the answer would only repeat the task's reward.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isclose
from typing import TYPE_CHECKING

import torch

from poise._lib.errors import check_range, check_whole, short
from poise.models.prompts import plain
from poise.sampling import GROUP
from poise.sampling.draws import streams, uniform
from poise.sampling.grpo import Grpo
from poise.sampling.remote import PATIENCE, TIMEOUT, Server, Vocabulary, is_address, whole_text
from poise.sampling.trajectories import Memory, Trajectory
from poise.tasks import Problem, Score, TaskError, several_turns
from poise.tasks.rewards.answers import final_answer

if TYPE_CHECKING:
    from poise.models.policy import Policy
    from poise.sampling.sampler import Sampler

MOST = 1000.0  # the largest weight; a larger one is probably a typo
QUARTERS = (0.25, 0.5, 0.75, 1.0)
MARKS = ("<answer>", "\\boxed", "####")  # each begins an answer
EDGES = r"\s*_`\"'${"  # characters that may stand between a mark and its answer
COMPARED = 200  # how many characters of an answer are compared
REMOTE = ("tokenizer", "timeout", "patience")  # settings of a receiver on a server
NO_SEQUENCE = -1  # the stream of the receiver's seed; no sequence uses this stream
ROUNDING = 1e-9  # 0.29 · 100 is 28.999999999999996 in floating point, but means 29


@dataclass(frozen=True)
class Rltr:
    """GRPO's ``group`` attempts, with an extra reward if the ``receiver`` continues a prefix to the correct answer.

    ``transfer`` weights this reward; ``answer`` weights the part "answer" of the task's reward. ``receiver`` is "start"
    (the weights that the run starts with), a model as in ``model=``, or the address of an OpenAI-compatible server,
    "http://HOST:PORT/v1". poise formats a server's prompts with the chat template of ``tokenizer`` (default: the
    policy's); a request may take ``timeout`` seconds, and a failing request is retried for ``patience`` seconds. The
    receiver continues each prefix ``continuations`` times. The prefix is a share of the reasoning between ``low`` and
    ``high``. ``marks`` are texts that mark the start of an answer.
    """

    group: int = GROUP
    transfer: float = 0.5
    answer: float = 1.0
    receiver: str = "start"
    continuations: int = 1
    low: float = 0.0
    high: float = 1.0
    marks: tuple[str, ...] = MARKS
    tokenizer: str | None = None
    timeout: float = TIMEOUT
    patience: float = PATIENCE

    def __post_init__(self) -> None:
        check_range("rltr", "transfer", self.transfer, 0.0, MOST)
        check_range("rltr", "answer", self.answer, 0.0, MOST)
        check_range("rltr", "low", self.low, 0.0, 1.0)
        check_range("rltr", "high", self.high, 0.0, 1.0)
        check_whole("rltr", "continuations", self.continuations, 1)
        if self.low > self.high or not self.high:
            raise ValueError(
                f"rltr: low = {self.low}, high = {self.high}: these are the smallest and the largest share of the "
                "reasoning that the receiver reads: low must not be above high, and high must be above 0"
            )
        if not isinstance(self.receiver, str) or not self.receiver:
            raise TypeError(f"rltr: receiver must be 'start' or a model's name in quotes, got {short(self.receiver)}")
        marks = [self.marks] if isinstance(self.marks, str) else self.marks
        if not isinstance(marks, list | tuple) or not all(isinstance(mark, str) and mark for mark in marks):
            raise TypeError(f"rltr: marks must be a list of texts, such as ['<answer>'], got {short(self.marks)}")
        object.__setattr__(self, "marks", tuple(marks))
        if self.servers:
            return
        unused = [
            each.name for each in fields(self) if each.name in REMOTE and getattr(self, each.name) != each.default
        ]
        if unused:
            raise ValueError(
                f"rltr: {' and '.join(unused)} applies only to a receiver on a server, receiver='http://…'"
            )

    @property
    def models(self) -> Mapping[str, str]:
        """The frozen models that the algorithm needs."""
        return {} if is_address(self.receiver) else {"receiver": self.receiver}

    @property
    def servers(self) -> Mapping[str, tuple[Server, str | None]]:
        """The servers that the algorithm needs, each with the name of its tokenizer."""
        if not is_address(self.receiver):
            return {}
        return {"receiver": (Server(self.receiver, self.timeout, self.patience), self.tokenizer)}

    def check(self, sampler: Sampler, note: Callable[[str], None]) -> None:
        """Raise TaskError for a task of several turns; log a note if prefixes are passed to the receiver as text."""
        if several_turns(sampler.task):
            raise TaskError(
                f"algorithm rltr cuts the reasoning of a single reply, but task {sampler.task.name!r} plays episodes "
                "of several turns, where a reply is a move, not an answer; use algorithm=grpo, or a task of one turn"
            )
        if not same_tokens(sampler.policy, sampler.others["receiver"].policy):
            note("the receiver's vocabulary differs from the policy's, so prefixes are passed as text")

    def collect(
        self, problems: Sequence[Problem], sampler: Sampler, seed: int, memory: Memory | None = None
    ) -> tuple[list[Trajectory], Memory | None]:
        """Return GRPO's attempts with the transfer reward added to their rewards and notes."""
        samples, memory = Grpo(self.group).collect(problems, sampler, seed, memory)
        with sampler.counts.timed("transfer"):
            receiver, own_seed = sampler.others["receiver"], int(streams(seed, torch.tensor(NO_SEQUENCE)))
            cuts = self._cuts(own_seed, len(samples))
            prefixes = [
                prefix(sample.tokens.tolist(), cut, self.marks, sampler.policy, receiver)
                for sample, cut in zip(samples, cuts, strict=True)
            ]
            shares = self._continue(samples, prefixes, receiver, own_seed)
        return [
            self._rewarded(sample, share, cut, len(begun))
            for sample, share, cut, begun in zip(samples, shares, cuts, prefixes, strict=True)
        ], memory

    def _cuts(self, seed: int, count: int) -> list[float]:
        """Draw the share τ in (low, high] for each response."""
        rows = torch.arange(count)
        points = uniform(seed, rows, torch.full_like(rows, -1))  # the receiver's tokens have positions from 0 on
        return [self.high - (self.high - self.low) * point for point in points.tolist()]

    def _continue(
        self, samples: Sequence[Trajectory], prefixes: Sequence[list[int]], receiver: Sampler, seed: int
    ) -> list[float | None]:
        """Return the share of correct continuations for each prefix; None if no continuation has a verdict.

        The receiver continues equal prefixes of a problem only once.
        """
        keys = [(s.problem.id, s.prompt, tuple(tokens)) for s, tokens in zip(samples, prefixes, strict=True)]
        problems = {
            key: sample.problem
            for key, sample in zip(keys, samples, strict=True)
            if key[-1] and sample.score.failed is None
        }
        if not problems:
            return [0.0] * len(samples)
        times = range(self.continuations)
        played = receiver.play(
            [problem for problem in problems.values() for _ in times],
            seed,
            begun=[key[-1] for key in problems for _ in times],
        )
        shares: dict[tuple[object, ...], float | None] = {}
        for number, key in enumerate(problems):
            scores = [sample.score for sample in played[number * len(times) : (number + 1) * len(times)]]
            judged = [score.correct for score in scores if score.failed is None]
            shares[key] = sum(judged) / len(judged) if judged else None
        return [shares.get(key, 0.0) for key in keys]

    def _rewarded(self, sample: Trajectory, share: float | None, cut: float, length: int) -> Trajectory:
        """Return the sample with the transfer reward added."""
        if sample.score.failed is not None:
            return sample
        notes = {**sample.notes, **({} if share is None else {"transfer": share}), "cut": cut, "prefix": length}
        return replace(sample, score=self._score(sample.score, share or 0.0), notes=notes)

    def _score(self, score: Score, share: float) -> Score:
        parts, reward = dict(score.parts), score.reward
        if self.answer != 1:
            if "answer" not in parts or not isclose(sum(parts.values()), reward, rel_tol=1e-6, abs_tol=1e-6):
                raise TaskError(
                    f"rltr: answer = {self.answer} is the weight of the reward's part 'answer', but this task's reward "
                    f"of {reward:g} is not a sum with such a part (its parts: {parts}): remove answer, and change "
                    "transfer or task.reward_weights instead"
                )
            reward += (self.answer - 1) * parts["answer"]
            parts["answer"] *= self.answer
        parts["transfer"] = self.transfer * share
        return replace(score, reward=reward + parts["transfer"], parts=parts)

    def metrics(self, samples: Sequence[Trajectory]) -> dict[str, float]:
        """Return ``transfer/mean`` over all responses (0 without a prefix), and other means over those with a prefix.

        If no continuation of a response has a verdict, the response counts in ``transfer/failed``, not in the means.
        """
        tried = [sample for sample in samples if "cut" in sample.notes]
        noted = [sample for sample in tried if "transfer" in sample.notes]
        cut = [sample for sample in noted if sample.notes["prefix"]]
        groups = {
            "mean": noted,
            "after_right": [sample for sample in cut if sample.score.correct],
            "after_wrong": [sample for sample in cut if not sample.score.correct],
            **{f"cut/{q:g}": [s for s in cut if q - 0.25 < s.notes["cut"] <= q] for q in QUARTERS},
        }
        means = {
            f"transfer/{name}": sum(sample.notes["transfer"] for sample in rows) / len(rows)
            for name, rows in groups.items()
            if rows
        }
        failed = {"transfer/failed": float(len(tried) - len(noted))} if len(noted) < len(tried) else {}
        uncut = {"transfer/uncut": (len(noted) - len(cut)) / len(tried)} if tried else {}
        return {**means, **uncut, **failed}


def prefix(tokens: Sequence[int], share: float, marks: Sequence[str], policy: Policy, receiver: Sampler) -> list[int]:
    """Return the first ``share`` of the reasoning in a response, as tokens for the receiver; empty without reasoning.

    If the vocabularies differ, the text is tokenized again. The prefix stops before any token that would end the
    receiver's reply or that the receiver's vocabulary lacks, and leaves room for at least one token.
    """
    prefix_tokens = first_tokens(policy, tokens, share, marks)
    if prefix_tokens and not same_tokens(policy, receiver.policy):
        prefix_tokens = plain(receiver.policy.tokenizer, whole_text(policy, prefix_tokens))
    ends, size = set(receiver.policy.end_tokens), receiver.policy.head().vocabulary
    readable = next((i for i, token in enumerate(prefix_tokens) if token in ends or token >= size), len(prefix_tokens))
    return prefix_tokens[: min(readable, receiver.max_tokens - 1)]


def first_tokens(policy: Vocabulary, tokens: Sequence[int], share: float, marks: Sequence[str]) -> list[int]:
    """Return the first ``share`` of the reasoning tokens, rounded down."""
    return list(tokens[: int(share * reasoning_tokens(policy, tokens, marks) + ROUNDING)])


def same_tokens(policy: Policy, receiver: Policy) -> bool:
    """Whether both models have the same tokens with the same ids."""
    return policy.vocabulary_hash == receiver.vocabulary_hash


def reasoning_tokens(policy: Vocabulary, tokens: Sequence[int], marks: Sequence[str] = MARKS) -> int:
    """Count the tokens before the answer in a response; without an answer, count all tokens except the end token."""
    count = len(tokens) - (len(tokens) > 0 and tokens[-1] in policy.end_tokens)
    text = policy.decode(tokens)
    place = answer_place(text, marks)
    if place is None:
        return count
    # Count the tokens that end before the mark; a token that contains a part of the mark belongs to the answer.
    return bisect_right(range(count + 1), place, key=lambda n: len(policy.decode(tokens[:n]))) - 1


def answer_place(text: str, marks: Sequence[str]) -> int | None:
    """Find the first mark that directly precedes the answer, and return its position; None without a mark.

    A reply may mention a mark before the answer ("I shall write it in ``\\boxed``") or use a mark for something else
    (``#### Step 1``). If no mark directly precedes the answer, the last mark counts.
    """
    answer, last = (final_answer(text) or "")[:COMPARED], None
    one = "|".join(map(re.escape, marks)) or "(?!)"
    for mark in re.finditer(f"(?:(?:{one})[{EDGES}]*)+", text):  # <answer>\boxed{7} has two
        if answer and text.startswith(answer, mark.end()):
            return mark.start()
        last = mark.start()
    return last
