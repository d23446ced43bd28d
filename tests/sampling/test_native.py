"""The native engine: against transformers, against the training forward, against itself alone."""

import pytest
import torch

from poise.models.policy import Policy
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.draws import Sampling
from poise.sampling.native.decoder import Decoder
from poise.sampling.native.engine import NativeEngine, supports
from poise.sampling.requests import Request
from support.native_engines import ENGINES, NATIVE
from support.sampled import ask
from support.tiny_models import HEADS, LEARNED, VOCABULARY, Words, exact, head_alone, learned, prompts, sample, tiny


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_decoding_is_that_of_transformers(name, engine):
    policy = tiny(name)
    asked = prompts(4)
    found = sample(engine(policy, batch=3), asked, 1, max_tokens=30, temperature=0.0, seed=0)
    for row, prompt in enumerate(asked):
        ids = torch.tensor([prompt])
        theirs = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, pad_token_id=0
        )[0, len(prompt) :]
        ours = found.tokens[row][found.mask[row]]
        assert ours.tolist() == theirs.tolist()
        assert bool(found.finished[row]) == (theirs[-1] == 5)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("engine", ENGINES)
def test_log_probabilities_agree_with_the_training_forward(name, engine):
    policy = tiny(name)
    for temperature, limits in ((1.0, {}), (0.6, {"top_p": 0.8, "top_k": 20})):
        out = sample(engine(policy, batch=5), prompts(4), 3, max_tokens=24, temperature=temperature, seed=3, **limits)
        with torch.no_grad():
            logp, entropy = policy.score(out.batch, temperature)
        torch.testing.assert_close(logp[out.mask], out.logp[out.mask], atol=1e-4, rtol=0)
        torch.testing.assert_close(entropy[out.mask], out.entropy[out.mask], atol=1e-4, rtol=0)
        assert not out.logp[~out.mask].any()
        assert not out.tokens[~out.mask].any()
        assert out.lengths == out.mask.sum(1).tolist()


def test_what_sampling_leaves_behind_can_be_trained_with(monkeypatch):
    """Nothing that stays is a tensor of torch's inference mode, which no gradient may need."""
    monkeypatch.setattr("poise.sampling.native.kv_cache.FIRST_ROOM", 8)
    policy = tiny("llama")
    modes = []
    policy.trunk.register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    engine = NativeEngine(policy)
    modes.clear()
    out = sample(engine, prompts(3), 2, max_tokens=30, temperature=1.0, seed=0)
    assert engine._decoder.cache.room > 8  # it has grown while decoding
    assert modes[0] is False  # prompts are read as ever
    assert all(modes[1:])
    cache = vars(engine._decoder.cache)
    kept = [*cache["response_keys"], *cache["response_values"], *vars(engine._decoder).values()]
    kept += [x for completion in out.completions for x in vars(completion).values()]
    tensors = [x for x in [*kept, *policy.model.buffers()] if isinstance(x, torch.Tensor)]
    assert len(tensors) > 10
    assert not any(x.is_inference() for x in tensors)
    (policy.score(out.batch)[0] * out.logp.exp()).sum().backward()
    again = sample(engine, prompts(3), 2, max_tokens=30, temperature=1.0, seed=0)
    assert torch.equal(out.logp, again.logp)


def test_half_precision_is_scored_without_rounding_it_further():
    policy, whole = tiny("llama"), tiny("llama")
    policy.model.bfloat16()
    whole.model.bfloat16().float()  # the same weights, in float32
    out = sample(NativeEngine(policy), prompts(4), 3, max_tokens=20, temperature=1.0, seed=0)
    with torch.no_grad():
        exactly, theirs = whole.score(out.batch)[0][out.mask], policy.score(out.batch)[0][out.mask]
    assert out.logp.dtype == torch.float32
    assert (out.logp[out.mask] - exactly).norm() < 1.5 * (theirs - exactly).norm()


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9, "top_k": 20}])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("engine", [*ENGINES, CachedEngine])
def test_scale_cap_and_temperature_are_rounded_as_in_the_update(name, engine, limits):
    policy, temperature = head_alone(name)
    if engine is not CachedEngine and not policy.packed:
        pytest.skip("the native engine cannot decode this model")
    out = sample(engine(policy), prompts(5), 4, max_tokens=20, temperature=temperature, seed=3, **limits)
    with torch.no_grad():
        found = policy.score(out.batch, temperature)
    for ours, theirs in zip(found, (out.logp, out.entropy), strict=True):
        gap = (ours - theirs)[out.mask].abs()
        # A sum of products in another order may be rounded to another bfloat16, for a token in some hundreds.
        assert (gap > 1e-4).float().mean() < 0.02


COMPANY = Sampling(1.2, 0.95, 50)


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"])
def alone(request):
    """A model, requests, and what each of them gets when it is the only one."""
    policy, asked = exact(tiny(request.param)), prompts(6)
    wanted = [Request(asked[i % 6], 5 + 7 * i % 23, (5, 11) if i % 2 else (), number=100 + i) for i in range(6 * 3)]
    return policy, wanted, [ask(NativeEngine(policy), [one], COMPANY, seed=8) for one in wanted]


class TestNeighbours:
    """What a sequence is, it is whatever is decoded beside it, in whatever row, and whenever."""

    @pytest.mark.parametrize("engine", ENGINES)
    def test_rows_order_and_company_do_not_matter(self, alone, engine):
        policy, wanted, alone = alone
        order = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(0)).tolist()
        for slots in (5, 16, 0):
            out = ask(engine(policy, batch=slots), [wanted[i] for i in order], COMPANY, seed=8)
            for row, i in enumerate(order):
                one = alone[i]
                assert out.prompts[row] == list(wanted[i].prompt.tokens)
                assert out.tokens[row][out.mask[row]].tolist() == one.tokens[0].tolist()
                torch.testing.assert_close(out.logp[row][out.mask[row]], one.logp[0])
                assert out.finished[row] == one.finished[0]

    def test_the_seed_and_the_number_fix_the_tokens(self):
        engine = NativeEngine(tiny("llama"))
        draw = lambda seed: sample(engine, prompts(4), 4, max_tokens=20, temperature=1.0, seed=seed).tokens  # noqa: E731
        first = draw(1)
        assert torch.equal(first, draw(1))
        assert not torch.equal(first, draw(2))
        assert len({tuple(row) for row in first[:4].tolist()}) == 4

    def test_a_call_that_was_interrupted_leaves_nothing_behind(self, monkeypatch):
        policy = tiny("llama")
        engine = NativeEngine(policy)
        run = Decoder.run
        monkeypatch.setattr(Decoder, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sample(engine, prompts(3), 2, max_tokens=9, temperature=0.0, seed=0)
        monkeypatch.setattr(Decoder, "run", run)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(0.8)
        after = sample(engine, prompts(3), 2, max_tokens=9, temperature=0.0, seed=0)
        fresh = sample(CachedEngine(policy), prompts(3), 2, max_tokens=9, temperature=0.0, seed=0)
        assert torch.equal(after.tokens, fresh.tokens)

    def test_weights_that_have_changed_are_used(self):
        policy = tiny("llama")
        engine = NativeEngine(policy)
        sample(engine, prompts(3), 2, max_tokens=9, temperature=0.0, seed=0)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(0.8)
        after = sample(engine, prompts(3), 2, max_tokens=9, temperature=0.0, seed=0)
        fresh = sample(CachedEngine(policy), prompts(3), 2, max_tokens=9, temperature=0.0, seed=0)
        assert torch.equal(after.tokens, fresh.tokens)


def tiny_tiny():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=5, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)
    return Policy(model, Words())


@pytest.mark.parametrize("engine", ENGINES)
def test_many_requests_through_64_rows(engine):
    """Nothing is lost and nothing mixed up."""
    policy = exact(tiny_tiny())
    g = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=g))  # noqa: E731
    asked = [torch.randint(0, 23, (draw(1, 12),), generator=g).tolist() for _ in range(300)]
    wanted = []
    while len(wanted) < 1500:
        prompt = asked[draw(0, len(asked))]
        for _ in range(draw(1, 9)):
            stop = torch.randint(0, 23, (draw(0, 4),), generator=g).tolist()
            wanted.append(Request(prompt, draw(1, 21), stop))
    wanted = wanted[:1500]
    out = ask(engine(policy, batch=64), wanted, Sampling(), seed=5)
    assert len(out.prompts) == 1500
    rows = zip(wanted, out.prompts, out.tokens.tolist(), out.lengths, out.finished.tolist(), strict=True)
    for request, prompt, tokens, length, finished in rows:
        assert prompt == list(request.prompt.tokens)
        assert 1 <= length <= request.max_tokens
        assert not set(tokens[: length - 1]) & set(request.stop)
        assert finished == (tokens[length - 1] in request.stop)
        assert finished or length == request.max_tokens
        assert not any(tokens[length:])
    assert torch.equal(out.mask.sum(1), torch.tensor(out.lengths))
    for i in range(0, 1500, 79):
        request = wanted[i]
        numbered = Request(request.prompt, request.max_tokens, request.stop, number=i)
        alone = ask(NativeEngine(policy), [numbered], Sampling(), seed=5)
        assert alone.tokens[0].tolist() == out.tokens[i, : out.lengths[i]].tolist()
        torch.testing.assert_close(alone.logp[0], out.logp[i, : out.lengths[i]])
    with torch.no_grad():
        logp, _ = policy.score(out.batch)
    torch.testing.assert_close(logp[out.mask].float(), out.logp[out.mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LEARNED)
def test_a_row_that_has_ended_asks_for_no_position_that_is_not_there(name, engine):
    policy = learned(name, positions=32)
    assert supports(policy)
    asked = torch.randint(6, VOCABULARY, (6, 12), generator=torch.Generator().manual_seed(0)).tolist()
    stops = torch.randint(6, VOCABULARY, (6, 30), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = [
        Request(prompt, 20 - 3 * i % 7, stop if i % 2 else ())
        for i, (prompt, stop) in enumerate(zip(asked, stops, strict=True))
    ]
    for seed in range(4):
        out = ask(engine(policy, batch=2), wanted, Sampling(), seed)
        with torch.no_grad():
            logp, _ = policy.score(out.batch)
        torch.testing.assert_close(logp[out.mask], out.logp[out.mask], atol=1e-4, rtol=0)
