"""Keys kept between turns on CUDA: slots, the flash kernel on top of them, and graphs that stay."""

import pytest
import torch

from poise._lib import device as _device
from poise.models.attention import over_slots, text_over_keys
from poise.sampling.draws import Sampling
from poise.sampling.native.engine import NativeEngine, continues
from poise.sampling.requests import Request
from support.dialogues import Anew, dialogues
from support.tiny_models import LEARNED, learned, tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile has many for its own code

NAMES = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]
LONG = {"episodes": 9, "max_tokens": 20}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 8, 70])
@pytest.mark.parametrize(("heads", "shared", "width"), [(9, 3, 64), (4, 2, 8), (4, 4, 96), (8, 1, 256)])
def test_attention_of_a_text_to_slots(heads, shared, width, window, dtype):
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device="cuda").to(dtype)

    keys, values = normal(7, 150, shared, width), normal(7, 150, shared, width)
    rows, lengths, used = [1, 2, 5, 6], [3, 1, 64, 20], [3, 150, 100, 21]
    query = normal(sum(lengths), heads, width)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    slots = torch.tensor([*rows, rows[-1] + 1]) * 150
    starts_q, starts_k, ends = (x.to("cuda", torch.int32) for x in (starts, slots, torch.tensor(used)))
    found = over_slots(query, keys, values, starts_q, starts_k, ends, None, window, max(lengths))
    for row, start, length, end in zip(rows, starts.tolist(), lengths, used, strict=False):
        own = [x[row, :end].transpose(0, 1).double() for x in (keys, values)]
        exact = text_over_keys(query[start : start + length].double(), *own, None, window)
        assert (found[start : start + length] - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_in_float32_are_those_of_reading_anew(name):
    policy = tiny(name, "cuda")
    found, kept = dialogues(NativeEngine(policy, batch=5), **LONG)
    expected, _ = dialogues(Anew(NativeEngine(policy, batch=5)), **LONG)
    assert kept.continued > 0
    assert kept.reread == 0
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.logp, b.logp, atol=1e-3, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_in_half_precision_are_the_policys(name, compiled):
    policy = tiny(name, "cuda", torch.bfloat16, compiled=compiled)
    assert continues(policy)
    gaps = []
    for engine in (NativeEngine(policy, batch=6), Anew(NativeEngine(policy, batch=6))):
        outs, calls = dialogues(engine, Sampling(0.8), length=200, **LONG)
        assert (calls.continued > 0) == (not gaps)
        with torch.no_grad():
            gap = torch.cat([(policy.score(out.batch, 0.8)[0] - out.logp)[out.mask] for out in outs]).abs()
        gaps.append(float(gap.mean()))
    kept, anew = gaps
    assert kept < 2 * anew + 1e-3


@pytest.mark.parametrize("name", LEARNED)
def test_learned_positions(name):
    policy = learned(name, positions=256)
    policy.model.to("cuda", torch.bfloat16)
    outs, kept = dialogues(NativeEngine(policy), Sampling(), **LONG)
    assert kept.reread == 0
    torch.cuda.synchronize()
    for out in outs:
        with torch.no_grad():
            logp, _ = policy.score(out.batch)
        assert (logp - out.logp)[out.mask].abs().mean() < 0.05


def test_slots_and_graphs_stay_for_the_session_and_for_the_next():
    policy = tiny("llama", "cuda", torch.bfloat16)
    engine = NativeEngine(policy)
    dialogues(engine, length=200, **LONG)
    held, recorded = engine._decoder, dict(engine._decoder.graphs)
    assert held.cache.length == 200
    outs, _ = dialogues(engine, length=200, **LONG)
    assert engine._decoder is held
    assert {k: id(v) for k, v in held.graphs.items()} == {k: id(v) for k, v in recorded.items()}
    fresh, _ = dialogues(NativeEngine(policy), length=200, **LONG)
    for a, b in zip(outs, fresh, strict=True):
        assert torch.equal(a.tokens, b.tokens)


def test_without_a_length_slots_double():
    calls = NativeEngine(tiny("llama", "cuda", torch.bfloat16)).session()
    sizes = [
        calls._reserve([Request([7] * n, 20)] * rows) for n, rows in ((10, 3), (60, 2), (70, 2), (100, 1), (130, 1))
    ]
    assert sizes == [(3, 84), (3, 84), (3, 168), (3, 168), (3, 256)]  # the model has 256 positions


def test_rows_that_do_not_fit_are_read_again(monkeypatch):
    policy = tiny("llama", "cuda", torch.bfloat16)
    engine = NativeEngine(policy)
    assert engine.keeps_keys
    monkeypatch.setattr("poise.sampling.native.session.KEPT_SHARE", 0.0)
    outs, calls = dialogues(engine, Sampling(), **LONG)
    assert calls.continued == 0
    assert calls.reread > 0
    for out in outs:
        with torch.no_grad():
            logp, _ = policy.score(out.batch)
        assert (logp - out.logp)[out.mask].abs().mean() < 0.03


def test_long_dialogues_are_not_reserved_where_memory_is_short(monkeypatch):
    engine = NativeEngine(tiny("llama", "cuda", torch.bfloat16))
    whole = 9 * 250 * engine.token_bytes
    for free, reserved in ((whole, False), (10 * whole, True)):
        monkeypatch.setattr(_device, "free_bytes", lambda _, free=free: free)
        dialogues(engine, length=250, **LONG)
        assert (engine._decoder.cache.length == 250) == reserved
