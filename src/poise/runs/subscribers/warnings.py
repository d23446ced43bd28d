"""The table of warnings about runs that learn nothing. Each warning is shown once and stored in ``warnings.json``.

A condition reads the metrics of all steps so far. Conditions wait for several steps with many groups, because a single
step proves nothing. docs/warnings.md explains the warnings, and states how often they were wrong on recorded runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import ceil, inf, isfinite, sqrt
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Strict, TypeAdapter, ValidationError

from poise.runs.folder import DamagedError, RunFolder
from poise.training.config.schema import Config

if TYPE_CHECKING:  # these import transformers, which a report does not need
    from poise.training.steps import State, StepResult

FILE = "warnings.json"
STEPS, GROUPS = 5, 40  # a condition waits for at least this many steps and groups
NO_SPREAD = 0.95  # if this share of the responses has advantage 0, the run learns nothing


@dataclass(frozen=True)
class RunWarning:
    """A warning that was shown: its name, such as ``no-spread``, its step, what is wrong and what to do."""

    name: str
    step: Annotated[int, Strict()]  # 0: before the first step
    what: str
    remedy: str

    def __str__(self) -> str:
        when = f" after step {self.step}" if self.step else ""
        return f"warning{when}: {self.what}\n  {self.remedy}"


def read(folder: RunFolder) -> list[RunWarning]:
    """Read the warnings of a run, oldest first."""
    return parse(folder.read_json(FILE), str(folder.path / FILE))


def save(folder: RunFolder, warnings: Sequence[RunWarning]) -> None:
    """Write the warnings of a run."""
    folder.write_json(FILE, [asdict(each) for each in warnings])


def parse(data: Any, path: str) -> list[RunWarning]:
    """Parse the contents of a warnings file; empty if ``data`` is None. Messages name the file as ``path``."""
    try:
        return TypeAdapter(list[RunWarning]).validate_python([] if data is None else data)
    except ValidationError:
        raise DamagedError(f"{path} does not contain warnings as poise writes them: remove the file") from None


@dataclass(frozen=True)
class Progress:
    """The input of a condition: the settings, and the metrics of every step so far."""

    config: Config
    lines: Sequence[Mapping[str, float | None]] = ()

    @property
    def few(self) -> int:
        """The number of steps that a condition reads."""
        return max(STEPS, ceil(GROUPS / self.config.prompts))

    def first(self, name: str, steps: int) -> list[float]:
        """A metric's values in the first steps; empty if there are fewer steps, or one lacks the metric."""
        return _numbers(self.lines[:steps], name, steps)

    def last(self, name: str) -> list[float]:
        """A metric's values in the last few steps; empty if there are fewer steps, or one lacks the metric."""
        return _numbers(self.lines[-self.few :], name, self.few)

    def within(self, name: str, low: float, high: float) -> bool:
        """Whether the metric's mean over the last few steps is known and lies between ``low`` and ``high``."""
        values = self.last(name)
        return bool(values) and low <= _mean(values) <= high

    @property
    def no_spread(self) -> bool:
        """Whether nearly all groups had equal rewards in the last few steps."""
        return self.within("reward/no_spread", NO_SPREAD, 1)

    def best(self) -> tuple[float, int]:
        """The best mean training accuracy over a few consecutive steps, and the last of these steps."""
        n, values = self.few, _numbers(self.lines, "reward/accuracy", len(self.lines))
        sums = list(accumulate(values, initial=0.0))
        return max((((sums[i] - sums[i - n]) / n, i) for i in range(n, len(sums))), default=(0.0, 0))


@dataclass(frozen=True)
class Entry:
    """A row of the table: the warning's name, its condition, and the texts about what is wrong and what to do.

    ``covers`` names warnings with the same cause; these are not shown after this warning.
    """

    name: str
    holds: Callable[[Progress], bool]
    what: Callable[[Progress], str]
    remedy: Callable[[Progress], str]
    covers: tuple[str, ...] = ()


def _all_wrong(run: Progress) -> bool:
    steps = run.few if run.no_spread else 3 * run.few  # the model may first learn other parts of the reward
    right = run.first("reward/accuracy", steps)
    return bool(right) and max(right) == 0


def _no_spread(run: Progress) -> bool:
    first = run.first("reward/accuracy", run.few)
    easy = bool(first) and min(first) >= 0.99  # if all responses become right later, the run has learned
    return run.no_spread and (easy or run.within("reward/accuracy", 0, 0.95))


def _no_steps(run: Progress) -> bool:
    return not run.no_spread and run.within("optim/steps", 0, 0)


def _entropy_collapsed(run: Progress) -> bool:
    first, last = run.first("rollout/entropy", run.few), run.last("rollout/entropy")
    fell = bool(first) and bool(last) and _mean(last) < 0.1 * _mean(first)
    return fell and run.within("reward/no_spread", 0.5, 1) and run.within("reward/accuracy", 0, 0.9)


def _held_unmoved(run: Progress) -> bool:
    return run.within("optim/held_unmoved", 0.01, 1)


def _mismatch(run: Progress) -> bool:
    return run.within("rollout/mismatch", run.config.objective.clip_high, inf)


def _accuracy_fell(run: Progress) -> bool:
    """Whether accuracy fell below 2/3 of its best, by more than chance: four standard errors of a share of one half."""
    right, (best, _) = run.last("reward/accuracy"), run.best()
    if not right:
        return False
    now, problems = _mean(right), run.few * run.config.prompts
    return now < best * 2 / 3 and best - now > 4 * sqrt(2 * 0.25 / problems)


def _fell_apart(run: Progress) -> bool:
    ended, right = (run.first(name, 1) for name in ("rollout/finished", "reward/accuracy"))
    return bool(ended and right) and ended[0] > 0.5 and right[0] > 0.1 and _cut_off(run)


def _cut_off(run: Progress) -> bool:
    return run.within("rollout/finished", 0, 0.1) and run.within("reward/accuracy", 0, 0.05)


def _smaller_steps(run: Progress) -> str:
    lr = run.config.optim.lr
    return (
        f"The steps are too large: begin again with a smaller optim.lr ({lr / 4:.2g} instead of {lr:.2g}). If that "
        "does not help, keep the model close to its start with objective.kl_coef=0.01."
    )


TABLE = (
    Entry(
        "fell-apart",
        _fell_apart,
        lambda run: f"The model has fallen apart: in step 1 {run.first('rollout/finished', 1)[0]:.0%} of the responses "
        f"ended, and accuracy was {run.first('reward/accuracy', 1)[0]:.2f}; in the last {run.few} steps hardly any "
        "response ended or was right.",
        _smaller_steps,
        ("accuracy-fell", "no-spread", "entropy", "cut-off", "all-wrong"),
    ),
    Entry(
        "cut-off",
        _cut_off,
        lambda run: f"{1 - _mean(run.last('rollout/finished')):.0%} of recent responses were cut off at "
        f"rollout.max_tokens={run.config.rollout.max_tokens}, before they could answer.",
        lambda run: f"Raise rollout.max_tokens (to {2 * run.config.rollout.max_tokens}, say), or ask for shorter "
        "answers in the prompt. A model without a chat template or an end token (eos_token_id in its "
        "generation_config.json) does not know when to stop: use an instruction-tuned one.",
        ("all-wrong", "no-spread"),
    ),
    Entry(
        "all-wrong",
        _all_wrong,
        lambda run: f"No response has been right since the run began, in {len(run.lines)} steps"
        + (": all rewards are equal, and nothing is learned." if run.no_spread else ", although rewards differ."),
        lambda run: f"Read some responses: {shlex.join(['poise', 'report', run.config.run])}. If they are wrong, use "
        "easier problems, an instruction-tuned model, or a larger group=. If they are right, the reward cannot read "
        "them: show the form of the answer in the prompt, or fix the reward (docs/rewards.md). A response counts as "
        "right if its reward is at least 1.0, or at least the reward's correct_at.",
        ("no-spread",),
    ),
    Entry(
        "no-spread",
        _no_spread,
        lambda run: f"In the last {run.few} steps nearly all groups had equal rewards: their advantages are 0, and "
        "nothing is learned from them.",
        lambda run: "Choose problems that the model solves sometimes but not always. If few are right, also raise group"
        f"= (from {run.config.group} to {2 * run.config.group}, say) or rollout.temperature= "
        f"(now {run.config.rollout.temperature:g}). If all are right from the start, check that the reward does not "
        "accept wrong answers.",
        ("entropy",),
    ),
    Entry(
        "no-steps",
        _no_steps,
        lambda run: f"The optimizer took no step in the last {run.few} steps, although rewards differ: the weight of "
        f"every token is 0 (regulator={run.config.regulator}).",
        lambda _: "Change the regulator's settings: poise diagnose shows the weights; regulator=grpo has weight 1.",
    ),
    Entry(
        "rounding",
        _held_unmoved,
        lambda run: f"{_mean(run.last('optim/held_unmoved')):.0%} of the tokens are held back before a batch's first "
        "optimizer step: by rounding alone, the probabilities in sampling and training differ by more than the bounds "
        f"of objective.surrogate={run.config.objective.surrogate}.",
        lambda _: "Set rollout.old_logp=recomputed or dtype=float32, or widen the bounds of the surrogate.",
    ),
    Entry(
        "mismatch",
        _mismatch,
        lambda run: f"Sampler and policy disagree: their log-probabilities differ by "
        f"{_mean(run.last('rollout/mismatch')):.2g} per token on average, more than the clip allows in an update "
        f"(objective.clip_high={run.config.objective.clip_high:g}).",
        lambda _: "The sampler has other weights, uses another temperature, or rounds coarsely. rollout.engine=native "
        "samples with the policy's own arithmetic; dtype=float32 shows whether rounding is the cause.",
    ),
    Entry(
        "entropy",
        _entropy_collapsed,
        lambda run: f"The entropy has collapsed, from {_mean(run.first('rollout/entropy', run.few)):.2g} to "
        f"{_mean(run.last('rollout/entropy')):.2g}: responses to a prompt are nearly the same, and there is little "
        "left to compare.",
        lambda run: f"Begin again with a smaller optim.lr ({run.config.optim.lr / 4:.2g}), or with "
        "objective.clip_high=0.28, or with objective.entropy_coef=0.001.",
        ("no-spread",),
    ),
    Entry(
        "accuracy-fell",
        _accuracy_fell,
        lambda run: f"Accuracy has fallen: it was {run.best()[0]:.2f} up to step {run.best()[1]}, and has been "
        f"{_mean(run.last('reward/accuracy')):.2f} over the last {run.few} steps.",
        _smaller_steps,
        ("no-spread", "entropy", "cut-off"),
    ),
)  # fmt: skip


def holding(run: Progress, earlier: Sequence[str] = ()) -> list[Entry]:
    """Return the entries whose condition holds now, except earlier warnings and the warnings that they cover."""
    silent = {*earlier, *(name for entry in TABLE if entry.name in earlier for name in entry.covers)}
    new = []
    for entry in TABLE:
        if entry.name not in silent and entry.holds(run):
            new.append(entry)
            silent |= {entry.name, *entry.covers}
    return new


class Watch:
    """Follows a run and shows each warning once, even if the run is resumed."""

    def __init__(self, config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._config, self._folder, self._say = config, folder, say
        self._lines: list[Mapping[str, float | None]] = []  # the metrics of every step so far
        self._warnings: list[RunWarning] = []  # all warnings so far

    def on_start(self, state: State) -> None:
        """Read the steps and warnings so far, and check the conditions."""
        self._lines = list(self._folder.metrics())
        self._warnings = read(self._folder)
        self._warn(state.step)

    def on_step(self, result: StepResult) -> None:
        """Add a step's metrics, and check the conditions."""
        self._lines.append(result.metrics)
        self._warn(result.state.step)

    def _warn(self, step: int) -> None:
        run = Progress(self._config, self._lines)
        for entry in holding(run, [warning.name for warning in self._warnings]):
            self._warnings.append(RunWarning(entry.name, step, entry.what(run), entry.remedy(run)))
            save(self._folder, self._warnings)
            self._say(str(self._warnings[-1]))


def _numbers(lines: Sequence[Mapping[str, float | None]], name: str, count: int) -> list[float]:
    values = [value for line in lines if (value := line.get(name)) is not None and isfinite(value)]
    return values if len(values) == count else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
