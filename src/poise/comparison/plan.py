"""The plan of a comparison: its arms, seeds and limits, and the runs that follow from them.

Every run is an ordinary one, in the folder ``arms/VARIANT/seed-N`` of the comparison. A variant is an arm at a
learning rate. Tuning takes seeds from ``TUNING`` on, and held-out problems of its own, neither of which the comparison
uses again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from poise._lib.errors import short
from poise._lib.files import expand
from poise.comparison.arms import OWN, PlannedArm, Variant, build, folder_name
from poise.config.documents import ConfigError, Document, merge, parse, read, read_typed, recipes
from poise.config.groups import HELD_OUT
from poise.config.schema import Config

TUNING = 10_000  # the first tuning seed
MOST_SEEDS = 1000
KEPT = ("models", "results")  # its newest checkpoint, or only what it measured


class PlannedRun(NamedTuple):
    """One run: a variant of an arm with a seed."""

    arm: PlannedArm
    variant: Variant
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return Path(self.config.run)

    @property
    def name(self) -> str:
        """Its name for the user."""
        return f"{self.variant.name}, seed {self.seed}"


@dataclass(frozen=True)
class Limits:
    """How the runs are carried out, which does not change their results."""

    jobs: int | None = None  # runs side by side; None: chosen by the device
    threads: int = 1  # of a run, on a CPU
    hours: float = inf  # after which no more runs are started
    retries: int = 0  # of a run that fails
    keep: str = "models"  # what stays of a finished run: one of ``KEPT``


@dataclass(frozen=True)
class Plan:
    """What a comparison does."""

    folder: Path
    arms: tuple[PlannedArm, ...]
    baseline: PlannedArm
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def run(self, arm: PlannedArm, variant: Variant, seed: int) -> PlannedRun:
        """The run of a variant with a seed."""
        folder = self.folder / "arms" / folder_name(variant.name) / f"seed-{seed}"
        update: dict[str, Any] = {"seed": seed, "run": str(folder)}
        evaluation = variant.config.evaluation
        if seed in self.tuning_seeds:
            update["evaluation"] = evaluation.model_copy(update={"seed": evaluation.seed + TUNING})
        return PlannedRun(arm, variant, seed, variant.config.model_copy(update=update))

    def log_of(self, run: PlannedRun) -> Path:
        """Where a run's output is written."""
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
        """Every run that the plan may come to, at any learning rate."""
        variants = [(arm, variant) for arm in self.arms for variant in arm.variants]
        return [*self.tuning_runs(), *(self.run(*each, seed) for seed in self.seeds for each in variants)]

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.tuning_runs()) + len(self.seeds) * len(self.arms)


def read_plan(recipe: str | None, overrides: Sequence[str]) -> Plan:
    """The plan of ``poise compare RECIPE KEY=VALUE…``. The recipe may be a comparison's YAML file."""
    document = read(recipe) if recipe is not None else {}
    own: Document = {key: document.pop(key) for key in OWN if key in document and key not in ("axes", "arms")}
    settings = []
    for override in overrides:
        key, equals, _ = override.partition("=")
        if key.strip() == "seed" and equals:
            raise ConfigError(["seed: a comparison has several seeds; write seeds=10 for 0 to 9, or seeds=20-29"])
        if equals and key.strip() in OWN:
            own[key.strip()] = read_typed(override)
        else:
            settings.append(override)
    if recipe is None and not any(override.startswith("model=") for override in settings):
        document = read("demo")
    folder = _folder(document, settings)
    document = merge(document, {"evaluation": {"problems": _held_out(recipe, document)}})
    document.setdefault("keep_checkpoints", 1)  # there are many runs, and each is resumed from its newest
    seeds, tuning = _seeds(own), _count(own, "tune", 0, MOST_SEEDS)
    arms = tuple(build(document, settings, tuned=tuning > 0))
    if not arms[0].variants[0].config.evaluation.problems:
        raise ConfigError(
            ["evaluation = off, or evaluation.problems = 0: a comparison compares held-out accuracy; leave it out"]
        )
    limits = Limits(
        jobs=_count(own, "jobs", 1, 1024) if own.get("jobs") is not None else None,
        threads=_count(own, "threads", 1, 1024) if "threads" in own else 1,
        hours=_hours(own),
        retries=_count(own, "retries", 0, 100),
        keep=_kept(own),
    )
    tuning_seeds = tuple(range(TUNING, TUNING + tuning))
    return Plan(folder, arms, _baseline(arms, own.get("baseline")), seeds, tuning_seeds, limits)


def _folder(document: Document, settings: list[str]) -> Path:
    """The folder of the comparison, whose setting ``run`` is taken out of the settings of its runs."""
    typed = [override for override in settings if override.partition("=")[0].strip() == "run"]
    for override in typed:
        settings.remove(override)
    name = read_typed(typed[-1]) if typed else document.get("run", "runs/compare")
    if not typed and document.get("run") in (None, *(read(shipped).get("run") for shipped in recipes())):
        name = "runs/compare"
    if not isinstance(name, str | int | float) or not str(name).strip():
        raise ConfigError([f"run = {short(name)}: must be the folder of the comparison"])
    try:
        return expand(str(name))
    except OSError as error:
        raise ConfigError([f"run = {short(name)}: {error}"]) from None


def _held_out(recipe: str | None, document: Document) -> int:
    """The number of held-out problems: at least ``HELD_OUT``, unless the user's own file says otherwise."""
    group = document.get("evaluation")
    problems = group.get("problems") if isinstance(group, dict) else None
    if recipe is not None and recipe not in recipes():
        written = parse(expand(recipe).read_text(encoding="utf-8"))
        group = written.get("evaluation") if isinstance(written, dict) else None
        if isinstance(group, dict) and "problems" in group:
            return group["problems"]  # type: ignore[no-any-return] # checked with all other settings
    return max(problems, HELD_OUT) if isinstance(problems, int) else HELD_OUT


def _kept(own: Document) -> str:
    kept = own.get("keep", KEPT[0])
    if kept not in KEPT:
        raise ConfigError([f"keep = {short(kept)}: must be {' or '.join(KEPT)}"])
    return str(kept)


def _seeds(own: Document) -> tuple[int, ...]:
    written = own.get("seeds", 10)
    if isinstance(written, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", written)):
        first, last = int(match[1]), int(match[2])
        if last < TUNING and 1 <= last - first < MOST_SEEDS:
            return tuple(range(first, last + 1))
    elif type(written) is int and 2 <= written <= MOST_SEEDS:
        return tuple(range(written))
    if written == 1:
        raise ConfigError(["seeds = 1: one seed cannot tell a difference from chance; take at least 2, better 10"])
    raise ConfigError(
        [
            f"seeds = {short(written)}: must be a number of seeds from 2 to {MOST_SEEDS}, or the first and the last of "
            f"them, such as 20-29, below {TUNING} (where tuning seeds begin)"
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
    wanted = " ".join(str(name).split())
    for arm in arms:
        if " ".join(arm.name.split()) == wanted:
            return arm
    named = "; ".join(arm.name for arm in arms)
    raise ConfigError([f"baseline = {short(name)} is not among the arms; they are: {named}"])
