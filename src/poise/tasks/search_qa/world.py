"""A made-up world: towns, people, firms and products, a passage about each, and questions that join their facts.

Every world has its own names and numbers, so that no answer can be known from another world.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

LONGEST_QUERY = 400  # characters that are read
_WORD = re.compile(r"[a-z0-9]+")
_K1, _B = 1.2, 0.75


class Index:
    """Passages that can be searched."""

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = list(passages)
        self.counts = [Counter(_words(passage)) for passage in passages]
        lengths = [counts.total() for counts in self.counts]
        mean = sum(lengths) / len(lengths)
        self.norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]
        self.holding = Counter(word for counts in self.counts for word in counts)

    def search(self, query: str, count: int = 3) -> list[str]:
        """The passages that fit best, best first; none that shares no word with the query."""
        words = set(_words(query[:LONGEST_QUERY]))
        scored = [(-self._score(words, at), at) for at in range(len(self.passages))]
        return [self.passages[at] for score, at in sorted(scored)[:count] if score < 0]

    def _score(self, words: set[str], at: int) -> float:
        counts, total = self.counts[at], len(self.passages)
        score = 0.0
        for word in sorted(words & counts.keys()):  # sorted: sums of floats depend on their order
            rarity = math.log(1 + (total - self.holding[word] + 0.5) / (self.holding[word] + 0.5))
            score += rarity * counts[word] * (_K1 + 1) / (counts[word] + self.norms[at])
        return score


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


# A relation leads from one thing to the next: how a passage says it, and how it is asked for.
SENTENCES = {
    "founded": "{0} was founded in {1}.",
    "region": "{0} lies in {1}.",
    "born": "{0} was born in the year {1}.",
    "birthplace": "{0} was born in the town of {1}.",
    "founder": "{0} was started by {1}.",
    "product": "{0} makes the {1}.",
    "price": "The {0} costs {1} crowns.",
}
PHRASES = {
    "founded": "the year in which {} was founded",
    "region": "the region in which {} lies",
    "born": "the year in which {} was born",
    "birthplace": "the town in which {} was born",
    "founder": "the person who started {}",
    "product": "the product that {} makes",
    "price": "the price of {}",
}
CHAINS: dict[int, tuple[tuple[str, ...], ...]] = {  # by the number of passages that must be found
    1: (("founded",), ("region",), ("born",), ("birthplace",), ("price",)),
    2: (("birthplace", "founded"), ("birthplace", "region"), ("founder", "born"), ("product", "price")),
    3: (("founder", "birthplace", "founded"), ("founder", "birthplace", "region")),
}
NUMBERS = ("founded", "born", "price")  # relations that end in a number
_OF = {"founded": "town", "region": "town", "born": "person", "birthplace": "person", "founder": "firm",
       "product": "firm", "price": "product"}  # fmt: skip
_STARTS = [*"bdfghklmnprstvz", "br", "dr", "gr", "kl", "st", "tr"]
_VOWELS = "aeiou"
_ENDS = [*"lnrsmk", "ld", "nd", "rt", "sk"]


@dataclass(frozen=True)
class Question:
    """What is asked, the right answer, and the way to it: from a thing along relations, then perhaps a sum."""

    text: str
    answer: str
    hops: int
    start: str
    chain: tuple[str, ...]
    sum: str | None = None  # with {} for what the chain leads to


class World:
    """Things by kind, and their facts."""

    def __init__(self, number: int, size: int) -> None:
        rng = Random(f"world {number} {size}")
        self.names: set[str] = set()
        self.things: dict[str, list[str]] = {
            "town": [self._name(rng, 2) for _ in range(size)],
            "person": [f"{self._name(rng, 2)} {self._name(rng, 2)}" for _ in range(size)],
            "firm": [f"{self._name(rng, 2)} Works" for _ in range(size)],
            "product": [f"{self._name(rng, 2).lower()} {rng.choice(['lamp', 'clock', 'kettle'])}" for _ in range(size)],
        }
        regions = [f"{self._name(rng, 2)} Valley" for _ in range(max(2, size // 2))]
        self.facts: dict[tuple[str, str], str] = {}
        for town in self.things["town"]:
            self.facts[town, "founded"] = str(rng.randint(900, 1700))
            self.facts[town, "region"] = rng.choice(regions)
        for person in self.things["person"]:
            self.facts[person, "born"] = str(rng.randint(1800, 1990))
            self.facts[person, "birthplace"] = rng.choice(self.things["town"])
        for firm, person, product in zip(*(self.things[kind] for kind in ("firm", "person", "product")), strict=True):
            self.facts[firm, "founder"] = person
            self.facts[firm, "product"] = product
            self.facts[product, "price"] = str(rng.randint(2, 99))
        self.passages = [self._passage(thing) for things in self.things.values() for thing in things]
        rng.shuffle(self.passages)
        self.index = Index(self.passages)

    def _name(self, rng: Random, syllables: int) -> str:
        while True:
            parts = [rng.choice(_STARTS) + rng.choice(_VOWELS) for _ in range(syllables)]
            name: str = ("".join(parts) + rng.choice(_ENDS)).capitalize()
            if name not in self.names:
                self.names.add(name)
                return name

    def _passage(self, thing: str) -> str:
        said = [SENTENCES[relation].format(thing, value) for (of, relation), value in self.facts.items() if of == thing]
        return " ".join(said)

    def question(self, rng: Random, hops: int, sums: float) -> Question:
        """A question that takes so many passages; with chance ``sums`` it ends in a calculation."""
        chain = rng.choice(CHAINS[hops])
        start = rng.choice(self.things[_OF[chain[0]]])
        asked, found = start, start
        for relation in chain:
            asked, found = PHRASES[relation].format(asked), self.facts[found, relation]
        if chain[-1] in NUMBERS and rng.random() < sums:
            factor = rng.randint(12, 99)
            text, formula, answer = f"{factor} times {asked}", f"{factor} * {{}}", str(factor * int(found))
            return Question(f"What is {text}?", answer, hops, start, chain, formula)
        return Question(f"What is {asked}?", found, hops, start, chain)


@lru_cache(maxsize=64)
def world(number: int, size: int) -> World:
    """The world of that number."""
    return World(number, size)


def follow(passages: str, thing: str, relation: str) -> str | None:
    """What passages say of a thing, or None."""
    before, behind = SENTENCES[relation].format(thing, "\0").split("\0")
    match = re.search(re.escape(before) + r"([^.]{1,60})" + re.escape(behind), passages)
    return match[1] if match else None
