"""The plan of a comparison: its arms, seeds and settings, and the runs that follow from them.

Every run is an ordinary run, in the folder ``arms/VARIANT/seed-N`` of the comparison. A variant is an arm at one
learning rate. Tuning uses the seeds from ``TUNING`` on and its own held-out problems; the comparison uses neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from poise._lib.errors import short
from poise._lib.files import expand
from poise.referee.compare import controls
from poise.referee.compare.arms import PlannedArm, Variant, build, folder_name
from poise.referee.compare.controls import Controls
from poise.referee.compare.settings import TUNING, Settings, validated
from poise.training.config.documents import ConfigError, Document, default_recipe, key_of, merge, read, read_typed
from poise.training.config.groups import HELD_OUT
from poise.training.config.schema import Config

EVALUATIONS = 8  # the fewest evaluations of a run during training


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
        """The name in messages."""
        return f"{self.variant.name}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """Folder, arms and settings of a comparison."""

    folder: Path
    arms: tuple[PlannedArm, ...]
    baseline: PlannedArm
    settings: Settings
    controls: Controls

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the comparison."""
        return self.settings.seeds

    @property
    def cut(self) -> int | None:
        """The step at which arms are compared: the smallest ``steps`` of any arm; None if speed is not measured."""
        return min(arm.variants[0].config.steps for arm in self.arms) if self.settings.measure == "speed" else None

    def run(self, arm: PlannedArm, variant: Variant, seed: int) -> PlannedRun:
        """The run of a variant with a seed."""
        folder = self.folder / "arms" / folder_name(variant.name) / f"seed-{seed}"
        update: dict[str, Any] = {"seed": seed, "run": str(folder)}
        evaluation = variant.config.evaluation
        if seed in self.settings.tuning_seeds:  # only the final score counts, unless ``stop_at`` needs earlier ones
            every = evaluation.every if variant.config.stop_at else 0
            update["evaluation"] = evaluation.model_copy(update={"seed": evaluation.seed + TUNING, "every": every})
        elif self.cut is not None and arm is self.baseline:
            update |= _lengthened(variant.config, ceil(self.settings.longer * self.cut))
        return PlannedRun(arm, variant, seed, variant.config.model_copy(update=update))

    def log_of(self, run: PlannedRun) -> Path:
        """The file for a run's output."""
        return self.folder / "logs" / f"{folder_name(run.variant.name)}-seed-{run.seed}.log"

    def tuning_runs(self) -> list[PlannedRun]:
        """The runs that choose a learning rate for each arm, seed by seed."""
        return [
            self.run(arm, variant, seed)
            for seed in self.settings.tuning_seeds
            for arm in self.arms
            for variant in arm.variants
            if len(arm.variants) > 1
        ]

    def all_runs(self) -> list[PlannedRun]:
        """All runs that the plan may need, at all learning rates."""
        variants = [(arm, variant) for arm in self.arms for variant in arm.variants]
        return [*self.tuning_runs(), *(self.run(*each, seed) for seed in self.seeds for each in variants)]

    @property
    def size(self) -> int:
        """The number of runs, tuning included."""
        return len(self.tuning_runs()) + len(self.seeds) * len(self.arms)


def _lengthened(config: Config, steps: int) -> dict[str, int]:
    """Settings that extend a run to ``steps`` steps, with the budget in proportion; empty if the run is long enough."""
    if steps <= config.steps:
        return {}
    budget = {} if config.budget is None else {"budget": ceil(config.budget * steps / config.steps)}
    return {"steps": steps, **budget}


def read_plan(recipe: str | None, overrides: Sequence[str]) -> Plan:
    """Read the plan of ``poise compare RECIPE KEY=VALUE…``. The recipe may be a comparison's YAML file."""
    document = read(recipe) if recipe is not None else {}
    own: Document = {key: document.pop(key) for key in Settings.model_fields if key in document}
    settings = []
    for override in overrides:
        if (key := key_of(override)) == "seed":
            raise ConfigError("seed: a comparison has several seeds; write seeds=10 for 0 to 9, or seeds=20-29")
        if key in Settings.model_fields:
            own[key] = read_typed(override)
        else:
            settings.append(override)
    models = [override.partition("=")[2] for override in settings if key_of(override) == "model"]
    if recipe is None and (default := default_recipe(models[-1] if models else None)):
        document = read(default)
    mine = read(recipe, shipped=False) if recipe is not None else {}
    folder = _folder(mine, settings)
    own_evaluation = _evaluation(mine)
    if "problems" not in own_evaluation:
        problems = max(_evaluation(document).get("problems", 0), HELD_OUT)
        document = merge(document, {"evaluation": {"problems": problems}})
    document.setdefault("keep_checkpoints", 1)  # to save disk space: a run resumes from its newest checkpoint
    comparison = validated(own)
    arms = tuple(build(document, settings, comparison))
    if not arms[0].variants[0].config.evaluation.problems:
        raise ConfigError(
            "evaluation = off, or evaluation.problems = 0: a comparison needs held-out accuracy; remove this setting"
        )
    typed = {key_of(override) for override in settings}
    if typed.isdisjoint(("evaluation", "evaluation.every")) and "every" not in own_evaluation:
        arms = _with_curves(arms)
    baseline, links = _baseline(arms, comparison.baseline), Controls()
    if comparison.controls == "auto":
        arms, links = controls.add(arms, baseline)
    return Plan(folder, arms, baseline, comparison, links)


def _with_curves(arms: Sequence[PlannedArm]) -> tuple[PlannedArm, ...]:
    """The arms with at least ``EVALUATIONS`` evaluations during training, evenly spaced if the steps allow it."""
    steps = min(arm.variants[0].config.steps for arm in arms)
    count = next((n for n in range(EVALUATIONS, 2 * EVALUATIONS + 1) if steps % n == 0), EVALUATIONS)

    def changed(variant: Variant) -> Variant:
        evaluation = variant.config.evaluation.model_copy(update={"every": max(1, steps // count)})
        return replace(variant, config=variant.config.model_copy(update={"evaluation": evaluation}))

    return tuple(replace(arm, variants=tuple(changed(variant) for variant in arm.variants)) for arm in arms)


def _folder(document: Document, settings: list[str]) -> Path:
    """The folder of the comparison, from the setting ``run``. Removes ``run`` from ``settings``."""
    overrides = [override for override in settings if key_of(override) == "run"]
    for override in overrides:
        settings.remove(override)
    name = read_typed(overrides[-1]) if overrides else document.get("run") or "runs/compare"
    if not isinstance(name, str | int | float) or not str(name).strip():
        raise ConfigError(f"run = {short(name)}: must be the folder of the comparison")
    try:
        return expand(str(name))
    except OSError as error:
        raise ConfigError(f"run = {short(name)}: {error}") from None


def _evaluation(document: Document) -> Document:
    """The settings of the evaluation; empty if it is ``off``."""
    group = document.get("evaluation")
    return group if isinstance(group, dict) else {}


def _baseline(arms: Sequence[PlannedArm], name: Any) -> PlannedArm:
    if name is None:
        return arms[0]
    for arm in arms:
        if arm.name.split() == str(name).split():
            return arm
    names = "; ".join(arm.name for arm in arms)
    raise ConfigError(f"baseline = {short(name)} is not among the arms; they are: {names}")
