"""The plan of a comparison: its arms, seeds and limits, and the runs that follow from them.

Every run is an ordinary run, in the folder ``arms/VARIANT/seed-N`` of the comparison. A variant is an arm at a
learning rate. Tuning uses seeds from ``TUNING`` on and other held-out problems; the comparison uses neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

from poise._lib.errors import short
from poise._lib.files import expand
from poise.referee.compare import controls
from poise.referee.compare.arms import OWN, PlannedArm, Variant, build, folder_name
from poise.referee.compare.controls import Controls
from poise.training.config.documents import ConfigError, Document, merge, parse, read, read_typed, recipes
from poise.training.config.groups import HELD_OUT
from poise.training.config.schema import Config

TUNING = 10_000  # the first tuning seed
MOST_SEEDS = 1000
EVALUATIONS = 8  # of a run in training, at least
ACCURACY, SPEED = MEASURES = ("accuracy", "speed")
LONGER = 2.0  # the baseline's steps in multiples of the others', where speed is measured
KEEP = ("models", "results")  # of a finished run: its newest checkpoint, or only its results


class PlannedRun(NamedTuple):
    """One run: a variant of an arm with a seed."""

    arm: PlannedArm
    variant: Variant
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.run)

    @property
    def name(self) -> str:
        """The name for people."""
        return f"{self.variant.name}, seed {self.seed}"


@dataclass(frozen=True)
class Limits:
    """How the runs are executed, which does not change their results."""

    jobs: int | None = None  # runs in parallel; None: depends on the device
    threads: int = 1  # of a run on a CPU
    hours: float = inf  # no run starts after this
    retries: int = 0  # of a failed run
    keep: str = "models"  # one of ``KEEP``


@dataclass(frozen=True)
class Measure:
    """What is compared: accuracy at the end, or speed as well."""

    name: str = ACCURACY  # one of ``MEASURES``
    longer: float = 1.0  # the baseline's steps in multiples of the cut, so that it can reach what faster arms reach
    margin: float | None = None  # share of the baseline's speed within which speeds count as equal


@dataclass(frozen=True)
class Plan:
    """Folder, arms, seeds and limits of a comparison."""

    folder: Path
    arms: tuple[PlannedArm, ...]
    baseline: PlannedArm
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)
    controls: Controls = field(default_factory=dict)
    measure: Measure = field(default_factory=Measure)

    @property
    def cut(self) -> int | None:
        """The steps after which arms are compared: the fewest of an arm; None if speed is not measured."""
        return min(arm.variants[0].config.steps for arm in self.arms) if self.measure.name == SPEED else None

    def run(self, arm: PlannedArm, variant: Variant, seed: int) -> PlannedRun:
        """The run of a variant with a seed."""
        folder = self.folder / "arms" / folder_name(variant.name) / f"seed-{seed}"
        update: dict[str, Any] = {"seed": seed, "run": str(folder)}
        evaluation = variant.config.evaluation
        if seed in self.tuning_seeds:  # its last score chooses; only ``stop_at`` needs those on the way
            every = evaluation.every if variant.config.stop_at else 0
            update["evaluation"] = evaluation.model_copy(update={"seed": evaluation.seed + TUNING, "every": every})
        elif self.cut is not None and arm is self.baseline:
            update |= _lengthened(variant.config, ceil(self.measure.longer * self.cut))
        return PlannedRun(arm, variant, seed, variant.config.model_copy(update=update))

    def log_of(self, run: PlannedRun) -> Path:
        """The file for a run's output."""
        return self.folder / "logs" / f"{folder_name(run.variant.name)}-seed-{run.seed}.log"

    def tuning_runs(self) -> list[PlannedRun]:
        """The runs that choose a learning rate for each arm, seed by seed."""
        return [
            self.run(arm, variant, seed)
            for seed in self.tuning_seeds
            for arm in self.arms
            for variant in arm.variants
            if len(arm.variants) > 1
        ]

    def all_runs(self) -> list[PlannedRun]:
        """Every run that the plan may need, at any learning rate."""
        variants = [(arm, variant) for arm in self.arms for variant in arm.variants]
        return [*self.tuning_runs(), *(self.run(*each, seed) for seed in self.seeds for each in variants)]

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.tuning_runs()) + len(self.seeds) * len(self.arms)


def _lengthened(config: Config, steps: int) -> dict[str, int]:
    """The settings of a run that takes at least this many steps, with a budget in proportion."""
    if steps <= config.steps:
        return {}
    budget = {} if config.budget is None else {"budget": ceil(config.budget * steps / config.steps)}
    return {"steps": steps, **budget}


def read_plan(recipe: str | None, overrides: Sequence[str]) -> Plan:
    """The plan of ``poise compare RECIPE KEY=VALUE…``. The recipe may be a comparison's YAML file."""
    document = read(recipe) if recipe is not None else {}
    own: Document = {key: document.pop(key) for key in OWN if key in document and key not in ("axes", "arms")}
    settings = []
    for override in overrides:
        key, equals, _ = override.partition("=")
        if key.strip() == "seed" and equals:
            raise ConfigError(["seed: a comparison has several seeds; write seeds=10 for 0 to 9, or seeds=20-29"])
        if equals and key.strip() in ("arms", "axes"):
            raise ConfigError([f"{key.strip()}: list them in a YAML file; here, give a setting several values"])
        if equals and key.strip() in OWN:
            own[key.strip()] = read_typed(override)
        else:
            settings.append(override)
    models = [value for key, _, value in (override.partition("=") for override in settings) if key.strip() == "model"]
    if recipe is None and {*models} <= {"embedded"}:
        document = read("demo")
    folder = _folder(document, settings)
    own_evaluation = _own_evaluation(recipe)
    document = merge(document, {"evaluation": {"problems": _held_out(own_evaluation, document)}})
    document.setdefault("keep_checkpoints", 1)  # there are many runs, and each resumes from its newest
    seeds, tuning = _seeds(own), _count(own, "tune", 0, MOST_SEEDS)
    arms = tuple(build(document, settings, tuned=tuning > 0))
    if not arms[0].variants[0].config.evaluation.problems:
        raise ConfigError(
            ["evaluation = off, or evaluation.problems = 0: a comparison compares held-out accuracy; leave it out"]
        )
    typed = any(override.partition("=")[0].strip() in ("evaluation", "evaluation.every") for override in settings)
    if not typed and "every" not in own_evaluation:
        arms = _with_curves(arms)
    baseline, links = _baseline(arms, own.get("baseline")), Controls()
    if _choice(own, "controls", ("none", "auto")) == "auto":
        arms, links = controls.add(arms, baseline)
    limits = Limits(
        jobs=_count(own, "jobs", 1, 1024) if own.get("jobs") is not None else None,
        threads=_count(own, "threads", 1, 1024) if "threads" in own else 1,
        hours=_hours(own),
        retries=_count(own, "retries", 0, 100),
        keep=_choice(own, "keep", KEEP),
    )
    tuning_seeds = tuple(range(TUNING, TUNING + tuning))
    return Plan(folder, arms, baseline, seeds, tuning_seeds, limits, links, _measure(own))


def _with_curves(arms: Sequence[PlannedArm]) -> tuple[PlannedArm, ...]:
    """The arms, evaluated at least ``EVALUATIONS`` times in training, evenly if the steps can be divided so."""
    steps = min(arm.variants[0].config.steps for arm in arms)
    count = next((n for n in range(EVALUATIONS, 2 * EVALUATIONS + 1) if steps % n == 0), EVALUATIONS)

    def changed(variant: Variant) -> Variant:
        evaluation = variant.config.evaluation.model_copy(update={"every": max(1, steps // count)})
        return replace(variant, config=variant.config.model_copy(update={"evaluation": evaluation}))

    return tuple(replace(arm, variants=tuple(changed(variant) for variant in arm.variants)) for arm in arms)


def _measure(own: Document) -> Measure:
    name = _choice(own, "measure", MEASURES)
    for key in ("longer", "margin"):
        if key in own and name != SPEED:
            raise ConfigError([f"{key} = {short(own[key])}: it belongs to the speed of arms; ask for measure={SPEED}"])
    longer = _number(own, "longer", 1, 100) if "longer" in own else LONGER
    margin = _number(own, "margin", 0, 1) if "margin" in own else None
    return Measure(name, longer, margin) if name == SPEED else Measure()


def _choice(own: Document, key: str, allowed: Sequence[str]) -> str:
    """One of the allowed words; by default the first."""
    value = own.get(key, allowed[0])
    if value not in allowed:
        raise ConfigError([f"{key} = {short(value)}: must be {' or '.join(allowed)}"])
    return str(value)


def _number(own: Document, key: str, low: float, high: float) -> float:
    value = own[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError([f"{key} = {short(value)}: must be a number from {low} to {high}"])
    return float(value)


def _folder(document: Document, settings: list[str]) -> Path:
    """The folder of the comparison: ``run``, which is removed from the settings of its runs."""
    overrides = [override for override in settings if override.partition("=")[0].strip() == "run"]
    for override in overrides:
        settings.remove(override)
    name = read_typed(overrides[-1]) if overrides else document.get("run", "runs/compare")
    if not overrides and document.get("run") in (None, *(read(shipped).get("run") for shipped in recipes())):
        name = "runs/compare"
    if not isinstance(name, str | int | float) or not str(name).strip():
        raise ConfigError([f"run = {short(name)}: must be the folder of the comparison"])
    try:
        return expand(str(name))
    except OSError as error:
        raise ConfigError([f"run = {short(name)}: {error}"]) from None


def _own_evaluation(recipe: str | None) -> Document:
    """The evaluation's settings in the user's own file and in those that it inherits from, without shipped recipes."""
    if recipe is None or recipe in recipes():
        return {}
    path = expand(recipe)
    contents = parse(path.read_text(encoding="utf-8"))
    if not isinstance(contents, dict):
        return {}
    base, group = contents.get("base"), contents.get("evaluation")
    inherited = _own_evaluation(None if base is None or base in recipes() else str(path.parent / base))
    return inherited | (group if isinstance(group, dict) else {})


def _held_out(own: Document, document: Document) -> int:
    """The number of held-out problems: at least ``HELD_OUT``, unless the user's own file sets it."""
    if "problems" in own:
        return own["problems"]  # type: ignore[no-any-return] # checked with all other settings
    group = document.get("evaluation")
    problems = group.get("problems") if isinstance(group, dict) else None
    return max(problems, HELD_OUT) if isinstance(problems, int) else HELD_OUT


def _seeds(own: Document) -> tuple[int, ...]:
    seeds = own.get("seeds", 10)
    if isinstance(seeds, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", seeds)):
        first, last = int(match[1]), int(match[2])
        if last < TUNING and 1 <= last - first < MOST_SEEDS:
            return tuple(range(first, last + 1))
    elif type(seeds) is int and 2 <= seeds <= MOST_SEEDS:
        return tuple(range(seeds))
    if seeds == 1:
        raise ConfigError(["seeds = 1: one seed cannot tell a difference from chance; use at least 2, better 10"])
    raise ConfigError(
        [
            f"seeds = {short(seeds)}: must be a number of seeds from 2 to {MOST_SEEDS}, or the first and the last "
            f"seed, such as 20-29, below {TUNING} (where tuning seeds begin)"
        ]
    )


def _count(own: Document, key: str, low: int, high: int) -> int:
    value = own.get(key, 0)
    if type(value) is not int or not low <= value <= high:
        raise ConfigError([f"{key} = {short(value)}: must be a whole number from {low} to {high}"])
    return value


def _hours(own: Document) -> float:
    value = own.get("hours", inf)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError([f"hours = {short(value)}: must be a number above 0"])
    return value


def _baseline(arms: Sequence[PlannedArm], name: Any) -> PlannedArm:
    if name is None:
        return arms[0]
    for arm in arms:
        if arm.name.split() == str(name).split():
            return arm
    names = "; ".join(arm.name for arm in arms)
    raise ConfigError([f"baseline = {short(name)} is not among the arms; they are: {names}"])
