"""Games and tools through the sampler: own tokens right to the token, and episodes that their limit cuts off."""

import json
from itertools import islice
from pathlib import Path

import pytest

from poise.models.loading import load_policy
from poise.models.prompts import announce, known_roles, knows_tools, schemas_of, template_arguments
from poise.sampling.sampler import Sampler
from poise.tasks.environment import Environment
from poise.tasks.frozenlake import FrozenLake
from poise.training.batches import drop_failed
from support.scripted import Scripted

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

QWEN = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
TEMPLATES = {
    "plain": None,  # the embedded model's own, which knows no tools
    "tools": (
        "{% if tools %}<|user|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content | trim }}<|end|>\n"
        "{% else %}<|user|>{{ m.role }}: {{ m.content | trim }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "qwen2.5": QWEN.replace("<|im_start|>", "<|user|>").replace("<|im_end|>", "<|end|>"),
}


class Counter:
    def reset(self, **_) -> str:
        self.total = 0
        return "Make the total 7. <|end|>"

    def add(self, number: int) -> str:
        """Add to the total.

        Args:
            number: What to add.
        """
        self.total += number
        return f" the total is now {self.total} <|end|>"

    def get_reward(self) -> float:
        return float(self.total == 7)


def call(number):
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'number': number}})}\n</tool_call>"


def lake():
    task = FrozenLake(side=3)
    problems = list(islice(task.problems("train", 0), 3))
    solutions = [task.episode(problem).solution() for problem in problems]
    solutions[1] = ["hm", *solutions[1]]  # a turn without a move
    return task, problems, solutions


def counter():
    task = Environment(Counter)
    replies = [[call(3), call(4), "Done."], [call(3) + call(4), "Done."], ["<tool_call>7</tool_call>", "No."]]
    return task, list(islice(task.problems("train", 0), 3)), replies


@pytest.mark.parametrize("game", [lake, counter])
@pytest.mark.parametrize("name", TEMPLATES)
def test_own_tokens_are_the_models_to_the_token(name, game):
    policy = load_policy("embedded", device="cpu")
    tokenizer = policy.tokenizer
    tokenizer.chat_template = TEMPLATES[name] or tokenizer.chat_template
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    task, problems, replies = game()
    engine = Scripted(policy, lambda number, turn, _: [*tokenizer(replies[number][turn])["input_ids"], end])
    samples = Sampler(policy, engine, task, max_tokens=200).play(problems, seed=0)
    assert [sample.score.correct for sample in samples] == [True, True, game is lake]
    for number, sample in enumerate(samples):
        own = [token for reply in replies[number] for token in [*tokenizer(reply)["input_ids"], end]]
        assert sample.tokens[sample.own].tolist() == own
        assert (sample.logp[sample.own] < 0).all()
        assert not sample.logp[~sample.own].any()
        ids = [*sample.prompt.tokens, *sample.tokens.tolist()]
        asked = [each.prompt.tokens for requests in engine.asked for each in requests if each.number == number]
        for prompt in asked:  # every reply followed exactly what the row has there
            assert ids[: len(prompt)] == list(prompt)
        assert whole(policy, task, sample) == tokenizer.decode(ids)
        said_end = sum(token == end for token in sample.tokens[~sample.own].tolist())
        assert said_end == (len(asked) - 1 if name == "qwen2.5" else 0)  # what tools say is text, whatever it says


def whole(policy, task, sample):
    """The dialogue as the chat template shows it, up to the model's last token."""
    tokenizer, episode = policy.tokenizer, task.episode(sample.problem)
    opening = episode.start()
    tools = schemas_of(episode.tools()) if hasattr(episode, "tools") else ()
    messages = announce(tokenizer, known_roles(tokenizer, [*opening, *sample.messages]), tools)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **template_arguments(tokenizer, tools))
    return text.rstrip("\n")


def test_the_templates_differ_in_what_they_know():
    tokenizer = load_policy("embedded", device="cpu").tokenizer
    known = []
    for template in TEMPLATES.values():
        tokenizer.chat_template = template or tokenizer.chat_template
        known.append(knows_tools(tokenizer))
    assert known == [False, True, True]


def test_an_episode_that_reaches_its_limit_is_scored_as_it_stands_and_counts_as_cut_off():
    policy = load_policy("embedded", device="cpu")
    end = policy.tokenizer.convert_tokens_to_ids("<|end|>")
    task, problems, replies = counter()

    def play(limit, count=3):
        engine = Scripted(policy, lambda n, t, _: [*policy.tokenizer(replies[n][t])["input_ids"], end])
        return Sampler(policy, engine, task, max_tokens=200, max_episode=limit).play(problems[:count], seed=0)

    whole = play(None)
    for limit in (len(whole[0].tokens) - 1, len(whole[0].tokens) - 4, 60):
        for sample, before in zip(play(limit), whole, strict=True):
            assert len(sample.tokens) <= limit
            assert sample.own[-1]
            assert sample.tokens.tolist() == before.tokens[: len(sample.tokens)].tolist()
            assert sample.finished == (len(before.tokens) <= limit)
            assert sample.score.failed is None
    assert [sample.score.reward for sample in whole] == [1, 1, 0]
    assert play(60, count=1)[0].score.reward == 0  # the second call was never made


def test_a_model_without_room_for_another_turn_cuts_the_episode_off():
    policy = load_policy("embedded", device="cpu")
    policy.base.config.max_position_embeddings = 400
    end = policy.tokenizer.convert_tokens_to_ids("<|end|>")
    task = FrozenLake(side=4, turns=64)
    problems = list(islice(task.problems("train", 0), 2))
    engine = Scripted(policy, lambda *_: [*policy.tokenizer("I think, and think.")["input_ids"], end])
    for sample in Sampler(policy, engine, task, max_tokens=20).play(problems, seed=0):
        assert 350 < len(sample.prompt.tokens) + len(sample.tokens) <= 400
        assert not sample.finished


def test_an_environment_that_fails_loses_its_own_episode():
    class Fragile(Counter):
        def reset(self, seed: int = 0, **row) -> str:
            if seed == lost:
                raise ConnectionError("gone")
            return super().reset(**row)

    policy = load_policy("embedded", device="cpu")
    end = policy.tokenizer.convert_tokens_to_ids("<|end|>")
    task = Environment(Fragile)
    problems = list(islice(task.problems("train", 0), 3))
    lost = problems[1].data["number"]
    engine = Scripted(policy, lambda _, turn, __: [*policy.tokenizer((call(7), "Done.")[turn])["input_ids"], end])
    samples = Sampler(policy, engine, task, max_tokens=200).play(problems, seed=0)
    assert [sample.score.failed for sample in samples] == [None, "Fragile.reset raised ConnectionError: gone", None]
    assert [sample.score.reward for sample in samples] == [1, 0, 1]
    kept, metrics = drop_failed(samples)
    assert [sample.problem.id for sample in kept] == [problems[0].id, problems[2].id]
    assert metrics == {"reward/failed": 1.0}
