"""Worked solutions: complete responses, right or, with noise, sometimes wrong in the way a careless solver is."""

from __future__ import annotations

from random import Random

from poise._lib.errors import check_choice, check_range
from poise.tasks.knights_knaves.compact import compact
from poise.tasks.knights_knaves.paraphrases import Wording
from poise.tasks.knights_knaves.puzzle import Puzzle, answer_text
from poise.tasks.knights_knaves.sentences import sentences

STYLES = ("sentences", "compact", "values")


def worked(puzzle: Puzzle, *, style: str = "sentences", noise: float = 0.0, seed: int = 0, wording: float = 0.0) -> str:
    """A complete response: the search for the solution between the think tags, then the answer.

    Each verdict of the search is misread with probability ``noise``, and the search goes on from the misread verdict,
    so that it may end in a wrong answer; where nothing is left to try, the last try becomes the answer. Without noise
    the answer is always right. Each step is put in other words with probability ``wording``: at 0 all solutions are in
    one template, at 1 every step is drawn from at least six paraphrases; what is said, and the answer, stay the same.
    The same puzzle, settings and seed give the same response.
    """
    check_choice("worked", "style", style, STYLES)
    check_range("worked", "noise", noise, 0.0, 1.0)
    check_range("worked", "wording", wording, 0.0, 1.0)
    rng = Random(f"worked {seed} {puzzle.id}")

    def misread() -> bool:
        return rng.random() < noise

    words = Wording(wording, Random(f"wording {seed} {puzzle.id}"))
    if style == "sentences":
        steps, roles = sentences(puzzle, misread, words)
    else:
        steps, roles = compact(puzzle, misread, words, values=style == "values")
    return f"<think>{steps}</think><answer>{answer_text(puzzle.names, roles)}</answer>"
