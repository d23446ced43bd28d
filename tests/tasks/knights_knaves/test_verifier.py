"""The verifier: gold answers, all kinds of wrong ones, hostile text."""

from __future__ import annotations

import re
import string
import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.tasks.knights_knaves import generate
from poise.tasks.knights_knaves.puzzle import answer_text, role
from poise.tasks.knights_knaves.task import score_reply as score
from support.puzzles import GOLD, PEOPLE, SOLUTION, quick, response


@pytest.mark.parametrize("people", range(2, 9))
def test_the_verifier_accepts_gold(people: int) -> None:
    for seed in range(12):
        puzzle = generate(people, seed, depth=1 + seed % 3)
        result = score(puzzle.names, puzzle.solution, response(answer_text(puzzle.names, puzzle.solution)))
        assert (result.reward, result.correct) == (3.0, True)


@pytest.mark.parametrize(
    ("text", "total"),
    [
        (response(GOLD), 3.0),
        (response(GOLD.upper()), 3.0),
        ("Well. " + response("It is clear: " + GOLD + ". That is all.") + " Bye.", 3.0),
        (response("Clara is a knight, Bruno is a knave, Ada is a knight"), 3.0),
        (response(GOLD.replace("Bruno is a knave", "Bruno is a knight")), -0.5),
        (response("Ada is a knight and Bruno is a knave"), -1.0),  # someone is missing
        (response(GOLD + " and not a knave"), -1.0),  # one role too many
        (response(GOLD.replace("Clara is", "Clara was")), -1.0),
        (response(GOLD.replace("Ada", "Adam")), -1.0),
        (response(GOLD.replace("Ada", "Canada")), -1.0),
        (response("Ada is a knight, Ada is a knave, Bruno is a knave"), -1.0),  # said twice of Ada
        (response("Ada and Clara are knights, Bruno is a knave"), -1.0),
        (response(""), -1.0),
        (GOLD, -3.0),
        ("", -3.0),
        (response(GOLD).replace("</answer>", ""), -3.0),
        (response(GOLD) + "<answer>", -3.0),
        (response(GOLD, think="a<think>b"), -3.0),
        (f"<answer>{GOLD}</answer><think></think>", -3.0),
        (f"<think><answer>{GOLD}</answer></think>", -3.0),
        (response(GOLD).replace("<think>", "<THINK>"), -3.0),
    ],
)
def test_golden_totals(text: str, total: float) -> None:
    result = score(PEOPLE, SOLUTION, text)
    assert result.reward == total == sum(result.parts.values())
    assert result.correct == (total == 3.0)
    assert set(result.parts) == {"format", "answer"}
    assert (result.answer is None) == (total in (-1.0, -3.0))


def lookalikes() -> list[tuple[str, str]]:
    """Pairs of a character outside ASCII and the ASCII letter that case-insensitive matching takes it for."""
    letters = re.compile("[a-z]", re.IGNORECASE)
    found = [chr(code) for code in range(128, sys.maxunicode + 1) if letters.match(chr(code))]
    return [(c, letter) for c in found for letter in string.ascii_lowercase if re.match(letter, c, re.IGNORECASE)]


def test_letters_outside_ascii_are_never_taken_for_ascii_ones() -> None:
    pairs = lookalikes()
    assert {c for c, _ in pairs} >= set("\u0130\u0131\u017f\u212a")
    names = ("Kasi", "Skip")
    for roles in product((True, False), repeat=2):
        words = [f"{name} is a {role(knight)}" for name, knight in zip(names, roles, strict=True)]
        for c, letter in pairs:
            for at, word in enumerate(words):
                for place in re.finditer(letter, word, re.IGNORECASE):
                    said = [*words]
                    said[at] = word[: place.start()] + c + word[place.end() :]
                    for solution in product((True, False), repeat=2):
                        assert score(names, solution, response(", ".join(said))).reward == -1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (response(GOLD), "knight,knave,knight"),
        (response("clara IS A KNIGHT, so: Bruno is a knave; Ada is a knight"), "knight,knave,knight"),
        (response(GOLD.replace("Ada is a knight", "Ada is a knave")), "knave,knave,knight"),
        (response("Ada is a knight"), None),
        (GOLD, None),
    ],
)
def test_equal_answers_are_equal_texts(text: str, answer: str | None) -> None:
    assert score(PEOPLE, SOLUTION, text).answer == answer


@pytest.mark.parametrize(
    "garbage",
    [
        "<think>" * 150_000,
        "\0" * 1_000_000,
        response("knight " * 150_000),
        response("Ada is a " * 110_000),
        response(" " * 1_000_000),
        response("Ada is a knight" + "Ada is a " * 100_000 + "knave knave"),
        response(GOLD, think="<" * 1_000_000),
        "<think></think><answer>" + "(" * 1_000_000 + "</answer>",
        response("\ud800\udfff Ada is a knight " + "\U0001f600" * 200_000),
    ],
)
def test_a_megabyte_of_garbage_is_scored_at_once(garbage: str) -> None:
    """In milliseconds. Were the time quadratic in the length, this test would not end within the hour."""
    assert score(PEOPLE, SOLUTION, garbage).reward in (3.0, -0.5, -1.0, -3.0)


@quick
@given(st.text())
def test_any_text_gets_one_of_the_four_totals(text: str) -> None:
    for candidate in (text, response(text)):
        assert score(PEOPLE, SOLUTION, candidate).reward in (-0.5, -1.0, -3.0)


@pytest.mark.parametrize(
    "names",
    [
        (".*", "(a+)+$", "[x"),
        ("A.B", "A+B", "A|B"),
        ("Ann", "Mary Ann", "Ann-Marie"),
        ("Zoë", "Øyvind", "李雷"),
        ("a\\", "{b}", "c?"),
    ],
)
def test_names_may_hold_any_character(names: tuple[str, ...]) -> None:
    for seed in range(10):
        puzzle = generate(3, seed, names=names)
        assert score(puzzle.names, puzzle.solution, response(answer_text(puzzle.names, puzzle.solution))).reward == 3.0
    wrong = response(" ".join(f"{name} is a knight" for name in names))
    assert score(names, (True, False, True), wrong).reward == -0.5
    assert score(("A.B", "C"), (True, True), response("AxB is a knight, C is a knight")).reward == -1.0
