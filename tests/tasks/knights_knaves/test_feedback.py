"""Feedback in words: what is wrong, and nothing that the claims and the response do not say."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.tasks.knights_knaves import KnightsKnaves, generate
from poise.tasks.knights_knaves.puzzle import answer_text
from poise.tasks.knights_knaves.task import feedback_on_reply as feedback
from support.puzzles import GOLD, PEOPLE, holds, quick, response

CLAIMS = (("telling-truth", 2), ("lying", 0), ("and", ("telling-truth", 0), ("lying", 1)))  # the solution is GOLD


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (response(GOLD), "No claim contradicts the answer: it is right."),
        (
            response(GOLD.replace("Clara is a knight", "Clara is a knave")),
            "Ada's claim is false under this answer, but you call Ada a knight. "
            "Clara's claim is true under this answer, but you call Clara a knave.",
        ),
        (GOLD, "The tag <think> is missing."),
        (response(GOLD).replace("</answer>", ""), "The tag </answer> is missing."),
        (response(GOLD) + "<answer>", "The tag <answer> must occur once, not 2 times."),
        (f"<answer>{GOLD}</answer><think></think>", "The tags must come in this order: <think> </think> <answer> </"),
        (response("Ada is a knight"), "The answer leaves out Bruno and Clara. Write"),
        (response(""), "The answer leaves out Ada, Bruno, and Clara. Write"),
        (response("Ada is a knight, Ada is a knave, Bruno is a knave"), "The answer leaves out Clara."),
        (response(GOLD + " and not a knave"), "The answer must give 3 roles, one for each person, and no more."),
    ],
)
def test_what_is_said(text: str, said: str) -> None:
    assert feedback(PEOPLE, CLAIMS, text).startswith(said)


def test_the_task_says_it_without_looking_at_the_solution() -> None:
    task = KnightsKnaves(people="2-7")
    for problem in islice(task.problems("train", 0), 12):
        names, solution = problem.data["names"], problem.data["solution"]
        blind = replace(problem, data={key: problem.data[key] for key in ("names", "statements")})
        for roles in islice(product([True, False], repeat=len(names)), 40):
            text = response(answer_text(names, roles))
            said = task.feedback(blind, text)
            assert ("it is right" in said) == (list(roles) == solution)
            assert task.score(problem, text).correct == ("it is right" in said)
            assert len(said.split()) < 60


@quick
@given(st.integers(2, 6), st.integers(0, 10**6), st.data())
def test_every_person_named_is_one_whose_claim_contradicts(people: int, seed: int, data: st.DataObject) -> None:
    puzzle = generate(people, seed)
    roles = data.draw(st.lists(st.booleans(), min_size=people, max_size=people))
    said = feedback(puzzle.names, puzzle.statements, response(answer_text(puzzle.names, roles)))
    wrong = [i for i in range(people) if holds(puzzle.statements[i], roles) != roles[i]]
    assert [i for i in range(people) if f"{puzzle.names[i]}'s claim" in said] == wrong[:3]


@quick
@given(st.text())
def test_any_text_gets_feedback(text: str) -> None:
    for each in (text, response(text), text * 1000):
        assert len(feedback(PEOPLE, CLAIMS, each).split()) < 60


@pytest.mark.parametrize("text", ["<think>" * 10**5, "knight " * 10**5, "Ada is a " * 10**5, "\x00\ud800" * 10**5])
def test_long_texts_get_short_feedback(text: str) -> None:
    assert len(feedback(PEOPLE, CLAIMS, text)) < 300
    assert len(feedback(PEOPLE, CLAIMS, response(text))) < 300
