"""The snippets of docs/own-loop.md run, and do what the page says."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from test_docs import snippets

from poise import TokenBatch, objective, regulators

PAGE = Path(__file__).parent.parent / "docs/own-loop.md"
ROLLOUTS = [
    ([5, 6, 7], [1, 2, 3], [-0.1, -2.0, -0.7]),
    ([5, 6, 7], [4, 2], [-0.3, -1.5]),
    ([8, 9], [3, 3], [-0.2, -0.4]),
]
ADVANTAGES = [1.0, -1.0, 0.5]


def section(title):
    """The code under one heading, run in a namespace of its own."""
    text = PAGE.read_text()
    assert f"\n## {title}\n" in text
    start = text.index(f"\n## {title}\n")
    (code,) = [c for c in snippets(PAGE) if start < text.index(c) < (text + "\n## ").index("\n## ", start + 5)]
    namespace = {"__name__": "snippets"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace


def whole():
    """The rollouts as a batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    old = pad([torch.tensor(row[2]) for row in ROLLOUTS], batch_first=True)
    mask = pad([torch.ones(len(row[1])) for row in ROLLOUTS], batch_first=True)
    return TokenBatch(old, mask, torch.tensor(ADVANTAGES))


def test_the_bare_loop_learns(capsys):
    history = section("Bare PyTorch")["history"]
    assert history[0] < 0.3
    assert min(history[-3:]) > 0.7
    assert "reward" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["ar(alpha=0.3)", "tr-grpo", "clip-cov(share=0.5, low=-9.0, high=9.0)"])
def test_prime_rl_gets_the_mean_over_all_tokens(method):
    """Its documented contract: the sum of weight × loss over tokens with a weight, divided by their count."""
    streams = section("prime-rl")["rl_weights"](method, [row[2] for row in ROLLOUTS], ADVANTAGES)
    assert [len(stream) for stream in streams] == [3, 2, 2]
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
    drift = torch.linspace(-0.4, 0.4, 9).view(3, 3)
    phases = [p for p in regulators.parse(method)(batch) if objective.active(batch, p, settings).any()]
    found = list(section("tinker")["phase_data"](method, ROLLOUTS, ADVANTAGES))
    assert len(found) == len(phases)
    for data, phase in zip(found, phases, strict=True):
        total = 0.0
        for (prompt, tokens, _), datum, shift in zip(ROLLOUTS, data, drift, strict=True):
            inputs = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
            assert datum.model_input.length == len(inputs["target_tokens"]) == len(inputs["advantages"])
            assert datum.model_input.to_ints()[1:] + tokens[-1:] == inputs["target_tokens"].tolist()
            before = len(prompt) - 1
            assert not inputs["advantages"][:before].any()
            ratio = torch.cat([torch.ones(before), shift[: len(tokens)].exp()])
            total -= torch.minimum(
                ratio * inputs["advantages"], ratio.clamp(0.8, 1.2) * inputs["advantages"]
            ).sum()  # fmt: skip
        ours, _ = objective.policy_loss(batch.old_logp + drift, batch, phase, settings, normalizer=1.0)
        torch.testing.assert_close(total, ours)


def test_the_table_names_what_is_there():
    sections = re.findall(r"(?m)^## (.+)$", PAGE.read_text())
    rows = re.findall(r"(?m)^\| \[([^\]]+)\]\(#([\w-]+)\)", PAGE.read_text())
    assert [name.lower() for name, _ in rows] == [name.lower() for name in sections]
    assert [anchor for _, anchor in rows] == [name.lower().replace(" ", "-") for name in sections]
