"""ERL (arXiv 2602.13949): reflect on a failed attempt, try again, and learn to succeed without the reflection.

    attempt y¹ ~ π(·|x) ─ wrong ─▶ feedback f ─▶ reflection Δ ~ π(·|x, y¹, f) ─▶ second attempt y² ~ π(·|x, Δ)
                                                                                     │
                                        consolidation: y² as an attempt at x alone ◀─┘

The policy reads its failed attempt and the environment's feedback, and writes a system prompt for the second attempt
between ``<prompt>`` tags. Rewards are normalised within (problem, role) groups; the roles are first attempt, reflection
and second attempt. A reflection gets the score of the second attempt. A consolidated row has the prompt of the first
attempt and the tokens of the second; its advantage is 1 if the second attempt was right, else 0. So the policy learns
to succeed without a reflection.

As in the authors' code: only failed attempts are retried; the groups; the score of a reflection; the second attempt
starts like the first if the reflection cannot be read; failed second attempts are consolidated too (with advantage 0
they count in the denominator and in the KL term); ``A = r`` for a row that is alone in its group. **Ours:** for the
retry, the lone row and the consolidated row, r is ``Score.correct``, whatever the task's reward is; the texts of all
prompts; of several pairs of tags, the last one counts; texts that exceed the model's context are shortened or dropped;
an attempt without a verdict is not retried.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from string import Formatter
from typing import TYPE_CHECKING

from poise._lib.errors import check_choice, check_range, check_whole, short, unknown
from poise.models.location import ModelError
from poise.models.prompts import Tools, plain, tools_of, with_system
from poise.sampling import GROUP
from poise.sampling.draws import derived_seed
from poise.sampling.grpo import Grpo
from poise.sampling.trajectories import CONSOLIDATED, FIRST, Memory, Trajectory
from poise.tasks import Message, Problem, Score, Split, Task, feedback_on

if TYPE_CHECKING:
    from poise.sampling.sampler import Sampler

ASK = (
    "You tried a task and failed. Find out why, and write advice for the next attempt.\n\n"
    "The task:\n{task}\n\nYour attempt:\n{attempt}\n\nThe result:\n{feedback}\n\n{memory}"
    "Say in one or two sentences what went wrong. Then write a short system prompt for the next attempt at this task, "
    "between <prompt> and </prompt>: how the task works, and what to do differently."
)
RECALL = "Advice that led to success before:\n{advice}\n\n"
CUT_OFF = "The attempt was cut off at the length limit."
GAP = "\n[… left out …]\n"
SPEAKERS = {"assistant": "You", "system": "System", "user": "User"}  # other roles: Environment
LONE = ("success", "drop")


@dataclass(frozen=True)
class Erl:
    """``group`` attempts at each problem; the policy reflects on failed ones and tries again.

    ``reflection=false`` equals GRPO bit for bit. ``consolidation`` adds the second attempts as answers to the plain
    prompt. ``memory`` adds the last advice that led to success to each question. ``lone`` applies to a reflection or
    second attempt that is alone in its group: "success" sets its advantage to 1 or 0, "drop" removes the row.
    ``reflection_tokens`` is the maximum length of a reflection; ``temperature`` and ``top_p`` apply to reflections
    (None: as in the run). ``ask`` is the question, with the fields {task}, {attempt}, {feedback} and {memory};
    ``recall`` is the text of {memory}, with the field {advice}. ``begin`` is the text that starts every reflection:
    use "<prompt>" for a small model that forgets the tags; the end of the reply then closes the tag.
    """

    group: int = GROUP
    reflection: bool = True
    consolidation: bool = True
    memory: bool = False
    lone: str = "success"
    reflection_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    ask: str = ASK
    recall: str = RECALL
    begin: str = ""

    def __post_init__(self) -> None:
        for name in ("reflection", "consolidation", "memory"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"erl: {name} must be true or false, got {short(getattr(self, name))}")
        check_choice("erl", "lone", self.lone, LONE)
        check_whole("erl", "reflection_tokens", self.reflection_tokens, 1)
        if self.temperature is not None:
            check_range("erl", "temperature", self.temperature, 0.0)
        if self.top_p is not None:
            check_range("erl", "top_p", self.top_p, 1e-6, 1.0)
        check_text("ask", self.ask, ("task", "attempt", "feedback", "memory"))
        check_text("recall", self.recall, ("advice",))
        if not isinstance(self.begin, str):
            raise TypeError(f"erl: begin must be text, got {short(self.begin)}")

    def collect(
        self, problems: Sequence[Problem], sampler: Sampler, seed: int, memory: Memory | None = None
    ) -> tuple[list[Trajectory], Memory | None]:
        """Return the first attempts, group after group; then reflections, second attempts and consolidated rows."""
        if not self.reflection:
            return Grpo(self.group).collect(problems, sampler, seed, memory)
        openings: dict[int, list[Message]] = {}

        def opening(row: int, messages: list[Message]) -> list[Message]:
            openings[row] = messages
            return messages

        attempts = [problem for problem in problems for _ in range(self.group)]
        first = sampler.play(attempts, seed, opening=opening)
        first = [replace(sample, group=row // self.group) for row, sample in enumerate(first)]
        remembered = (memory or {}).get("advice") if self.memory else None
        retries = self._retries(sampler, first, openings, remembered, seed)
        for row, sample in enumerate(first):
            if _failed(sample):
                first[row] = replace(sample, notes=retries[row].notes if row in retries else {"unasked": 1.0})
        helped = [retry.advice for retry in retries.values() if retry.opening and retry.second.score.correct]
        if self.memory and helped:
            memory = {"advice": helped[-1]}
        return [*first, *self._rows([*retries.values()], sampler.policy.longest)], memory

    def _retries(
        self,
        sampler: Sampler,
        first: Sequence[Trajectory],
        openings: Mapping[int, list[Message]],
        remembered: str | None,
        seed: int,
    ) -> dict[int, Retry]:
        """Reflect on the failed attempts and retry them. Returns the retries by row of the first attempt."""
        asking = self._asking(sampler)
        questions: dict[int, Problem] = {}
        for row, sample in enumerate(first):
            if _failed(sample) and (text := self._question(sampler, asking, sample, openings[row], remembered)):
                questions[row] = replace(sample.problem, prompt=text)
        begun = [self._prefix(sampler)] * len(questions)
        reflections = asking.play([*questions.values()], derived_seed(seed, "reflection"), begun=begun)
        if asking.sampling.temperature != sampler.sampling.temperature:  # the trainer must score them
            reflections = [sample.unscored() for sample in reflections]
        # The end of the reply closes the tag in ``begin``, unless the reply was cut off.
        advice = [read_advice(s.text + "</prompt>" * bool(self.begin and s.finished)) for s in reflections]
        retried = [first[row] for row in questions]
        shown: dict[int, list[Message]] = {}  # openings with advice, if it can be read and fits

        def opening(i: int, messages: list[Message]) -> list[Message]:
            if (text := advice[i]) is not None:
                advised = with_system(sampler.policy.tokenizer, messages, text)
                if fits(sampler, advised, tools_of(retried[i].episode)):
                    shown[i] = advised
            return shown.get(i, messages)

        again = replace(sampler, max_prompt=None)
        second = again.play([sample.problem for sample in retried], derived_seed(seed, "second"), opening=opening)
        parts = zip(retried, reflections, advice, second, strict=True)
        return {
            row: Retry(row % self.group + 1, *part, shown.get(i))
            for i, (row, part) in enumerate(zip(questions, parts, strict=True))
        }

    def _prefix(self, sampler: Sampler) -> list[int]:
        """The tokens of ``begin``, which start every reflection."""
        tokens = plain(sampler.policy.tokenizer, self.begin) if self.begin else []
        if len(tokens) >= self.reflection_tokens:
            raise ModelError(
                f"erl: begin has {len(tokens)} tokens, which count towards "
                f"reflection_tokens={self.reflection_tokens}: raise reflection_tokens, or shorten begin"
            )
        return tokens

    def _asking(self, sampler: Sampler) -> Sampler:
        """Return a sampler for reflections."""
        sampling = sampler.sampling
        if self.temperature is not None:
            sampling = replace(sampling, temperature=self.temperature)
        if self.top_p is not None:
            sampling = replace(sampling, top_p=self.top_p)
        return replace(
            sampler,
            task=Reflecting(),
            prefill="",
            sampling=sampling,
            max_tokens=self.reflection_tokens,
            max_prompt=None,
            max_episode=None,
        )

    def _question(
        self, sampler: Sampler, asking: Sampler, sample: Trajectory, opening: Sequence[Message], remembered: str | None
    ) -> str | None:
        """Return the question about a failed attempt, shortened to fit into the context; None if it never fits."""
        task, feedback = task_of(opening), result_of(sampler.task, sample)

        def fitting(memory: str) -> str | None:
            return shorten(
                attempt_of(sample),
                lambda attempt: self.ask.format(task=task, attempt=attempt, feedback=feedback, memory=memory),
                lambda text: fits(asking, [{"role": "user", "content": text}]),
            )

        recalled = fitting(self.recall.format(advice=remembered)) if remembered else None
        return recalled or fitting("")

    def _rows(self, retries: Sequence[Retry], most: int) -> Iterator[Trajectory]:
        """Yield the training rows of the retries.

        A retry without a verdict yields only its second attempt, so that the trainer counts the failure.
        """
        judged = [retry for retry in retries if retry.second.score.failed is None]
        size = Counter(retry.first.group for retry in judged)
        for role in ("reflection", "second"):
            for retry in judged:
                if size[retry.first.group] > 1:
                    yield replace(retry.row(role), group=(retry.first.group, role))
                elif self.lone == "success":
                    yield replace(retry.row(role), advantage=float(retry.second.score.correct))
        yield from (retry.row("second") for retry in retries if retry.second.score.failed is not None)
        if self.consolidation:
            rows = (retry.consolidated() for retry in judged)
            yield from (row for row in rows if len(row.prompt.tokens) + len(row.tokens) <= most)

    def metrics(self, samples: Sequence[Trajectory]) -> dict[str, float]:
        """Return the metrics ``first/…``, ``reflection/…``, ``second/…`` and ``consolidated/…`` (docs/erl.md)."""
        first = [sample for sample in samples if sample.role == FIRST]
        retried = [sample for sample in first if "readable" in sample.notes]
        judged = [sample for sample in retried if "second" in sample.notes]
        if not first:  # ``drop_failed`` has removed all first attempts
            return {}
        metrics = {"first/success": fmean(sample.score.correct for sample in first)}
        if self.reflection:
            metrics["second/retried"] = len(retried) / len(first)
            metrics["reflection/unasked"] = float(sum("unasked" in sample.notes for sample in first))
            metrics["consolidated/rows"] = float(sum(sample.role == CONSOLIDATED for sample in samples))
            metrics["second/lone"] = float([*Counter(sample.group for sample in judged).values()].count(1))
        for name in ("readable", "shown", "length") if retried else ():
            metrics[f"reflection/{name}"] = fmean(sample.notes[name] for sample in retried)
        if judged:
            metrics["second/success"] = fmean(sample.notes["second"] for sample in judged)
        return metrics


@dataclass(frozen=True, eq=False)
class Retry:
    """A failed attempt, the reflection on it, and the second attempt at its problem.

    ``number`` is the attempt's number in its group, from 1, which every row of the retry records. ``advice`` is None if
    the reflection cannot be read. ``opening`` is None if the second attempt starts like the first.
    """

    number: int
    first: Trajectory
    reflection: Trajectory
    advice: str | None
    second: Trajectory
    opening: list[Message] | None

    @property
    def notes(self) -> dict[str, float]:
        """The retry's statistics, which are recorded with the first attempt."""
        notes = {
            "attempt": float(self.number),
            "readable": float(self.advice is not None),
            "shown": float(self.opening is not None),
            "length": float(self.reflection.own.sum()),
        }
        score = self.second.score
        return notes if score.failed is not None else notes | {"second": float(score.correct)}

    def row(self, role: str) -> Trajectory:
        """Return the reflection with the second attempt's score, or the second attempt with its own prompt."""
        notes = {"attempt": float(self.number)}
        if role == "reflection":
            return replace(self.reflection, role=role, score=self.second.score, notes=notes)
        prompt = task_of(self.opening) if self.opening else self.second.problem.prompt
        return replace(self.second, role=role, problem=replace(self.second.problem, prompt=prompt), notes=notes)

    def consolidated(self) -> Trajectory:
        """Return the second attempt as a response to the first attempt's prompt."""
        advantage, notes = float(self.second.score.correct), {"attempt": float(self.number)}
        row = replace(self.second, role=CONSOLIDATED, prompt=self.first.prompt, advantage=advantage, notes=notes)
        return row.unscored()


def _failed(sample: Trajectory) -> bool:
    """Whether an attempt is wrong; False if the attempt has no verdict."""
    return not sample.score.correct and sample.score.failed is None


# Texts: the question that asks for a reflection, and the advice in the reply


def check_text(name: str, text: str, fields: Sequence[str]) -> None:
    """Raise an error if a setting is not text, or if a field in curly brackets is unknown or has a format."""
    if not isinstance(text, str):
        raise TypeError(f"erl: {name} must be text, got {short(text)}")
    try:
        places = [(field, spec, how) for _, field, spec, how in Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise ValueError(f"erl: {name} cannot be read: {error}; write {{{{ and }}}} for curly brackets") from None
    for field, spec, how in places:
        if field not in fields:
            raise ValueError(f"erl: {name}: " + unknown("field", field, fields))
        if spec or how:
            raise ValueError(f"erl: {name}: write {{{field}}} without a format or conversion")


def read_advice(text: str) -> str | None:
    """Return the text in the last ``<prompt>…</prompt>`` pair without a tag inside; None if there is no such text."""
    parts = re.split(r"(?i)(</?prompt>)", text)  # text and tags alternate
    for at in range(len(parts) - 2, 1, -2):
        if parts[at].startswith("</") and not parts[at - 2].startswith("</"):
            return parts[at - 1].strip() or None
    return None


def result_of(task: Task, sample: Trajectory) -> str:
    """Return the environment's feedback on an attempt, with a note if the attempt was cut off."""
    assert sample.episode is not None
    turns = sum(message["role"] == "assistant" for message in sample.messages)
    text = feedback_on(task, sample.problem, sample.episode, sample.score, turns)
    return text if sample.finished else f"{text} {CUT_OFF}"


def task_of(opening: Sequence[Message]) -> str:
    """Return the first messages of an episode as one text."""
    return opening[0]["content"] if len(opening) == 1 else _dialogue(opening, SPEAKERS)


def attempt_of(sample: Trajectory) -> str:
    """Return the attempt as one text: the model's replies and the environment's messages, each with its speaker."""
    if len(sample.messages) <= 1:
        return sample.text
    return _dialogue(sample.messages, {"assistant": "You"})


def _dialogue(messages: Sequence[Message], speakers: dict[str, str]) -> str:
    return "\n".join(f"{speakers.get(message['role'], 'Environment')}: {message['content']}" for message in messages)


def shorten(text: str, build: Callable[[str], str], fits: Callable[[str], bool]) -> str | None:
    """Return ``build(text)``, with the middle of ``text`` cut until the result fits; None if it never fits."""
    keep, built = len(text), build(text)
    while not fits(built):
        if not keep:
            return None
        keep = keep * 2 // 3
        end = keep // 2
        built = build(text[: keep - end] + GAP + text[len(text) - end :])
    return built


def fits(sampler: Sampler, messages: Sequence[Message], tools: Tools = ()) -> bool:
    """Whether these messages and a reply of ``sampler.max_tokens`` tokens fit into the model's context."""
    try:
        size = len(sampler.policy.encode(messages, tools))
    except Exception:  # a control token cannot be encoded as text; a chat template may raise anything
        return False
    return size + sampler.max_tokens <= sampler.policy.longest


@dataclass(frozen=True)
class Reflecting:
    """Reflection as a task: a problem's prompt is the question, and the second attempt decides the score."""

    name: str = "reflection"

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:  # noqa: ARG002 (the task has no problems)
        """Return no problems: the questions come from failed attempts."""
        return iter(())

    def score(self, problem: Problem, text: str) -> Score:  # noqa: ARG002
        """Return a score of 0; the second attempt's score replaces it later."""
        return Score(0.0, correct=False)
