"""Hidden states from sampling: those of a forward pass, whatever the rows went through, and only if asked for."""

from dataclasses import replace

import pytest
import torch

from poise.engines.hf import CachedEngine
from poise.engines.native import drawn_states
from poise.engines.native.engine import NativeEngine
from poise.rollout.sampling import Sampling
from poise.rollout.session import session
from poise.rollout.types import repeated
from support.dialogues import dialogues
from support.native_engines import ENGINES, NATIVE
from support.tiny_models import exact, prompts, tiny


def asked(policy, *, hidden=True, group=4, max_tokens=30):
    """Requests of different limits, so that rows end at different times, move and are given to others."""
    requests = repeated(prompts(5), group, max_tokens, policy.end_tokens)
    return [replace(r, max_tokens=max_tokens - 7 * (i % 4), hidden=hidden) for i, r in enumerate(requests)]


@pytest.mark.parametrize("batch", [0, 6])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NATIVE)
def test_states_are_those_of_a_forward_pass(name, engine, batch):
    policy = exact(tiny(name))
    out = engine(policy, batch=batch).sample(asked(policy), Sampling(), 0)
    assert len(set(out.lengths)) > 3
    assert max(out.lengths) > 16  # the engine has looked more than twice
    with torch.no_grad():
        expected = policy.hidden(out)
    assert out.hidden.dtype == expected.dtype
    torch.testing.assert_close(out.hidden, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(0.7, 0.9), Sampling(0.0)])
@pytest.mark.parametrize("engine", ENGINES)
def test_keeping_states_changes_no_bit_of_what_is_sampled(engine, sampling):
    policy = tiny("llama")
    held = engine(policy, batch=6)
    plain, kept, after = (held.sample(asked(policy, hidden=wanted), sampling, 3) for wanted in (False, True, False))
    assert plain.hidden is after.hidden is None
    for name in ("tokens", "mask", "logp", "entropy"):
        assert torch.equal(getattr(plain, name), getattr(kept, name))
    torch.testing.assert_close(kept.hidden, policy.hidden(kept).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_turns_that_continue_kept_keys(engine, monkeypatch):
    policy = exact(tiny("llama"))
    held = engine(policy)
    run = held.run
    monkeypatch.setattr(held, "run", lambda requests, *rest: run([replace(r, hidden=True) for r in requests], *rest))
    turns, calls = dialogues(held)
    assert calls.continued > 0
    for out in turns:
        torch.testing.assert_close(out.hidden, policy.hidden(out).detach(), rtol=1e-5, atol=1e-5)


def test_more_states_than_there_is_memory_for_are_not_kept(monkeypatch):
    policy = tiny("llama")
    requests = asked(policy)
    out = NativeEngine(policy).sample(requests, Sampling(), 0)
    monkeypatch.setattr(drawn_states, "MOST_BYTES", out.hidden.nbytes)
    assert NativeEngine(policy).sample(requests, Sampling(), 0).hidden is not None
    monkeypatch.setattr(drawn_states, "MOST_BYTES", out.hidden.nbytes - 1)
    again = NativeEngine(policy).sample(requests, Sampling(), 0)
    assert again.hidden is None
    assert torch.equal(again.logp, out.logp)


def test_an_engine_that_has_none_returns_none():
    policy = tiny("llama")
    with session(CachedEngine(policy)) as calls:
        assert calls.sample(asked(policy), Sampling(), 0).hidden is None
