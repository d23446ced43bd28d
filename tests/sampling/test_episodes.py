"""Episodes of several turns, and algorithms of one's own, through the public protocols alone."""

from dataclasses import dataclass, replace
from itertools import islice

import pytest
import torch
import transformers

import poise
from poise import Phase, objective
from poise.models.loading import load_policy
from poise.models.master_weights import MasterWeights
from poise.models.policy import Policy
from poise.runs.subscribers.recorder import environment_turns
from poise.sampling import algorithms
from poise.sampling.algorithms import Grpo, Trajectory
from poise.sampling.draws import Sampling
from poise.sampling.native.engine import NativeEngine
from poise.sampling.requests import Completion
from poise.sampling.sampler import Sampler
from poise.tasks import RewardError
from poise.tasks.rewards import TrainerState
from poise.training.batches import group_numbers, make_batch
from poise.training.update import UpdatePlan, backward
from support.twice import Twice

TEMPLATES = {
    "plain": None,  # the embedded model's own
    "chatml": (
        "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
    ),
    "break before the end": (
        "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}\n<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
    ),
    "trimmed": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content | trim }}<|end|>"
        "{% else %}<|user|>\n\n{{ m.content | trim }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}


class Script:
    """An engine that says what it is told to, turn after turn."""

    def __init__(self, policy, turns):
        self.policy, self.turns, self.asked = policy, iter(turns), []

    def sample(self, requests, sampling, seed, done=None):
        del sampling, seed, done
        self.asked.append([list(request.prompt.tokens) for request in requests])
        rows = [torch.tensor(row) for row in next(self.turns)]
        logp = [-torch.arange(1.0, len(row) + 1) for row in rows]
        ended = [int(row[-1]) in self.policy.end_tokens for row in rows]
        return [Completion(row, p, -p, end) for row, p, end in zip(rows, logp, ended, strict=True)]


def embedded(template=None):
    policy = load_policy("embedded", device="cpu")
    if template:
        policy.tokenizer.chat_template = template
    return policy


@pytest.mark.parametrize("name", TEMPLATES)
def test_own_tokens_are_the_models_to_the_token(name):
    policy = embedded(TEMPLATES[name])
    end = policy.tokenizer.convert_tokens_to_ids("<|end|>")
    assert end in policy.end_tokens
    words = [policy.tokenizer(text)["input_ids"] for text in ("A is a knight.", "no", "B is a knave", "yes, A")]
    line = "\n" if name == "break before the end" else ""  # the template's, which the model writes
    ending = policy.tokenizer(f"{line}<|end|>")["input_ids"]
    first, second = [[*words[0], *ending], words[1]], [[*words[2], *ending], [*words[3], *ending]]  # one was cut off
    engine = Script(policy, [first, second])
    problems = list(islice(Twice().problems("train", 0), 2))
    samples = Sampler(policy, engine, Twice(), max_tokens=9).play(problems, seed=0)
    for sample, a, b, asked in zip(samples, first, second, engine.asked[1], strict=True):
        assert sample.tokens[sample.own].tolist() == [*a, *b]
        assert sample.own[: len(a)].all()
        assert sample.own[-len(b) :].all()
        assert not sample.own[len(a) : -len(b)].any()
        assert [*sample.prompt.tokens, *sample.tokens[: -len(b)].tolist()] == asked  # what the second reply followed
        replies = [policy.decode(a).removesuffix(line), policy.decode(b).removesuffix(line)]
        dialogue = [
            {"role": "user", "content": sample.problem.prompt}, {"role": "assistant", "content": replies[0]},
            {"role": "user", "content": " Are you sure? <|end|> "}, {"role": "assistant", "content": replies[1]},
        ]  # fmt: skip
        text = policy.tokenizer.apply_chat_template(dialogue, tokenize=False).rstrip("\n")
        assert policy.tokenizer.decode([*sample.prompt.tokens, *sample.tokens.tolist()]) == text.removesuffix("\n")
        ends = sum(token == end for token in sample.tokens.tolist())
        # The model's two turns, and the user's where the template ends it so; in what the user says it is text.
        assert ends == (2 if name in ("plain", "trimmed") else 3)
        assert not sample.logp[~sample.own].any()
        assert (sample.logp[sample.own] < 0).all()
    assert [sample.finished for sample in samples] == [True, False]
    assert samples[0].text == f"A is a knight.{line}\nB is a knave{line}"


def test_a_turn_is_independent_of_the_other_episodes():
    policy = embedded()
    sampler = Sampler(policy, NativeEngine(policy), Twice(), Sampling(0.9), max_tokens=12)
    problems = list(islice(Twice().problems("train", 3), 4))
    together = sampler.at(TrainerState(7)).play(problems, seed=5)
    assert [trajectory.version for trajectory in together] == [7] * 4  # the step whose weights sampled it
    one = Sampler(policy, NativeEngine(policy, batch=1), Twice(), Sampling(0.9), max_tokens=12).play(problems, seed=5)
    for a, b in zip(together, one, strict=True):
        assert torch.equal(a.tokens, b.tokens)
    first, second = together[0].text.split("\n", 1)[0], together[1].text.split("\n", 1)[0]
    assert (first, together[0].tokens.tolist()) != (second, together[1].tokens.tolist())


def test_an_environment_that_raises_is_named():
    policy = embedded()
    problems = list(islice(Twice().problems("train", 3), 1))
    broken = Twice()
    episode = Twice().episode(problems[0])
    episode.step = lambda _: 1 / 0
    object.__setattr__(broken, "episode", lambda _: episode)
    with pytest.raises(RewardError, match=r"ZeroDivisionError.*3/0"):
        Sampler(policy, NativeEngine(policy), broken, max_tokens=4).play(problems, seed=0)


def double_policy():
    """A small model in float64, with the embedded tokenizer."""
    tokenizer = load_policy("embedded", device="cpu").tokenizer
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=0,
        max_position_embeddings=512, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    policy = Policy(model, tokenizer)
    policy.master_weights = MasterWeights(model)
    return policy


@dataclass(frozen=True)
class Uneven:
    """A toy algorithm: groups of 2 and 3, and one row per problem that a frozen model wrote, with an advantage."""

    def collect(self, problems, sampler, seed, memory=None):
        remembered = (memory or {"steps": 0})["steps"] + 1
        sizes = [2 + i % 2 for i in range(len(problems))]
        asked = [problem for problem, size in zip(problems, sizes, strict=True) for _ in range(size)]
        groups = [i for i, size in enumerate(sizes) for _ in range(size)]
        own = [replace(s, group=g) for s, g in zip(sampler.play(asked, seed), groups, strict=True)]
        given = sampler.others["frozen"].play(problems, seed + 1)
        lone = [replace(s, logp=None, entropy=None, advantage=0.5) for s in given]
        return own + lone, {"steps": remembered}


def plain_gradient(policy, samples: list[Trajectory], advantages, parameters):
    """The clipped surrogate's gradient at ratio 1, row by row: a loop that knows nothing of packing."""
    total = sum(int(sample.own.sum()) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, advantage in zip(samples, advantages, strict=True):
        ids = torch.cat([torch.tensor(sample.prompt.tokens), sample.tokens])[None]
        logits = policy.model(input_ids=ids).logits[0, len(sample.prompt.tokens) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
        ratio = (logp - logp.detach()).exp()
        loss = loss - advantage * ratio[sample.own].sum() / total
    return torch.autograd.grad(loss, parameters)


@pytest.mark.parametrize("algorithm", [Grpo(3), Uneven()])
def test_the_gradient_is_that_of_a_plain_loop(algorithm):
    policy, frozen = double_policy(), embedded()
    others = {"frozen": Sampler(frozen, NativeEngine(frozen), Twice(), max_tokens=5)}
    sampler = Sampler(policy, NativeEngine(policy), Twice(), max_tokens=7, others=others)
    samples, memory = algorithm.collect(list(islice(Twice().problems("train", 1), 3)), sampler, seed=2)
    assert memory == ({"steps": 1} if isinstance(algorithm, Uneven) else None)
    batch = make_batch(samples, policy, recompute=True)
    batch = replace(batch, old_logp=policy.score(batch)[0].detach())  # kept in float32 otherwise
    assert any(extent.own < extent.length for extent in batch.extents)
    assert batch.advantages.abs().sum() > 0
    if isinstance(algorithm, Uneven):
        assert batch.groups.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 4, 5]
        assert batch.advantages[-3:].tolist() == [0.5] * 3
        assert (batch.sampler_logp[-3:][batch.mask[-3:]] < 0).all()  # the policy has scored them
    parameters = list(policy.master_weights.parameters.values())
    plan = UpdatePlan(objective.Settings(importance_cap=None), micro_tokens=60)
    assert backward(policy, batch, Phase.of(batch), plan)
    expected = plain_gradient(policy, samples, batch.advantages.tolist(), parameters)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)


def test_algorithms_by_name():
    assert algorithms.get("grpo", 4) == Grpo(4)
    assert algorithms.get("grpo(group=2)", 4) == Grpo(2)
    assert algorithms.get(f"{__name__}.Marked", 4) == Marked()
    for text, message in [
        ("grpoo", "did you mean 'grpo'"),
        ("grpo(size=3)", "unknown setting of grpo 'size'"),
        ("grpo(3)", "settings by name"),
        ("os.getcwd", "is not an algorithm"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            algorithms.get(text, 4)


@poise.algorithm
@dataclass(frozen=True)
class Marked(Uneven):
    """Settings may name it."""


def test_rows_in_no_group_have_one_of_their_own():
    assert group_numbers(["a", None, "a", ("b", 1), None]) == [0, 1, 0, 2, 3]


def test_records_tell_the_environment_from_the_model():
    policy = load_policy("embedded", device="cpu")
    sampler = Sampler(policy, NativeEngine(policy), Twice(), max_tokens=7)
    problems = list(islice(Twice().problems("train", 0), 3))
    for sample in sampler.play(problems, seed=1):
        ((place, text),) = environment_turns(sample)
        assert text == " Are you sure? <|end|> "
        first, second = (message["content"] for message in sample.messages if message["role"] == "assistant")
        own = sample.tokens[sample.own]
        assert policy.decode(own[:place].tolist()) == first
        assert policy.decode(own[place:].tolist()) == second
