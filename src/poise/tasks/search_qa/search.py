"""BM25 over a few passages, in plain Python."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

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
