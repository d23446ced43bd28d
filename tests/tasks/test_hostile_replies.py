"""Any text is a reply: every task of several turns answers it, or ends, and has a score."""

from itertools import islice

import pytest

from poise import tasks
from poise.tasks.environment import Environment


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
