"""Scores that are begun while responses are still being sampled."""

import re
import threading

import numpy as np
import pytest
import torch

from poise.sampling.cached_engine import CachedEngine
from poise.sampling.native.engine import NativeEngine
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, RewardError, Score, SingleTurn, TaskError, draw, heard, judge
from support.tiny_models import prompts, tiny

SEVEN = Problem("7", "", "", {})


class Lengths:
    """The reward is the number of tokens; it is known in which thread, and when, a response was scored."""

    name = "lengths"

    def __init__(self, concurrent):
        self.concurrent, self.threads = concurrent, []
        self.first = threading.Event()

    def score(self, problem, text):
        self.threads.append(threading.current_thread())
        self.first.set()
        return Score(float(len(text.split())), correct=problem.id == text.split()[0])


def policy():
    made = tiny("llama")
    made.decode = lambda tokens: " ".join(map(str, tokens))
    return made


def sample(task, engine, count=6, group=2, **settings):
    model = policy()
    asked = [Problem(str(i), str(i), "", {}) for i in range(count) for _ in range(group)]
    encoded = prompts(count)
    model.encode = lambda messages, _tools=(): encoded[int(messages[0]["content"])]
    sampler = Sampler(model, engine(model, **settings), task, max_tokens=40)
    samples = sampler.play(asked, seed=0)
    assert [sample.text for sample in samples] == [" ".join(map(str, s.tokens.tolist())) for s in samples]
    assert [sample.score.reward for sample in samples] == [len(sample.tokens) for sample in samples]
    assert [list(sample.prompt.tokens) for sample in samples] == [encoded[int(problem.id)] for problem in asked]
    return samples


@pytest.mark.parametrize("engine", [NativeEngine, CachedEngine])
@pytest.mark.parametrize("concurrent", [True, False])
def test_every_response_is_scored_once_and_in_its_place(engine, concurrent):
    task = Lengths(concurrent)
    sample(task, engine, batch=4)
    assert len(task.threads) == 12
    elsewhere = sum(thread is not threading.main_thread() for thread in task.threads)
    assert elsewhere == (12 if concurrent else 0)


def test_scoring_begins_before_sampling_ends(monkeypatch):
    from poise.sampling.native.scheduler import Scheduler

    task, seen, admit = Lengths(True), [], Scheduler._admit

    def look(self):
        limits = [request.max_tokens for request in self.requests]
        ended = any(self.stopped) or any(count == most for count, most in zip(self.counts, limits, strict=True))
        if ended and self.waiting and not seen:
            seen.append(task.first.wait(60))  # for as long as no other is sampled; only a failing test waits so long
        admit(self)

    monkeypatch.setattr(Scheduler, "_admit", look)
    sample(task, NativeEngine, count=8, group=2, batch=2)
    assert seen == [True]


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_verifier_that_fails_is_heard(concurrent):
    task = Lengths(concurrent)
    task.score = lambda *_: 1 / 0
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        sample(task, NativeEngine)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e31, -1e300])
def test_a_reward_that_float32_cannot_average_is_refused(reward):
    task = Lengths(concurrent=False)
    task.score = lambda *_: Score(reward, False)
    refusal = rf"is {re.escape(str(reward))} \(problem 7\): rewards must be finite, and between -1e\+30"
    with pytest.raises(RewardError, match=refusal):
        judge(task, SEVEN, SingleTurn(task, SEVEN))


@pytest.mark.parametrize(
    ("score", "refusal"),
    [
        (None, "must be a poise.tasks.Score"),
        (1.0, "must be a poise.tasks.Score"),
        (Score(None, False), "reward must be a number, got None"),
        (Score("1", False), "reward must be a number, got '1'"),
        (Score(torch.ones(2), False), "reward must be a number"),
        (Score(1.0, None), "correct must be True or False, got None"),
        (Score(1.0, "no"), "correct must be True or False, got 'no'"),
        (Score(1.0, torch.ones(2)), "correct must be True or False, got tensor"),
        (torch.tensor([True, False]), "True or False, got tensor"),
        ("yes", "True or False, got 'yes'"),
        (Score(1.0, True, None), "parts must be a dict"),
        (Score(1.0, True, {"format": "x"}), r"parts\['format'\] must be a number"),
        (Score(1.0, True, {}, [1]), "answer must be text or None"),
        (Score(1.0, True, {}, ("a", [1])), "answer must be text or None"),
    ],
)
def test_a_score_of_other_types_is_refused(score, refusal):
    task = Lengths(concurrent=False)
    task.score = lambda *_: score
    with pytest.raises(RewardError, match=rf"the score of task 'lengths' \(problem 7\): .*{refusal}"):
        judge(task, SEVEN, SingleTurn(task, SEVEN))


@pytest.mark.parametrize("right", [True, np.bool_(True), torch.tensor(True), torch.tensor([True])])
def test_a_verdict_is_a_score(right):
    task = Lengths(concurrent=False)
    for verdict, score in ((right, Score(1.0, True)), (right & False, Score(0.0, False))):
        task.score = lambda *_, verdict=verdict: verdict
        assert judge(task, SEVEN, SingleTurn(task, SEVEN)) == score


@pytest.mark.parametrize("said", ["text", 5, ["x"], [{"content": "x"}], [{"role": "user", "content": None}]])
def test_what_an_episode_says_is_a_list_of_messages(said):
    with pytest.raises(RewardError, match=r"task 'lengths' must be a list of dicts.*\(problem 7\)"):
        heard(Lengths(concurrent=False), SEVEN, said)


def test_any_tokenizer_can_read_what_an_episode_says():
    said = [{"role": "tool", "content": "file \udcff", "name": "list"}]
    assert heard(Lengths(concurrent=False), SEVEN, said) == [{"role": "tool", "content": "file ?", "name": "list"}]
    assert heard(Lengths(concurrent=False), SEVEN, None) == []


@pytest.mark.parametrize("number", [np.float32(1), np.bool_(True), np.int64(1), torch.tensor(1.0), True, 1])
def test_numbers_of_other_libraries_become_pythons_own(number):
    task = Lengths(concurrent=False)
    task.score = lambda *_: Score(number, number, {"format": number})
    found = judge(task, SEVEN, SingleTurn(task, SEVEN))
    assert found == Score(1.0, True, {"format": 1.0})
    assert [type(value) for value in (found.reward, found.correct, found.parts["format"])] == [float, bool, float]


def test_problems_that_end_or_have_no_text_are_refused():
    class Few(Lengths):
        prompt = "question"

        def problems(self, *_):
            return iter([Problem("7", self.prompt, "1", {})])

    task = Few(concurrent=False)
    assert len(draw(task, "train", 0, 1)) == 1
    with pytest.raises(TaskError, match=r"'lengths' has 1 problems of split train, but 2 are needed"):
        draw(task, "train", 0, 2)
    task.prompt = 3
    with pytest.raises(TaskError, match=r"prompt of problem 7 must be text, got 3"):
        draw(task, "train", 0, 1)
