"""Any text is a reply: every task of several turns answers it, or ends, and has a score."""

from itertools import islice

import pytest

from poise import rewards, tasks
from poise.tasks.environment import Environment
from poise.tasks.grid import moves_in
from poise.tasks.rewards import answers
from poise.tasks.tools import calls_in


class Echo:
    def reset(self, **_) -> str:
        return "Say something."

    def echo(self, text: str) -> str:
        """Say it again.

        Args:
            text: Anything.
        """
        return text

    def get_reward(self) -> float:
        return 0.0


def task_of(name):
    return Environment(Echo) if name == "environment" else tasks.get(name)


REPLIES = {
    "nothing": "",
    "garbage": "".join(chr(33 + i * 7919 % 90) for i in range(10**6)),
    "tags": "<tool_call>" * 10**5,
    "closed": "<tool_call></tool_call>" * 10**5,
    "deep": "<tool_call>" + "[" * 10**6 + "</tool_call>",
    "deep objects": '{"name":' * 10**5,
    "answers": "<answer>" * 10**5 + "</answer>" * 10**5,
    "thoughts": "</think>" * 10**5 + "up",
    "open thoughts": "<think>" * 10**5 + "up",
    "moves": "up " * 3 * 10**5,
    "nul": "\x00\ud800\u202e" * 10**4,
    "large number": '{"name": "calculator", "parameters": {"expression": "' + "9*" * 10**5 + '9"}}',
    "other methods": '{"name": "reset", "parameters": {}}',
    "private methods": '{"name": "__init__", "parameters": {}}',
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
@pytest.mark.parametrize("name", ["frozenlake", "sokoban", "search-qa", "environment"])
def test_any_reply_is_answered_and_scored(name, reply):
    task = task_of(name)
    episode = task.episode(next(islice(task.problems("train", 0), 1)))
    episode.start()
    said = [{"content": ""}]
    for _ in range(3):
        said = episode.step(reply) if said else said
        assert all(len(message["content"]) < 5000 for message in said)
    score = episode.score()
    assert len(episode.feedback().split()) < 60
    assert len(episode.feedback()) < 500
    assert score.reward in (0.0, 1.0)
    assert score.failed is None


@pytest.mark.parametrize(
    ("reply", "counts"),
    [
        ("{}", True),
        ("<think>hm</think>{}", True),
        ("hm</think>{}", True),  # a template may have opened the thought
        ("<think>{}", False),
        ("<think>hm</think>{}<think>or not", False),
        ("<think>{}</think>", False),
    ],
)
def test_nothing_in_a_thought_counts_and_nothing_while_one_is_open(reply, counts):
    def said(text):
        return reply.format(text)

    assert (moves_in(said("up")) == ["up"]) is counts
    assert len(calls_in(said('<tool_call>{"name": "echo"}</tool_call>'))) == counts
    assert (answers.last_answer(said("<answer>5</answer>")) == "5") is counts
    for spec in ("exact", "number", "math", "choice"):
        gold = "B" if spec == "choice" else "5"
        assert rewards.get(spec)(completions=[said(f"<answer>{gold}</answer>")], answer=[gold]) == [float(counts)]
    task = tasks.get("search-qa")
    problem = next(task.problems("train", 0))
    episode = task.episode(problem)
    episode.start()
    episode.step(said(f"<answer>{problem.data['answer']}</answer>"))
    assert episode.score().correct is counts
