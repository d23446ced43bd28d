"""Registered plans: ``--register`` freezes a comparison before its first run, as ``registered`` in ``plan.json``.

The frozen plan (``plan_file.described``) has a checksum that can be published. Arms and seeds that are added later
are exploratory: the verdict on the registered plan does not use them.
"""

from __future__ import annotations

from typing import NamedTuple

from poise._lib.files import SEAL
from poise.referee.compare.plan import Plan
from poise.referee.compare.verdict import arm_sentence, base_words, speed_sentences
from poise.training.config.documents import Document


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
