"""Dialogues of several turns with an engine, for which it may keep its keys, or has to read everything again."""

from poise.sampling.draws import Sampling
from poise.sampling.requests import Request, session
from support.sampled import ask
from support.tiny_models import VOCABULARY, prompts

GREEDY = Sampling(temperature=0.0)


class Anew:
    """An engine without a session of its own, which therefore reads every dialogue again."""

    def __init__(self, engine):
        self.policy, self.sample = engine.policy, engine.sample


def said_after(turn, i):
    """What the environment says: of different lengths, and the same to some."""
    return [6 + (7 * turn + 3 * (i % 2) + k) % (VOCABULARY - 6) for k in range(1 + (5 * turn + i % 2) % 9)]


def dialogues(engine, sampling=GREEDY, *, episodes=7, turns=4, max_tokens=9, length=None):
    """Episodes that end at different turns, with replies of different limits: the responses of each turn, the session.

    Of ``episodes`` = 7 and ``turns`` = 4, these take part in each turn: 7, 7, 5, 3.
    """
    dialogue, live, outs = [list(prompt) for prompt in prompts(episodes)], list(range(episodes)), []
    with session(engine, length) as calls:
        for turn in range(turns):
            asked = [
                Request(
                    dialogue[i], max_tokens - (i + turn) % 3, (5, 11, 17), 10 + i, keep=True,
                    continues=10 + i if turn else None,
                )
                for i in live
            ]  # fmt: skip
            out = ask(calls, asked, sampling, seed=turn)
            outs.append(out)
            for row, i in enumerate(live):
                dialogue[i] += out.tokens[row][out.mask[row]].tolist() + said_after(turn, i)
            live = [i for i in live if turn < 1 + i % turns]
    return outs, calls
