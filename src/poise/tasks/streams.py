"""Streams of problems: select the problems of a training step or an evaluation, and assign problems to splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from typing import TypeVar

from poise._lib.errors import check_choice, counted, short
from poise._lib.user_code import place_of
from poise.tasks.base import SPLITS, Finite, Problem, Split, Task, TaskError
from poise.tasks.rewards.base import RewardError

TEST_SHARE = 10  # 1/TEST_SHARE of all meanings (see split_of) is in the test split
PATIENCE = 20_000  # consecutive unsuitable draws before an error
ROUNDS = 100  # rounds of draws that replace problems that are too long

T = TypeVar("T")


def draw(
    task: Task, split: Split, seed: int, count: int, fits: Callable[[Problem], bool] = lambda _: True
) -> list[Problem]:
    """Return the first ``count`` problems that fit the model.

    If a finite task has fewer problems, return all of them. If hardly any problem fits, the list also contains problems
    that do not fit; starting one of their episodes raises an error with the reason. Raise a ``TaskError`` if an endless
    task ends, a finite task has no problem, or a problem's prompt or difficulty is not text.
    """
    if isinstance(task, Finite):
        with _blamed(task, "epoch()"):
            problems = list(task.epoch(split, seed, 0)[:count])
        if not problems:
            notes = "".join(f"; {note}" for note in getattr(task, "notes", []))  # a note may give the reason
            why = _why_none_held_out(task, seed) if split == "test" else notes
            raise TaskError(f"task {task.name!r} has no problem in split {split}{why}")
        return _fitting(task, problems, fits)
    fitting: list[Problem] = []
    others: list[Problem] = []
    with _blamed(task, "problems()"):
        stream = iter(task.problems(split, seed))
        for _ in range(ROUNDS):
            missing = count - len(fitting)
            problems = list(islice(stream, missing))
            if len(problems) < missing:
                raise TaskError(
                    f"task {task.name!r} has {len(fitting) + len(problems)} problems of split {split}, but {count} are "
                    "needed: problems() must not end; start over from the first problem, shuffled by the seed"
                )
            _check_texts(task, problems)
            for problem in problems:
                (fitting if fits(problem) else others).append(problem)
    return fitting if len(fitting) == count else [*others, *fitting][:count]


def _fitting(task: Task, problems: Sequence[Problem], fits: Callable[[Problem], bool]) -> list[Problem]:
    """Return the problems that fit the model, or all problems if none fits."""
    _check_texts(task, problems)
    return [problem for problem in problems if fits(problem)] or list(problems)


def _why_none_held_out(task: Finite, seed: int) -> str:
    """Explain, for an error message, why no problem is held out: a hash may select none of a few questions."""
    held_out = getattr(task, "held_out", None)
    if held_out is None:
        return "; set evaluation=off"
    questions = len({problem.prompt for problem in task.epoch("train", seed, 0)})
    few = f": a hash chose none of its {counted(questions, 'different question')}" if held_out else ""
    return f"{few}; set task.held_out above {held_out:g}, task.test_file=FILE, or evaluation=off"


def data_fingerprint(task: Task) -> str | None:
    """Return the fingerprint of a task's data, or None for a task without data."""
    fingerprint = getattr(task, "fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else None


def epochs(task: Task, seed: int, problems: int) -> float:
    """Convert a number of training problems to epochs of a finite task; 0 for an endless task."""
    size = len(task.epoch("train", seed, 0)) if isinstance(task, Finite) else 0
    return problems / size if size else 0.0


def training_problems(
    task: Task, *, seed: int, step: int, step_seed: int, count: int, fits: Callable[[Problem], bool] = lambda _: True
) -> list[Problem]:
    """Return the problems of a training step that fit the model.

    An endless task draws new random problems; a finite task uses its next ``count`` problems. ``seed`` is the run's
    seed, ``step_seed`` the step's seed. The result depends only on the arguments, so a resumed run can continue in the
    middle of an epoch.
    """
    if not isinstance(task, Finite):
        return draw(task, "train", step_seed, count, fits)
    size = len(task.epoch("train", seed, 0))
    if not size:
        raise TaskError(f"task {task.name!r} has no problem in split train")
    positions = [divmod(problem, size) for problem in range((step - 1) * count, step * count)]  # epoch, index
    epochs = {epoch: task.epoch("train", seed, epoch) for epoch in {epoch for epoch, _ in positions}}  # one call each
    return _fitting(task, [epochs[epoch][index] for epoch, index in positions], fits)


def _check_texts(task: Task, problems: Sequence[Problem]) -> None:
    for problem in problems:
        texts = {name: getattr(problem, name, None) for name in ("prompt", "difficulty")}
        for name, text in texts.items():
            if not isinstance(text, str):
                what = f"{name} of problem {getattr(problem, 'id', problem)}"
                raise TaskError(f"task {task.name!r}: {what} must be text, got {short(text)}")


@contextmanager
def _blamed(task: Task, what: str) -> Iterator[None]:
    """Turn an error in the user's code into a ``TaskError`` with the file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, TaskError | RewardError) or not (place := place_of(error)):
            raise
        cause = None if isinstance(error, StopIteration) else error  # contextlib would re-raise it instead
        raise TaskError(f"{what} of task {task.name!r} raised {type(error).__name__}: {error}{place}") from cause


# Splits


def check_split(split: str) -> None:
    """Raise an error unless ``split`` is ``train`` or ``test``."""
    check_choice("problems", "split", split, SPLITS)


def split_of(meaning: str, share: int = TEST_SHARE) -> Split:
    """Assign a problem to a split by a hash of its meaning. Problems with equal meanings get the same split."""
    digest = sha256(meaning.encode(errors="surrogatepass")).digest()
    return "test" if int.from_bytes(digest[:8], "big") % share == 0 else "train"


def draw_of_split(
    owner: str,
    split: Split,
    draw: Callable[[], tuple[str, T]],
    suits: Callable[[T], bool] = lambda _: True,
    share: int = TEST_SHARE,
) -> T:
    """Draw (meaning, candidate) until the meaning belongs to ``split`` and the candidate ``suits``.

    ``suits`` is called last, because it may be slow.
    """
    for _ in range(PATIENCE):
        meaning, candidate = draw()
        if split_of(meaning, share) == split and suits(candidate):
            return candidate
    raise TaskError(
        f"{owner}: no {split} problem among {PATIENCE} draws: these settings allow too few different problems; "
        "widen the settings, or choose another task"
    )
