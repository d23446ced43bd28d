"""The words of worked solutions: for every kind of step several ways to say it, of which the first is the plain one.

A language model is unsure of many tokens that do not matter: which synonym, which turn of phrase. Worked solutions in a
single template teach a model no such tokens. ``Wording`` brings them in, and says the same thing in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

Choose = Callable[[Sequence[str]], str]

# Whole sentences.
HEAD = (
    "Let us think step by step: assume a role for each person in turn and see whether it leads to a contradiction.",
    "Let us go through the people one by one, assume a role for each, and look for contradictions.",
    "We try a role for each person in turn and check whether anything contradicts it.",
    "Step by step: give each person a role, and see whether that can be.",
    "I will assume roles one after another and check each of them for contradictions.",
    "One person at a time, we assume a role and test whether it is possible.",
    "The way to solve this is to assume roles in turn until nothing contradicts them.",
)
POSSIBLE = (
    "Assume {name} is a {role}. No contradiction is found in their {false}claim that {claim}.",
    "Suppose {name} is a {role}. Nothing stands against their {false}claim that {claim}.",
    "Say {name} is a {role}: their {false}claim that {claim} leads to no contradiction.",
    "Let {name} be a {role}. Then there is no conflict with the {false}claim that {claim}.",
    "If {name} is a {role}, nothing contradicts the {false}claim that {claim}.",
    "Take {name} to be a {role}. So far that suits their {false}claim that {claim}.",
    "Try {name} as a {role}. It goes together with the {false}claim that {claim}.",
)
IMPOSSIBLE = (
    "{name} cannot be a {role}, because this would contradict the {false}claim of {owner} that {claim}.",
    "{name} is not a {role}, since that contradicts the {false}claim of {owner} that {claim}.",
    "It is impossible for {name} to be a {role}: there is the {false}claim of {owner} that {claim}.",
    "Were {name} a {role}, this would not go together with the {false}claim of {owner} that {claim}.",
    "If {name} were a {role}, we would have a conflict with the {false}claim of {owner} that {claim}.",
    "We can rule out that {name} is a {role}, as it clashes with the {false}claim of {owner} that {claim}.",
    "That {name} is a {role} does not agree with the {false}claim of {owner} that {claim}.",
)
BACK = (
    "We have exhausted all possibilities for {whom}, so let us go back and reconsider {name}.",
    "Nothing is left to try for {whom}, so we return to {name}.",
    "No role works for {whom}; the mistake must be earlier, with {name}.",
    "Both roles fail for {whom}. Back to {name}.",
    "There is no way on with {whom}, so we think again about {name}.",
    "With {whom} we are at a dead end and have to reconsider {name}.",
    "All roles of {whom} are ruled out, so it is the role of {name} that has to change.",
)
FOUND = (
    "This leads to a feasible solution.",
    "So we have a solution.",
    "Everything fits: this is the solution.",
    "All claims are accounted for.",
    "With that, no contradiction is left.",
    "These roles are consistent.",
    "That settles it.",
)
GIVE_UP = (
    "We have exhausted all possibilities, so let us settle for the last one.",
    "Nothing is left to try, so we keep the last attempt.",
    "No assignment seems to work; we take the last one.",
    "Everything has been ruled out, so the last one has to do.",
    "We are out of options and stay with the last one.",
    "There is no other way left: let it be the last one.",
    "All attempts have failed, so the latest becomes our answer.",
)

# Of the compact style, single words. No word stands for two things, so that each can be told from the others.
TRY = ("{roles}", "try {roles}", "say {roles}", "let {roles}", "suppose {roles}", "take {roles}", "maybe {roles}")
TRUE = ("true", "right", "correct", "so", "yes", "indeed", "truth")
FALSE = ("false", "wrong", "incorrect", "untrue", "lie", "fiction", "nonsense")
FITS = ("ok", "fine", "fits", "good", "agrees", "works", "possible")
CLASH = ("no", "bad", "clash", "fails", "stop", "conflict", "impossible")


class Wording:
    """How a solution is worded: each step is put in other words than the plain ones with probability ``share``.

    Its random numbers are its own, so that the words never change what is said.
    """

    def __init__(self, share: float, rng: Random) -> None:
        self.share, self.rng = share, rng

    def step(self) -> Choose:
        """What chooses the words of one step: the first form, or, where the step varies, any of them."""
        return self.rng.choice if self.rng.random() < self.share else _first


def _first(forms: Sequence[str]) -> str:
    return forms[0]
