"""What a task is: an endless, seeded stream of problems, and a verifier that scores any text offered as a response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from poise._lib.errors import check_choice, counted, short
from poise._lib.user_code import place_of
from poise.rewards.base import GOLD_COLUMNS, RewardError, TrainerState

Split = Literal["train", "test"]
SPLITS: tuple[str, ...] = get_args(Split)
LONGEST_GOLD = 4000  # characters: data for fine-tuning has whole solutions there
LONGEST_FEEDBACK = 2000  # characters of what a task of a user's own may say
NO_REWARD = "no reward applies to it"  # a reason to leave an attempt out that is nobody's fault
PATIENCE = 100  # draws in place of problems that are too long
LARGEST_REWARD = 1e30  # training computes in float32, which ends at 3e38: this leaves room for sums over a batch


@dataclass(frozen=True)
class Problem:
    """One question. ``data`` is all that the verifier needs, and survives a trip through JSON."""

    id: str
    prompt: str
    difficulty: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """The verifier's word on one response. ``reward`` is what training sees, ``correct`` what evaluation counts.

    ``answer`` is what the response says, in a form in which equal answers are equal texts, so that they can be counted;
    None where it cannot be read.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)  # what the reward is the sum of
    answer: str | None = None
    failed: str | None = None  # why there is no verdict, in words; the attempt then takes no part in training


Message = dict[str, str]  # {"role": …, "content": …}, as chat templates take them


class Episode(Protocol):
    """One attempt at one problem, in one turn or several.

    It may have ``feedback() -> str``, how it went in words: see ``feedback_on``.
    """

    def start(self) -> list[Message]:
        """What the model is shown first."""
        ...

    def step(self, reply: str) -> list[Message]:
        """What the environment says to a reply; an empty list ends the episode. ``reply`` is untrusted."""
        ...

    def score(self) -> Score:
        """The verdict on the episode: asked once, after it has ended or been cut off."""
        ...


@dataclass(frozen=True)
class Attempt:
    """An episode that has ended, as reward functions see it."""

    problem: Problem
    episode: Episode
    prompt: list[Message]  # what the model was shown first
    completion: list[Message]  # its replies, and what the environment said in between
    completion_ids: list[int]  # the tokens of the completion
    progress: TrainerState = field(default_factory=TrainerState)  # how far the run is
    reported: dict[str, list[float]] = field(default_factory=dict)  # gets what rewards report, by name


class Task(Protocol):
    """The least a task must offer. One with ``concurrent = True`` is asked for scores while sampling goes on.

    A task of several turns has ``episode(problem) -> Episode`` in place of ``score`` (with ``one_turn = True`` if the
    first reply always ends it). A task that scores many attempts in one call has ``score_all`` (see
    ``ScoresTogether``), and a task with an end has ``epoch`` (see ``Finite``).
    """

    @property
    def name(self) -> str:
        """The name it goes by in the table of tasks and in metrics."""
        ...

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Problems without end. The same split and seed give the same ones; no problem is in both splits."""
        ...

    def score(self, problem: Problem, text: str) -> Score:
        """Score a response. ``text`` is untrusted: any text gets a score, in time linear in its length."""
        ...


@runtime_checkable
class ScoresTogether(Protocol):
    """A task that scores all attempts that have ended in one call, because its reward functions take batches."""

    def score_all(self, attempts: Sequence[Attempt]) -> Sequence[Score]:
        """A score for each attempt, in their order."""
        ...


@runtime_checkable
class Finite(Protocol):
    """A task with a fixed set of problems."""

    def epoch(self, split: Split, seed: int, number: int) -> Sequence[Problem]:
        """All problems of a split in the order of one epoch. The same arguments give the same order."""
        ...


class TaskError(RuntimeError):
    """A task that does not do what ``Task`` asks of it."""


def draw(
    task: Task, split: Split, seed: int, count: int, fits: Callable[[Problem], bool] = lambda _: True
) -> list[Problem]:
    """The first ``count`` problems that fit the model, or an error that says what is wrong with them.

    A finite task may have fewer: then all it has. If hardly any fits, others are among them: playing these says why.
    """
    if isinstance(task, Finite):
        with _blamed(task, "epoch()"):
            drawn = list(task.epoch(split, seed, 0)[:count])
        if not drawn:
            why = _why_none_held_out(task, seed) if split == "test" else ""
            raise TaskError(f"task {task.name!r} has no problem of split {split}{why}")
        return _fitting(task, drawn, fits)
    found: list[Problem] = []
    others: list[Problem] = []
    with _blamed(task, "problems()"):
        stream = iter(task.problems(split, seed))
        for _ in range(PATIENCE):
            missing = count - len(found)
            drawn = list(islice(stream, missing))
            if len(drawn) < missing:
                raise TaskError(
                    f"task {task.name!r} has {len(found) + len(drawn)} problems of split {split}, and {count} are "
                    "asked for: problems must not end; begin again with the first, shuffled by the seed"
                )
            _check_texts(task, drawn)
            for problem in drawn:
                (found if fits(problem) else others).append(problem)
    return found if len(found) == count else [*others, *found][:count]


def _fitting(task: Task, problems: Sequence[Problem], fits: Callable[[Problem], bool]) -> list[Problem]:
    """Those of the problems that fit; all of them if none does."""
    _check_texts(task, problems)
    return [problem for problem in problems if fits(problem)] or list(problems)


def _why_none_held_out(task: Finite, seed: int) -> str:
    """The end of a message: a share of few questions, chosen by a hash, may be none."""
    held_out = getattr(task, "held_out", None)
    if not held_out:
        share = "" if held_out is None else "task.held_out=0.1, task.test_file=FILE or "
        return f"; set {share}evaluation=off"
    questions = len({problem.prompt for problem in task.epoch("train", seed, 0)})
    return (
        f": it has only {counted(questions, 'different question')}, and none fell into the held-out share; raise "
        f"task.held_out above {held_out:g}, give task.test_file=FILE, or set evaluation=off"
    )


def data_fingerprint(task: Task) -> str | None:
    """What tells the data of a task apart from others; None for a task without data."""
    found = getattr(task, "fingerprint", None)
    return found if isinstance(found, str) else None


def epochs(task: Task, seed: int, problems: int) -> float:
    """How many times so many training problems go through a finite set; 0 where problems have no end."""
    size = len(task.epoch("train", seed, 0)) if isinstance(task, Finite) else 0
    return problems / size if size else 0.0


def training_problems(
    task: Task, *, seed: int, step: int, step_seed: int, count: int, fits: Callable[[Problem], bool] = lambda _: True
) -> list[Problem]:
    """The problems of a training step that fit the model: fresh ones, or those of the next ``count`` of a finite set.

    ``seed`` is the run's, ``step_seed`` the step's own. The result depends on the arguments alone, so that a resumed
    run goes on in the middle of an epoch.
    """
    if not isinstance(task, Finite):
        return draw(task, "train", step_seed, count, fits)
    size = len(task.epoch("train", seed, 0))
    if not size:
        raise TaskError(f"task {task.name!r} has no problem of split train")
    places = [divmod(place, size) for place in range((step - 1) * count, step * count)]
    epochs = {number: task.epoch("train", seed, number) for number in {number for number, _ in places}}  # one call each
    return _fitting(task, [epochs[number][place] for number, place in places], fits)


def _check_texts(task: Task, problems: Sequence[Problem]) -> None:
    for problem in problems:
        texts = {name: getattr(problem, name, None) for name in ("prompt", "difficulty")}
        for name, text in texts.items():
            if not isinstance(text, str):
                what = f"{name} of problem {getattr(problem, 'id', problem)}"
                raise TaskError(f"task {task.name!r}: {what} must be text, got {short(text)}")


@dataclass
class SingleTurn:
    """The episode of a task that has only ``score``: the problem's prompt, one reply, and its score."""

    task: Task
    problem: Problem
    reply: str = ""

    def start(self) -> list[Message]:
        """The prompt, as the user's message."""
        return [{"role": "user", "content": self.problem.prompt}]

    def step(self, reply: str) -> list[Message]:
        """Any reply ends it."""
        self.reply = reply
        return []

    def score(self) -> Score:
        """The task's."""
        return self.task.score(self.problem, self.reply)

    def feedback(self) -> str:
        """What a task with ``feedback(problem, text)`` says of the reply, in words."""
        said = getattr(self.task, "feedback", None)
        return said(self.problem, self.reply) if said else ""  # ``feedback_on`` checks it


def begin(task: Task, problem: Problem) -> Episode:
    """An episode of the task."""
    with _blamed(task, "episode()"):
        episode: Episode = task.episode(problem) if hasattr(task, "episode") else SingleTurn(task, problem)
    return episode


def several_turns(task: Task) -> bool:
    """Whether the environment may answer a reply. A task with ``episode`` that never does has ``one_turn = True``."""
    return hasattr(task, "episode") and not getattr(task, "one_turn", False)


@contextmanager
def explained(task: Task, problem: Problem, what: str = "score()") -> Iterator[None]:
    """Errors of the task's own code become one that names the task, the problem, and the user's file and line."""
    try:
        yield
    except (RewardError, TaskError):  # says it all already
        raise
    except (Exception, SystemExit) as error:
        raised = f"raised {type(error).__name__}: {error}{place_of(error)}"
        raise RewardError(f"{what} of task {task.name!r} {raised} (problem {problem.id})") from _cause(error)


@contextmanager
def _blamed(task: Task, what: str) -> Iterator[None]:
    """Errors of the user's own code, where there is no problem yet, become one with file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, TaskError | RewardError) or not (place := place_of(error)):
            raise
        raise TaskError(f"{what} of task {task.name!r} raised {type(error).__name__}: {error}{place}") from _cause(
            error
        )


def _cause(error: BaseException) -> BaseException | None:
    """The error, unless it is a StopIteration: contextlib would raise that again in place of what it caused."""
    return None if isinstance(error, StopIteration) else error


def heard(task: Task, problem: Problem, said: Any) -> list[Message]:
    """What an episode says, as messages with texts that any tokenizer can read; nothing where it ends."""
    if not said:
        return []
    if not isinstance(said, list | tuple) or not all(_is_message(each) for each in said):
        raise RewardError(
            f"what an episode of task {task.name!r} says must be a list of messages, each a dict with the texts 'role' "
            f"and 'content', got {short(said)} (problem {problem.id})"
        )
    return [{**each, "content": readable(each["content"])} for each in said]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def readable(text: str) -> str:
    """The text with ? for each half of a surrogate pair, as names of files may hold: tokenizers refuse it."""
    return text.encode("utf-8", "replace").decode()


def judge(task: Task, problem: Problem, episode: Episode) -> Score:
    """``episode.score`` in plain Python numbers, with an error that says on which problem it went wrong."""
    with explained(task, problem):
        score = episode.score()
    return _checked(task, problem, score)


def judge_all(task: Any, attempts: Sequence[Attempt]) -> list[Score]:
    """``task.score_all`` with the checks of ``judge``."""
    with explained(task, attempts[0].problem, "score_all()"):
        scores = list(task.score_all(attempts))
    if len(scores) != len(attempts):
        raise RewardError(f"task {task.name!r} gave {len(scores)} scores for {len(attempts)} attempts")
    return [_checked(task, attempt.problem, score) for attempt, score in zip(attempts, scores, strict=True)]


def _checked(task: Task, problem: Problem, given: Any) -> Score:
    try:
        score = _plain(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"the score of task {task.name!r} (problem {problem.id}): {error}") from error
    if not abs(score.reward) <= LARGEST_REWARD:
        raise RewardError(
            f"the reward of task {task.name!r} is {score.reward} (problem {problem.id}): "
            f"rewards must be finite, and between {-LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
        )
    return score


def _plain(score: Any) -> Score:
    """The score with numbers of Python's own: verifiers compute with numpy and torch, whose numbers JSON lacks."""
    if not isinstance(score, Score):
        score = _score_of_verdict(score)
    if _number_or_none(score.correct) not in (0.0, 1.0):
        raise TypeError(f"correct must be True or False, got {short(score.correct)}")
    if not isinstance(score.parts, Mapping):
        raise TypeError(f"parts must be a dict of numbers, got {short(score.parts)}")
    if not _hashable(score.answer):
        raise TypeError(f"answer must be text or None, got {short(score.answer)}")
    if score.failed is not None and not isinstance(score.failed, str):
        raise TypeError(f"failed must say why in words, or be None, got {short(score.failed)}")
    parts = {str(name): _number(f"parts[{name!r}]", value) for name, value in score.parts.items()}
    correct = bool(score.correct) and score.failed is None
    return Score(_number("reward", score.reward), correct, parts, score.answer, score.failed)


def _hashable(value: Any) -> bool:
    """Whether it can be counted. A tuple may hold a list: only trying tells."""
    try:
        hash(value)
    except Exception:  # a user's own class may raise anything
        return False
    return True


def _score_of_verdict(value: Any) -> Score:
    """True or False, of Python, numpy or torch, as a score. A number would not tell what is right."""
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool"
    number = _number_or_none(value) if truth else None
    if number is None:
        raise TypeError(f"must be a poise.tasks.Score(reward, correct), True or False, got {short(value)}")
    return Score(number, bool(number))


def _number(name: str, value: Any) -> float:
    number = _number_or_none(value)
    if number is None:
        raise TypeError(f"{name} must be a number, got {short(value)}")
    return number


def _number_or_none(value: Any) -> float | None:
    """A number of Python's, numpy's or torch's as a float."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def check_split(split: str) -> None:
    """Raise unless ``split`` is one there is."""
    check_choice("problems", "split", split, SPLITS)


def gold_answer(task: Task, problem: Problem) -> str | None:
    """The right answer in words, for people, not for the model; None where there is none to show.

    A task may have ``gold(problem)``. For any other, it is the first text or number called answer, solution or
    ground_truth in the problem's data, or in the row of a file that the data hold.
    """
    if callable(own := getattr(task, "gold", None)):  # it may be a setting of the task, such as a column's name
        with explained(task, problem, "the gold answer"):
            found = own(problem)
    else:
        data: Any = problem.data
        places = [data, data.get("row")] if isinstance(data, Mapping) else []
        values = [place.get(key) for place in places if isinstance(place, Mapping) for key in GOLD_COLUMNS]
        found = next(filter(_is_plain, values), None)
    return readable(str(found).strip())[:LONGEST_GOLD] or None if _is_plain(found) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return bool(abs(value) < 10**LONGEST_GOLD)  # Python writes no longer one
    return isinstance(value, str | float)


def feedback_on(task: Task, problem: Problem, episode: Episode, score: Score, turns: int) -> str:
    """What the episode says of itself, or a plain sentence where it says nothing. ``turns``: replies that were made.

    ``episode.feedback`` is optional. It is called after the episode has been scored.
    """
    said = ""
    if hasattr(episode, "feedback"):
        with explained(task, problem, "the feedback"):
            said = episode.feedback()
        if not isinstance(said, str):
            raise RewardError(
                f"the feedback of task {task.name!r} must be text, got {short(said)} (problem {problem.id})"
            )
    return readable(said.strip()[:LONGEST_FEEDBACK]) or plain(score, turns)


def plain(score: Score, turns: int) -> str:
    """What can be said of any attempt."""
    how = "succeeded" if score.correct else "failed"
    return f"The attempt {how}: reward {score.reward:.2f} after {turns} turn{'' if turns == 1 else 's'}."
