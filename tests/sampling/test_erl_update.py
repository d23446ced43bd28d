"""The update of an ERL batch, rows of all roles and in mini-batches, against a loop that knows nothing of packing."""

import copy
from collections import deque
from dataclasses import replace

import pytest
import torch

from poise import regulators
from poise.objective import Settings
from poise.sampling.erl import Erl
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, Score
from poise.training.batches import make_batch, phases_of
from poise.training.update import UpdatePlan, mini_batches, update
from support.scripted import Scripted
from support.tiny_models import bytes_policy, exact

KL, ENTROPY, RATE = 0.05, 0.02, 0.05
FIRST = ["red", "blue", "green", "red", "red", "blue", "green", "green"]  # groups of 4: two wrong, then three
SECOND = ["red", "pink", "blue", "blue", "blue"]  # the second group has no spread


class Colours:
    name = "colours"

    def problems(self, split, seed):
        return (Problem(f"{split}/{seed}/{i}", f"Q{i}?", "all", {}) for i in range(2))

    def score(self, problem, text):
        del problem
        return Score(2.0 if text == "red" else -1.0, text == "red")


def collected(policy):
    replies = deque(FIRST), deque(["<prompt>a</prompt>", "no"] * 3), deque(SECOND)

    def say(number, turn, prompt):
        del number, turn
        asked = policy.tokenizer.decode(prompt)
        return ((replies[1] if "WHY" in asked else replies[0] or replies[2]).popleft()) + "<|im_end|>"

    sampler = Sampler(policy, Scripted(policy, say), Colours(), max_tokens=9)
    algorithm = Erl(4, ask="WHY {task}{attempt}{feedback}{memory}", reflection_tokens=30)
    samples, _ = algorithm.collect(list(Colours().problems("train", 0)), sampler, 7)
    return [replace(sample, logp=None, entropy=None) for sample in samples]  # so that ratios begin at 1


def plain_update(policy, samples, advantages, old, reference, rows, mini_batch, temperature, threshold):
    """Lopti's two passes of plain gradient steps, with clip, KL and entropy terms, averaged over tokens."""
    parameters = list(policy.model.parameters())
    for number in range(2):
        for part in mini_batches(len(rows), mini_batch, 3 + number):
            chosen = torch.tensor(rows)[part].tolist()
            loss = torch.zeros((), dtype=torch.float64)
            for row in chosen:
                sample, n = samples[row], len(samples[row].tokens)
                ids = torch.cat([torch.tensor(sample.prompt.tokens), sample.tokens])[None]
                logits = policy.model(input_ids=ids).logits[0, len(sample.prompt.tokens) - 1 : -1] / temperature
                logps = logits.log_softmax(-1)
                logp = logps.gather(1, sample.tokens[:, None])[:, 0]
                gap = reference[row, :n] - logp
                ratio, advantage = (logp - old[row, :n]).exp(), advantages[row]
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.24) * advantage)
                gain = gain - KL * (gap.exp() - 1 - gap) - ENTROPY * (logps.exp() * logps).sum(1)
                loss = loss - gain[(old[row, :n].exp() < threshold) == (number == 0)].sum()
            loss = loss / sum(len(samples[row].tokens) for row in chosen)
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.data -= RATE * gradient


@pytest.mark.parametrize(("mini_batch", "drop"), [(0, False), (5, False), (5, True)])
def test_the_update_is_that_of_a_plain_loop(mini_batch, drop):
    policy, temperature = exact(bytes_policy(1024)), 0.7
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)  # far from uniform
    samples = collected(policy)
    assert [sample.role for sample in samples] == [
        role
        for role, count in [("first", 8), ("reflection", 5), ("second", 5), ("consolidated", 5)]
        for _ in range(count)
    ]
    batch = make_batch(samples, policy, temperature=temperature)
    old = batch.old_logp.clone()
    reference = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, ref_logp=reference)
    probabilities = batch.prob[batch.mask].sort().values
    threshold = float(probabilities[len(probabilities) // 2 :][:2].mean())  # between two tokens in the middle
    regulator = regulators.parse(f"lopti(threshold={threshold})")
    rows, _, phases, metrics = phases_of(regulator, samples, batch, drop_equal_groups=drop)
    assert metrics.get("reward/dropped_groups") == (2.0 if drop else None)
    kept = [row for row in range(23) if not drop or row not in (10, 11, 12, 15, 16, 17)]
    assert all(phase.policy.any() for phase in phases)

    start = copy.deepcopy(policy.model.state_dict())
    plain_update(policy, samples, batch.advantages.tolist(), old, reference, kept, mini_batch, temperature, threshold)
    expected = copy.deepcopy(policy.model.state_dict())
    policy.model.load_state_dict(start)
    plan = UpdatePlan(Settings(kl_coef=KL, entropy_coef=ENTROPY), temperature, mini_batch, grad_clip=1e9)
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=RATE)
    metrics = update(policy, optimizer, batch.rows(rows), phases, plan, seed=3)
    assert metrics["optim/steps"] == 2 * len(mini_batches(len(kept), mini_batch, 3))
    for name, value in policy.model.state_dict().items():
        moved = expected[name] - start[name]
        torch.testing.assert_close(value - start[name], moved, rtol=1e-4, atol=1e-4 * float(moved.abs().max()))
