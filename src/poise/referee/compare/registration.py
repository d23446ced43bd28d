"""Registered plans: ``--register`` freezes a comparison before its first run, as ``registered`` in ``plan.json``.

It freezes the arms with all their settings, the baseline, the seeds, the measure, the test and the margin, with a
checksum that can be published. None of these can change afterwards. Arms and seeds that are added later are
exploratory: the verdict on the registered plan does not use them.
"""

from __future__ import annotations

from typing import NamedTuple

from poise._lib.errors import short
from poise._lib.files import SEAL, sealed, was_changed
from poise.referee.compare.plan import Plan
from poise.referee.compare.statistics import LEVEL
from poise.referee.compare.verdict import arm_sentence, base_words, speed_sentences
from poise.training.config.documents import ConfigError, Document
from poise.training.config.run_settings import differences

TEST = f"two-sided sign flips over seeds, Holm's correction over the arms that are no controls, level {LEVEL}"


def frozen(plan: Plan) -> Document:
    """The content of a registered plan, with its checksum."""
    return sealed(
        {
            "baseline": plan.baseline.name,
            "arms": {arm.name: {each.name: each.identity for each in arm.variants} for arm in plan.arms},
            "controls": {arm.name: arm.control for arm in plan.arms if arm.control},
            "seeds": list(plan.seeds),
            "tuning_seeds": list(plan.settings.tuning_seeds),
            "measure": plan.settings.compared,
            "test": TEST,
        }
    )


def check(plan: Plan, registered: Document) -> None:
    """Raise ConfigError if the plan differs from the registered plan; additional arms and seeds are allowed."""
    there = f"the plan in {plan.folder} was registered"
    if was_changed(registered) or SEAL not in registered:
        raise ConfigError(f"{there}, and plan.json was edited since (its checksum does not match): restore the file")
    now = frozen(plan)
    if missing := [name for name in registered["arms"] if name not in now["arms"]]:
        raise ConfigError(f"{there} with the arm {missing[0]!r}: include it too, or start another run=DIR")
    if missing := [seed for seed in registered["seeds"] if seed not in now["seeds"]]:
        raise ConfigError(f"{there} with seed {missing[0]}: add seeds, do not remove any, or start another run=DIR")
    now["arms"] = {name: now["arms"][name] for name in registered["arms"]}
    keys = ("arms", "baseline", "tuning_seeds", "measure", "test")
    for key, before, new in differences(*({each: document[each] for each in keys} for document in (registered, now))):
        raise ConfigError(f"{there} with {key} = {short(before)}, not {short(new)}: leave it, or start another run=DIR")


class Added(NamedTuple):
    """The arms and seeds of a plan that are not in the registered plan; falsy if there are none."""

    arms: list[str]
    seeds: list[int]

    def __bool__(self) -> bool:
        return bool(self.arms or self.seeds)

    def __str__(self) -> str:
        arms = [f"arm{'s' * (len(self.arms) > 1)} {'; '.join(self.arms)}"] if self.arms else []
        seeds = [f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"] if self.seeds else []
        return " and ".join(arms + seeds)


def added(plan: Plan, registered: Document) -> Added:
    """The arms and seeds that were added after the registration."""
    arms = [arm.name for arm in plan.arms if arm.name not in registered["arms"]]
    return Added(arms, [seed for seed in plan.seeds if seed not in registered["seeds"]])


def explored(document: Document, everything: Document, registered: Document, extra: Added) -> Document:
    """The results of a registered plan; if arms or seeds were added, the results of ``everything`` follow."""
    sentences = [f"Registered before the first run (checksum {registered[SEAL][:12]}).", *document["verdict"]]
    rows = [arm for arm in everything["arms"] if extra.seeds or arm["name"] in extra.arms]
    if extra:
        sentences.append(f"Exploratory, because {extra} came after the registration:")
    for arm in rows:
        if arm["difference"] and not arm["control"]:
            words = arm_sentence(arm, base_words(everything)), *speed_sentences(arm, everything)
            sentences += [f"Exploratory: {each}" for each in words]
    return {**document, "registered": registered[SEAL], "exploratory": rows, "verdict": sentences}
