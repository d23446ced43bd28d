"""The snippets of docs/own-loop.md run, and do what the page says."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from poise import TokenBatch, objective, regulators
from poise.models.loading import load_policy
from support.pages import snippets

PAGE = Path(__file__).parents[2] / "docs/own-loop.md"
ROLLOUTS = [
    ([5, 6, 7], [1, 2, 3], [-0.1, -2.0, -0.7]),
    ([5, 6, 7], [4, 2], [-0.3, -1.5]),
    ([8, 9], [3, 3], [-0.2, -0.4]),
    ([5, 6, 7], [], []),  # ended before its first token
]
ADVANTAGES = [1.0, -1.0, 0.5, -0.5]


def run(start, end):
    """The names that the code in a part of the page leaves behind, its snippets run in order."""
    text = PAGE.read_text()
    found = [code for code in snippets(PAGE) if start <= text.index(code) < end]
    assert found
    namespace = {"__name__": "snippets"}
    for code in found:
        exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace


def section(title):
    """Run the snippets under one heading."""
    start = PAGE.read_text().index(f"\n## {title}\n")
    end = re.compile(r"\n## |\Z").search(PAGE.read_text(), start + 5).start()
    return run(start, end)


def whole():
    """The rollouts as a batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    old = pad([torch.tensor(row[2]) for row in ROLLOUTS], batch_first=True)
    mask = pad([torch.ones(len(row[1])) for row in ROLLOUTS], batch_first=True)
    return TokenBatch(old, mask, torch.tensor(ADVANTAGES))


def check_nthr(batch, phase):
    """Against the paper's sum, token by token. Three answers are right, the last one wrong: eta = 2·|0.5 − 0.75|."""
    with torch.no_grad():
        probabilities = batch.head(batch.hidden.flatten(0, 1)).softmax(-1).view(4, 5, 100)
    error, hidden = (torch.nn.functional.one_hot(batch.targets, 100) - probabilities).double(), batch.hidden.double()
    influence = torch.einsum("atv,bsv->atbs", error, error) * torch.einsum("atd,bsd->atbs", hidden, hidden)
    others = [[row for row in range(3) if row != one] for one in range(3)]
    threshold = min(influence[others[one], :, one].sum((0, 1)).mean() for one in range(3))
    flagged = influence[:3, :, 3].sum((0, 1)) > threshold
    torch.testing.assert_close(phase.policy, torch.cat([torch.ones(3, 5), torch.where(flagged, 0.5, 1.0)[None]]))
    assert phase.metrics["flagged_share"] == pytest.approx(float(flagged.float().mean()))


@pytest.mark.docs  # the page trains a model
def test_the_pieces_regulate_and_train(capsys):
    left = run(0, PAGE.read_text().index("\n## prime-rl\n"))
    kept = torch.tensor([[True, True, True], [True, True, False]])
    ar = 0.2 * left["old_logp"].exp() + 0.8
    torch.testing.assert_close(left["advantages"], torch.where(kept, ar, 0.0) * torch.tensor([[1.0], [-1.0]]))
    for moved in (left["logp"], left["hidden"], left["head"].weight, left["head"].bias):
        assert moved.grad.isfinite().all()
        assert moved.grad.any()
    assert not left["hidden"].grad[1, 2].any()  # outside the mask
    check_nthr(left["sampled"], left["spared"])
    assert "reg/low/weight_mean" in capsys.readouterr().out
    trained, embedded = (
        torch.cat([weight.detach().flatten().cpu() for weight in policy.model.parameters()])
        for policy in (left["policy"], load_policy("embedded"))
    )
    assert not torch.equal(trained, embedded)


@pytest.mark.parametrize("method", ["ar(alpha=0.3)", "tr-grpo", "clip-cov(share=0.5, low=-9.0, high=9.0)"])
def test_prime_rl_gets_the_mean_over_all_tokens(method):
    """Its documented contract: the sum of weight × loss over tokens with a weight, divided by their count."""
    streams = section("prime-rl")["rl_weights"](method, [row[2] for row in ROLLOUTS], ADVANTAGES)
    assert [len(stream) for stream in streams] == [3, 2, 2, 0]
    weights = torch.tensor([value for stream in streams for value in stream])
    losses = torch.linspace(-1, 2, 7)
    theirs = (weights * losses).sum() / (weights != 0).sum()
    batch = whole()
    (phase,) = regulators.parse(method)(batch)
    ours = (phase.policy[batch.mask] * losses).sum() / batch.mask.sum()
    torch.testing.assert_close(theirs, ours)
    assert ours != losses.mean()


def test_prime_rl_has_one_pass():
    with pytest.raises(ValueError, match="lopti has 2 phases"):
        section("prime-rl")["rl_weights"]("lopti", [row[2] for row in ROLLOUTS], ADVANTAGES)


@pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="tinker is not installed")
@pytest.mark.parametrize("method", ["grpo", "ar(alpha=0.3)", "lopti(threshold=0.5)", "lopti(threshold=0.0)"])
def test_tinker_gets_the_phases(method):
    """Its documented ppo loss: the sum of the clipped term over target tokens, nothing in front of the response."""
    batch, settings = whole(), objective.Settings(clip_low=0.2, clip_high=0.2, dual_clip=None)
    drift = torch.linspace(-0.4, 0.4, 12).view(4, 3)
    phases = [p for p in regulators.parse(method)(batch) if objective.active(batch, p, settings).any()]
    found = list(section("tinker")["phase_data"](method, ROLLOUTS, ADVANTAGES))
    assert len(found) == len(phases)
    for data, phase in zip(found, phases, strict=True):
        total = 0.0
        for (prompt, tokens, _), datum, shift in zip(ROLLOUTS, data, drift, strict=True):
            inputs = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
            assert datum.model_input.length == len(inputs["target_tokens"]) == len(inputs["advantages"])
            assert (prompt + tokens)[1:] == inputs["target_tokens"].tolist()
            assert datum.model_input.to_ints() == (prompt + tokens)[:-1]
            before = len(prompt) - 1
            assert not inputs["advantages"][:before].any()
            ratio = torch.cat([torch.ones(before), shift[: len(tokens)].exp()])
            total -= torch.minimum(
                ratio * inputs["advantages"], ratio.clamp(0.8, 1.2) * inputs["advantages"]
            ).sum()  # fmt: skip
        ours, _ = objective.policy_loss(batch.old_logp + drift, batch, phase, settings, normalizer=1.0)
        torch.testing.assert_close(total, ours)


# --- a tiny server for each: a table of logits, with the loss that the library documents


def score(table, tokens):
    """The log-probability of each token but the first, given the one before it."""
    return table[tokens[:-1]].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


def rewards_over_time(update, steps=25):
    """Sample answers that should count upwards, some of them empty, and let ``update`` give a loss for each pass."""
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(6, 6, requires_grad=True)
    optimizer, history = torch.optim.Adam([table], lr=0.3), []
    for _ in range(steps):
        rollouts = []
        for row in range(48):
            tokens = [0, row % 6]
            for _ in range(row % 5):
                tokens.append(int(table[tokens[-1]].detach().softmax(-1).multinomial(1, generator=generator)))
            answer = tokens[2:]
            logprobs = score(table, tokens)[1:].tolist()
            rollouts.append((tokens[:2], answer, logprobs))
        hits = [
            [after == (before + 1) % 6 for before, after in zip(prompt[1:] + answer, answer, strict=False)]
            for prompt, answer, _ in rollouts
        ]
        scores = torch.tensor([sum(row) / max(len(row), 1) for row in hits])
        history.append(float(sum(map(sum, hits)) / sum(map(len, hits))))
        for loss in update(table, rollouts, (scores - scores.mean()).tolist()):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return history


def test_prime_rl_learns():
    weights = section("prime-rl")["rl_weights"]

    def update(table, rollouts, advantages):
        streams = weights("ar(alpha=0.3)", [logprobs for *_, logprobs in rollouts], advantages)
        terms = [
            -advantage * (score(table, prompt + tokens)[len(prompt) - 1 :] * torch.tensor(stream)).sum()
            for (prompt, tokens, _), stream, advantage in zip(rollouts, streams, advantages, strict=True)
        ]
        yield sum(terms) / sum(value != 0 for stream in streams for value in stream)

    history = rewards_over_time(update)
    assert history[0] < 0.3
    assert min(history[-3:]) > 0.7


@pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="tinker is not installed")
def test_tinker_learns():
    phase_data = section("tinker")["phase_data"]

    def update(table, rollouts, advantages):
        for data in phase_data("ar(alpha=0.3) | lopti(threshold=0.5)", rollouts, advantages):
            loss = torch.zeros(())
            for datum in data:
                inputs = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
                tokens = datum.model_input.to_ints()
                ratio = (score(table, [*tokens, int(inputs["target_tokens"][-1])]) - inputs["logprobs"]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = loss - torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"]).sum()
            yield loss

    history = rewards_over_time(update)
    assert history[0] < 0.3
    assert min(history[-3:]) > 0.7


def test_the_table_names_what_is_there():
    sections = re.findall(r"(?m)^## (.+)$", PAGE.read_text())
    rows = re.findall(r"(?m)^\| \[([^\]]+)\]\(#([\w-]+)\)", PAGE.read_text())
    assert len(rows) == 3
    assert {name.lower() for name, _ in rows} <= {name.lower() for name in sections}
    assert [anchor for _, anchor in rows] == [name.lower().replace(" ", "-") for name, _ in rows]
