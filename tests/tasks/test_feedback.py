"""Feedback in words: the plain sentence, mistakes of a task's own code, and quotations."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise._lib.errors import LONGEST_QUOTE as LONGEST
from poise._lib.errors import quote
from poise.tasks import Problem, RewardError, Score, SingleTurn, begin, feedback_on

PROBLEM = Problem("p1", "?", "all", {})


@dataclass(frozen=True)
class Mine:
    name = "mine"
    says: object = None

    def score(self, problem, text):  # noqa: ARG002
        return Score(0.5, False)


class Talks(Mine):
    def feedback(self, problem, text):
        if isinstance(self.says, Exception):
            raise self.says
        return f"{text} to {problem.id}" if self.says is None else self.says


FAILED = Score(0.0, False)


def on(task, score=FAILED, turns=3):
    episode = begin(task, PROBLEM)
    episode.step("hello")
    return feedback_on(task, PROBLEM, episode, score, turns)


def test_a_task_without_feedback_gets_a_plain_sentence():
    assert on(Mine()) == "The attempt failed: reward 0.00 after 3 turns."
    assert on(Mine(), Score(1, True), 1) == "The attempt succeeded: reward 1.00 after 1 turn."
    assert on(Talks("")) == "The attempt failed: reward 0.00 after 3 turns."

    class Silent(SingleTurn):
        feedback = None

    del Silent.feedback
    assert feedback_on(Mine(), PROBLEM, Silent(Mine(), PROBLEM), Score(0, False), 2).startswith("The attempt failed")


def test_a_task_says_it_in_its_own_words_up_to_a_limit():
    assert on(Talks()) == "hello to p1"
    assert len(on(Talks("x" * 10**6))) == 2000


def test_mistakes_name_the_task_and_the_problem():
    with pytest.raises(
        RewardError,
        match=r"the feedback of task 'mine' raised ValueError: oh \(.*test_feedback\.py, line \d+\) \(problem p1\)",
    ):
        on(Talks(ValueError("oh")))

    class Numbers(SingleTurn):
        def feedback(self):
            return 3

    with pytest.raises(RewardError, match=r"the feedback of task 'mine' must be text, got 3 \(problem p1\)"):
        feedback_on(Mine(), PROBLEM, Numbers(Mine(), PROBLEM), Score(0, False), 1)
    with pytest.raises(RewardError, match=r"the feedback of task 'mine' must be text, got b'no' \(problem p1\)"):
        on(Talks(b"no"))


def test_any_tokenizer_can_read_feedback():
    assert on(Talks("half a pair: \ud800")) == "half a pair: ?"


@given(st.text() | st.text(alphabet="\x00\ud800\n \u202e", min_size=50).map(lambda text: text * 50))
def test_quotations_are_one_short_line_that_can_be_printed(text):
    said = quote(text)
    assert said.isprintable()
    assert len(said) <= LONGEST + len('"..."')
    assert said[0] == said[-1] == '"'
    said.encode()


def test_quotations_say_where_they_were_cut():
    assert quote("a  b\nc") == '"a b c"'
    assert quote("x" * 61) == '"' + "x" * 60 + '..."'
    assert quote(" " * 1000) == '"..."'
    assert quote("abcdef", 3) == '"abc..."'
