"""Worked solutions: right, short, and wrong as often as noise asks."""

from __future__ import annotations

import gzip
import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worked import STYLES, WorkedKnights, worked

from poise.tasks.knights_knaves import Puzzle, generate, read
from poise.tasks.knights_knaves.task import score_reply as score
from support.puzzles import public_rows, quick

pytestmark = pytest.mark.studies


def test_compact_solutions_by_hand() -> None:
    statements = (("lying", 1), ("and", ("lying", 0), ("lying", 1)))
    puzzle = Puzzle(("Ada", "Bruno"), statements, (True, False), "quiz", "x")
    answer = "<answer>(1) Ada is a knight (2) Bruno is a knave</answer>"
    assert worked(puzzle, style="compact") == (
        "<think>Ada knight Bruno knight\nAda false no\nBruno knave\nAda true ok Bruno false ok</think>" + answer
    )
    assert worked(puzzle, style="values") == (
        "<think>Ada knight Bruno knight\nAda false no\nBruno knave\nAda true ok Bruno false and true false ok</think>"
        + answer
    )


def test_compact_solutions_are_short() -> None:
    def tokens(text: str) -> int:
        for mark in ("<think>", "</think>", "<answer>", "</answer>", "(", ")"):
            text = text.replace(mark, f" {mark} ")
        return len(text.split())

    longest = {n: max(tokens(worked(generate(n, seed), style="compact")) for seed in range(300)) for n in (2, 3)}
    assert longest[2] <= 60
    assert longest[3] <= 120


@pytest.mark.parametrize("style", STYLES)
def test_noise_lowers_correctness_and_is_reproducible(style: str) -> None:
    some = [generate(3, seed) for seed in range(150)]

    def share(noise: float) -> float:
        texts = [worked(puzzle, style=style, noise=noise, seed=1) for puzzle in some]
        assert texts == [worked(puzzle, style=style, noise=noise, seed=1) for puzzle in some]
        results = [score(puzzle.names, puzzle.solution, text) for puzzle, text in zip(some, texts, strict=True)]
        assert all(result.parts["format"] == 1 and result.parts["answer"] > -2 for result in results)
        return sum(result.correct for result in results) / len(some)

    shares = [share(noise) for noise in (0.0, 0.05, 0.3)]
    assert shares[0] == 1.0
    assert shares[0] > shares[1] > shares[2]
    assert worked(some[0], style=style, noise=0.5, seed=1) != worked(some[0], style=style, noise=0.5, seed=3)


@pytest.mark.parametrize("style", STYLES)
@quick
@given(seed=st.integers(0, 10**9))
def test_all_noise_still_ends_in_an_answer(style: str, seed: int) -> None:
    puzzle = generate(2 + seed % 5, seed)
    for noise in (0.5, 1.0):
        assert score(puzzle.names, puzzle.solution, worked(puzzle, style=style, noise=noise)).reward in (3.0, -0.5)


@pytest.mark.parametrize("style", STYLES)
def test_solutions_are_right_and_the_noise_of_the_task_is_their_default(style: str) -> None:
    careless = WorkedKnights(people=3, noise=0.5, style=style)
    some = list(islice(careless.problems("train", 0), 40))
    assert not all(careless.score(problem, careless.demonstration(problem)).correct for problem in some)
    assert all(careless.score(problem, careless.demonstration(problem, noise=0.0)).correct for problem in some)


def test_public_rows_are_solved_as_they_say() -> None:
    for index, puzzle in enumerate(read(public_rows())[::9]):
        assert score(puzzle.names, puzzle.solution, worked(puzzle, style=STYLES[index % len(STYLES)])).reward == 3.0


def test_sentences_are_those_of_the_public_rows() -> None:
    path = public_rows()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        steps = [json.loads(line)["cot_repeat_steps"] for line in lines]
    for puzzle, expected in zip(read(path), steps, strict=True):
        told = worked(puzzle).split("</think>")[0].split("\n")[1:-1]  # without head and foot
        assert [line.replace(" that if ", " that If ") for line in told] == expected


def test_a_style_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="did you mean 'compact'"):
        WorkedKnights(style="compcat")
