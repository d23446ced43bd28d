"""The standard controls of a comparison, ``controls=auto``: arms that may explain a method's gain without its idea.

- The baseline at 1.5 and 2 times its learning rate: is the gain due to larger steps? (Not added if rates are tuned.)
- As many plain passes as the method has phases: is it due to more steps?
- For a method with two phases, a random split with the same shares of tokens: is it due to any split?
- For a method with one weighted phase, its mean weight on all tokens: is it due to the size of the weights?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from poise.referee.compare.arms import RATE, PlannedArm, Variant, method, rate_text
from poise.regulators import Constant, Identity, RandomSplit
from poise.training.config.documents import Document, merge
from poise.training.config.schema import Config, restore

FACTORS = (1.5, 2.0)  # factors on the baseline's learning rate
PLAIN = (Identity, Constant, RandomSplit)  # regulators that are controls themselves
Controls = dict[str, tuple[str, ...]]  # the names of each arm's controls


class Control(NamedTuple):
    """A copy of the arm ``origin`` with changed settings, and the reason for it."""

    name: str
    origin: PlannedArm
    changes: Document
    settings: Document  # these distinguish the copy from other arms
    reason: str

    def arm(self) -> PlannedArm:
        """Build the arm."""
        variants = []
        for variant in self.origin.variants:
            config = restore(merge(variant.config.model_dump(mode="json"), self.changes), trust=True)
            rate = f", {RATE}={rate_text(variant.rate)}" if len(self.origin.variants) > 1 else ""
            variants.append(Variant(self.name + rate, config))
        return PlannedArm(self.name, self.settings, tuple(variants), self.reason)


def add(arms: Sequence[PlannedArm], baseline: PlannedArm) -> tuple[tuple[PlannedArm, ...], Controls]:
    """Add each method's controls to the arms. Returns all arms, without duplicates, and each arm's controls."""
    known = list(arms)
    controls: Controls = {}
    for arm in arms:
        found = []
        for control in _controls(arm, baseline) if _is_method(arm, baseline) else ():
            built = control.arm()
            same = next((each for each in known if _identity(each) == _identity(built)), None)
            if same is None:
                taken = any(each.name == control.name for each in known)
                same = control._replace(name=f"{control.name} ({arm.name})").arm() if taken else built
                known.append(same)
            found.append(same.name)
        if found:
            controls[arm.name] = tuple(found)
    return tuple(known), controls


def _controls(arm: PlannedArm, baseline: PlannedArm) -> Iterator[Control]:
    regulator, text = arm.variants[0].config.build_regulator(), method(arm.variants[0].config)
    if len(baseline.variants) == 1:
        for factor in FACTORS:
            rate = factor * baseline.variants[0].rate
            name, settings = f"{baseline.name}, {factor:g} × rate", {RATE: rate_text(rate)}
            yield Control(name, baseline, {"optim": {"lr": rate}}, settings, "a larger step")
    phases = regulator.phase_count
    if phases > 1:
        yield _regulated(f"grpo(passes={phases})", arm, "as many plain passes as phases")
    if phases == 2:
        yield _regulated(f"random-split(like={text!r})", arm, "the same split, at random")
    if phases == 1 and not isinstance(regulator, Identity):
        yield _regulated(f"constant(like={text!r})", arm, "the same mean weight for all tokens")


def _regulated(regulator: str, arm: PlannedArm, reason: str) -> Control:
    changes = {"regulator": regulator}
    return Control(regulator, arm, changes, {**arm.settings, **changes}, reason)


def _identity(arm: PlannedArm) -> list[Document]:
    return [variant.identity for variant in arm.variants]


def _is_method(arm: PlannedArm, baseline: PlannedArm) -> bool:
    """Whether an arm differs from the baseline in more than its learning rate, its steps or a plain regulator."""
    config, base = arm.variants[0].config, baseline.variants[0].config
    plain = isinstance(config.build_regulator(), PLAIN)
    return arm is not baseline and not (plain and _rest(config) == _rest(base))


def _rest(config: Config) -> Document:
    """All settings except regulator, learning rate and number of steps."""
    rest = config.model_dump(mode="json", exclude={"run", "seed", "regulator", "steps", "optim"})
    return {**rest, "optim": config.optim.model_dump(mode="json", exclude={"lr"})}
