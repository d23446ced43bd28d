"""Worked solutions: complete responses, right or, with noise, sometimes wrong in the way a careless solver is."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from compact import compact
from paraphrases import Wording
from sentences import sentences

from poise._lib.errors import check_choice, check_range
from poise.tasks import Problem
from poise.tasks.knights_knaves import KnightsKnaves, Puzzle
from poise.tasks.knights_knaves.puzzle import answer_text

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


@dataclass
class WorkedKnights(KnightsKnaves):
    """Knights & Knaves with worked solutions in one style. ``style``, ``noise`` and ``wording``: see ``worked``."""

    style: str = "sentences"
    noise: float = 0.0
    wording: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("WorkedKnights", "style", self.style, STYLES)
        check_range("WorkedKnights", "noise", self.noise, 0.0, 1.0)
        check_range("WorkedKnights", "wording", self.wording, 0.0, 1.0)

    def demonstration(self, problem: Problem, seed: int = 0, noise: float | None = None) -> str:
        """A worked solution."""
        noise = self.noise if noise is None else noise
        return worked(Puzzle.of(problem), style=self.style, noise=noise, seed=seed, wording=self.wording)
