"""A task of two turns."""

from dataclasses import dataclass
from itertools import count

from poise.tasks import Problem, Score


@dataclass(frozen=True)
class Twice:
    """Two turns: whatever the model says first, it is asked again. The reward is the length of both replies."""

    name: str = "twice"

    def problems(self, split, seed):
        del split
        return (Problem(f"{seed}/{i}", f"Is A a knight {i % 3}?", "all", {}) for i in count())

    def episode(self, problem):
        return TwiceEpisode(problem)


class TwiceEpisode:
    def __init__(self, problem):
        self.problem, self.replies = problem, []

    def start(self):
        return [{"role": "user", "content": self.problem.prompt}]

    def step(self, reply):
        self.replies.append(reply)
        return [{"role": "user", "content": " Are you sure? <|end|> "}] if len(self.replies) == 1 else []

    def score(self):
        return Score(float(sum(map(len, self.replies))), correct=len(self.replies[0]) % 2 == 0)
