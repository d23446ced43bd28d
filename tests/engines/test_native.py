"""The native engine: against transformers, against the training forward, against itself alone."""

import math

import pytest
import torch

from poise.engines.choose import choose
from poise.engines.hf import CachedEngine
from poise.engines.native import graphs
from poise.engines.native.decoder import Decoder
from poise.engines.native.engine import NativeEngine, supports
from poise.engines.native.kv_cache import SlotKeys
from poise.engines.native.scheduler import Queue
from poise.models.policy import ModelError, Policy
from poise.rollout.sampling import Sampling, mix, uniform
from poise.rollout.types import Request
from support.chi_square import chi_square
from support.tiny_models import (
    ARCHITECTURES,
    HEADS,
    LEARNED,
    VOCABULARY,
    Words,
    exact,
    head_alone,
    learned,
    prompts,
    sample,
    tiny,
)

NATIVE = [name for name in ARCHITECTURES if name != "gemma2"]  # whose attention has a soft-cap


class SlotEngine(NativeEngine):
    """With CUDA's slots and its few numbers of rows, but nothing recorded and no kernel."""

    def _room(self, requests):
        class Fixed(Decoder):
            def size(self, n):
                return next(s for s in graphs.sizes(self.keys.slots) if s >= n) if n else 0

        like = next(self.policy.trunk.parameters())
        slots = min(len(requests), self.batch or len(requests))
        length = max(len(r.prompt) for r in requests) + max(r.max_tokens for r in requests)
        width = self.policy.head().weight.shape[1]
        return Fixed(self.policy, SlotKeys(self.shapes, slots, length, width, like))


ENGINES = [NativeEngine, SlotEngine]


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_decoding_is_that_of_transformers(name, engine):
    policy = tiny(name)
    asked = prompts(6)
    found = sample(engine(policy, batch=4), asked, 1, max_tokens=30, temperature=0.0, seed=0)
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
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_agree_with_the_training_forward(name, engine, temperature):
    policy = tiny(name)
    for limits in ({}, {"top_p": 0.8, "top_k": 20}):
        out = sample(engine(policy, batch=7), prompts(5), 4, max_tokens=40, temperature=temperature, seed=3, **limits)
        with torch.no_grad():
            logp, entropy = policy.score(out, temperature)
        torch.testing.assert_close(logp[out.mask], out.logp[out.mask], atol=1e-4, rtol=0)
        torch.testing.assert_close(entropy[out.mask], out.entropy[out.mask], atol=1e-4, rtol=0)
        assert not out.logp[~out.mask].any()
        assert not out.tokens[~out.mask].any()
        assert out.lengths == out.mask.sum(1).tolist()


def test_half_precision_is_scored_without_rounding_it_further():
    policy, whole = tiny("llama"), tiny("llama")
    policy.model.bfloat16()
    whole.model.bfloat16().float()  # the same weights, in float32
    out = sample(NativeEngine(policy), prompts(4), 3, max_tokens=20, temperature=1.0, seed=0)
    with torch.no_grad():
        exactly, theirs = whole.score(out)[0][out.mask], policy.score(out)[0][out.mask]
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
        found = policy.score(out, temperature)
    for ours, theirs in zip(found, (out.logp, out.entropy), strict=True):
        gap = (ours - theirs)[out.mask].abs()
        # A sum of products in another order may be rounded to another bfloat16, for a token in some hundreds.
        assert (gap > 1e-4).float().mean() < 0.02


class TestDrawing:
    def draw(self, policy, **settings):
        prompt = prompts(1)[0]
        out = sample(NativeEngine(policy), [prompt], 20_000, max_tokens=1, seed=0, **settings)
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt])).logits[0, -1]
        return torch.bincount(out.tokens[:, 0], minlength=VOCABULARY), logits, out

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_frequencies_match_the_softmax(self, temperature):
        counts, logits, _ = self.draw(tiny("llama"), temperature=temperature)
        expected = (logits / temperature).softmax(-1) * 20_000
        assert chi_square(counts.tolist(), expected.tolist()) > 1e-3
        assert chi_square(counts.tolist(), ((logits / (1.3 * temperature)).softmax(-1) * 20_000).tolist()) < 1e-6

    @pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (1.0, 9), (0.8, 30), (0.6, 5), (1e-6, 0)])
    def test_what_is_left_out_is_not_drawn_and_the_rest_in_proportion(self, top_p, top_k):
        counts, logits, out = self.draw(tiny("llama"), temperature=1.3, top_p=top_p, top_k=top_k)
        probs = (logits / 1.3).softmax(-1)
        kept, total = [], 0.0  # plainly: from the likeliest on, until there are enough
        order = probs.argsort(descending=True)[: top_k or None]
        for token in order.tolist():
            if total >= top_p * float(probs[order].sum()):
                break
            kept.append(token)
            total += float(probs[token])
        assert counts[kept].sum() == 20_000
        if len(kept) > 1:
            assert chi_square(counts[kept].tolist(), (probs[kept] / total * 20_000).tolist()) > 1e-3
        torch.testing.assert_close(out.logp[:, 0], probs.log()[out.tokens[:, 0]], atol=1e-4, rtol=0)

    def test_transformers_leaves_out_the_same(self):
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        logits = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2
        theirs = TopPLogitsWarper(0.7)(None, TopKLogitsWarper(12)(None, logits)).isfinite()
        drawn = torch.zeros_like(theirs)
        for k in range(4000):
            point = uniform(k, torch.arange(50), torch.zeros(50, dtype=torch.long))
            drawn[torch.arange(50), Sampling(1.0, 0.7, 12).draw(logits, point)[0]] = True
        assert torch.equal(drawn, theirs)

    def test_an_impossible_token_is_never_drawn(self):
        logits = torch.tensor([[-200.0, 0.0, -200.0, 0.0, -200.0]])
        for point in (2.0**-24, 0.5 - 2.0**-24, 0.5 + 2.0**-24, 1 - 2.0**-24):
            token, logp, entropy = Sampling().draw(logits, torch.tensor([point]))
            assert token.item() == (1 if point < 0.5 else 3)
            assert logp.item() == pytest.approx(-math.log(2))
            assert entropy.item() == pytest.approx(math.log(2))

    @pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
    def test_settings_out_of_range_are_refused(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)


class TestRandomNumbers:
    def test_they_are_those_of_splitmix64(self):
        def plain(state):
            bits = (1 << 64) - 1
            x = (state + 1) * 0x9E3779B97F4A7C15 & bits
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & bits
            x = (x ^ x >> 27) * 0x94D049BB133111EB & bits
            return x ^ x >> 31

        states = [0, 1, -1, 2**63 - 1, -(2**63), 1234567890123456789]
        assert [x % (1 << 64) for x in mix(torch.tensor(states)).tolist()] == [plain(s % (1 << 64)) for s in states]

    @pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**64 + 5])
    def test_they_are_uniform_and_neighbours_unrelated(self, seed):
        drawn = uniform(seed, torch.arange(300)[:, None], torch.arange(400)[None])
        assert drawn.min() > 0
        assert drawn.max() < 1
        bins = 16
        cell = (drawn * bins).long()
        even = [drawn.numel() / bins] * bins
        assert chi_square(torch.bincount(cell.flatten(), minlength=bins).tolist(), even) > 1e-4
        other = uniform(seed + 1, torch.arange(300)[:, None], torch.arange(400)[None])
        for neighbour in (cell.roll(1, 0), cell.roll(1, 1), (other * bins).long()):
            pairs = torch.bincount((cell * bins + neighbour).flatten(), minlength=bins**2).tolist()
            assert chi_square(pairs, [drawn.numel() / bins**2] * bins**2) > 1e-4


class TestNeighbours:
    """What a sequence is, it is whatever is decoded beside it, in whatever row, and whenever."""

    def requests(self):
        asked = prompts(9)
        return [Request(asked[i % 9], 5 + 7 * i % 23, (5, 11) if i % 2 else (), number=100 + i) for i in range(9 * 4)]

    @pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
    @pytest.mark.parametrize("engine", ENGINES)
    def test_rows_order_and_company_do_not_matter(self, name, engine):
        policy, wanted = exact(tiny(name)), self.requests()
        sampling = Sampling(1.2, 0.95, 50)
        alone = [NativeEngine(policy).sample([request], sampling, seed=8) for request in wanted]
        order = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(0)).tolist()
        for slots in (1, 5, 16, 0):
            out = engine(policy, batch=slots).sample([wanted[i] for i in order], sampling, seed=8)
            for row, i in enumerate(order):
                one = alone[i]
                assert out.prompts[row] == list(wanted[i].prompt)
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


@pytest.mark.parametrize("engine", ENGINES)
def test_ten_thousand_requests_through_64_rows(engine):
    """Nothing is lost and nothing mixed up."""
    policy = exact(tiny_tiny())
    g = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=g))  # noqa: E731
    asked = [torch.randint(0, 23, (draw(1, 12),), generator=g).tolist() for _ in range(2000)]
    wanted = []
    while len(wanted) < 10_000:
        prompt = asked[draw(0, len(asked))]
        for _ in range(draw(1, 9)):
            stop = torch.randint(0, 23, (draw(0, 4),), generator=g).tolist()
            wanted.append(Request(prompt, draw(1, 21), stop))
    wanted = wanted[:10_000]
    out = engine(policy, batch=64).sample(wanted, Sampling(), seed=5)
    assert len(out.prompts) == 10_000
    rows = zip(wanted, out.prompts, out.tokens.tolist(), out.lengths, out.finished.tolist(), strict=True)
    for request, prompt, tokens, length, finished in rows:
        assert prompt == list(request.prompt)
        assert 1 <= length <= request.max_tokens
        assert not set(tokens[: length - 1]) & set(request.stop)
        assert finished == (tokens[length - 1] in request.stop)
        assert finished or length == request.max_tokens
        assert not any(tokens[length:])
    assert torch.equal(out.mask.sum(1), torch.tensor(out.lengths))
    for i in range(0, 10_000, 97):
        request = wanted[i]
        numbered = Request(request.prompt, request.max_tokens, request.stop, number=i)
        alone = NativeEngine(policy).sample([numbered], Sampling(), seed=5)
        assert alone.tokens[0].tolist() == out.tokens[i, : out.lengths[i]].tolist()
        torch.testing.assert_close(alone.logp[0], out.logp[i, : out.lengths[i]])
    with torch.no_grad():
        logp, _ = policy.score(out)
    torch.testing.assert_close(logp[out.mask].float(), out.logp[out.mask], atol=1e-5, rtol=0)


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
        out = engine(policy, batch=2).sample(wanted, Sampling(), seed)
        with torch.no_grad():
            logp, _ = policy.score(out)
        torch.testing.assert_close(logp[out.mask], out.logp[out.mask], atol=1e-4, rtol=0)


class TestRows:
    def test_a_prompt_is_read_once_for_its_group_and_rows_are_given_up(self, monkeypatch):
        read, decoded = [], []
        whole, run = Decoder.read, Decoder.run
        monkeypatch.setattr(Decoder, "read", lambda self, p, *rest: (read.extend(p), whole(self, p, *rest))[1])
        monkeypatch.setattr(
            Decoder, "run", lambda self, n, *rest, **more: (decoded.append(n), run(self, n, *rest, **more))[1]
        )
        asked = prompts(5)
        out = sample(NativeEngine(tiny("llama")), asked, 8, max_tokens=60, temperature=1.5, seed=0)
        assert sorted(read) == sorted(asked)
        assert decoded[0] == 40
        assert decoded == sorted(decoded, reverse=True)
        assert decoded[-1] < 40
        assert out.finished.any()

    def test_memory_is_kept_for_calls_alike_and_given_back(self):
        engine = NativeEngine(tiny("llama"))
        sample(engine, prompts(3), 2, max_tokens=4, temperature=1.0, seed=0)
        kept = engine._decoder
        sample(engine, prompts(3, seed=1), 2, max_tokens=4, temperature=1.0, seed=0)
        assert engine._decoder is kept
        sample(engine, prompts(3), 2, max_tokens=5, temperature=1.0, seed=0)
        assert engine._decoder is not kept
        engine.release()
        assert engine._decoder is None

    def test_graphs_are_of_few_sizes(self):
        assert graphs.sizes(1) == [1]
        assert graphs.sizes(20) == [8, 12, 16, 20]
        assert graphs.sizes(100)[-2:] == [96, 100]

    def test_slots_fit_the_memory_or_it_is_said_what_to_lower(self):
        per_slot = graphs.slot_bytes([(2, 64, 64)] * 3, 1000, 2)
        assert per_slot == 3 * 2 * 2 * 64 * 1000 * 2
        assert graphs.affordable(512, per_slot, 10**12, 1000) == 512
        assert graphs.affordable(512, per_slot, 100 * per_slot, 1000) == 85
        with pytest.raises(torch.OutOfMemoryError, match=r"lower rollout\.max_tokens") as refused:
            graphs.affordable(512, per_slot, per_slot, 1000)
        assert isinstance(refused.value, ModelError)  # which the command line shows without a traceback

    def test_bad_requests_are_refused(self):
        engine = NativeEngine(tiny("llama"))
        for requests, message in (
            ([], "no prompt"),
            ([Request([], 3)], "request 0"),
            ([Request([7], 0)], "max_tokens"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.sample(requests, Sampling(), 0)


class TestChoice:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_which_models_can_use_it(self, name):
        assert supports(tiny(name)) == (name in NATIVE)

    def test_a_model_that_cannot_gets_the_other_engine_and_is_told(self):
        said = []
        policy = tiny("gemma2")
        assert type(choose(tiny("llama"), note=said.append)) is NativeEngine
        assert not said
        assert type(choose(policy, note=said.append)) is CachedEngine
        assert len(said) == 1
        assert "Gemma2" in said[0]
        with pytest.raises(ModelError, match="auto"):
            choose(policy, "native")
        assert type(choose(tiny("llama"), "native", note=said.append)) is NativeEngine
        assert type(choose(tiny("llama"), "transformers", note=said.append)) is CachedEngine
        assert len(said) == 1

    def test_a_layer_that_decodes_differently_is_found_out(self, monkeypatch):
        from poise.engines.native.kv_cache import SharedKeys

        right = SharedKeys.attend
        monkeypatch.setattr(SharedKeys, "attend", lambda self, layer, *rest: right(self, layer, *rest) * 1.01)
        assert not supports(tiny("llama"))


@pytest.mark.parametrize(("small", "expected"), [(10**9, 1), (0, 2)])
def test_a_small_model_is_decoded_by_one_thread(small, expected, monkeypatch):
    monkeypatch.setattr("poise.engines.native.engine.SMALL", small)
    found, work = [], Queue.work
    monkeypatch.setattr(Queue, "work", lambda self: (found.append(torch.get_num_threads()), work(self))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        NativeEngine(tiny("llama")).sample([Request([7, 8], 3)], Sampling(), 0)
        assert found == [expected]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_queue_looks_up_only_now_and_then(monkeypatch):
    looks = []
    decode = Queue._decode
    monkeypatch.setattr(Queue, "_decode", lambda self: (looks.append(1), decode(self))[1])
    NativeEngine(tiny("llama")).sample([Request([7, 8], 40), Request([9], 33)], Sampling(), 0)
    assert len(looks) == 5


class TestRoom:
    """Room for responses grows as they do, and what comes out is what it was with all of it reserved."""

    @pytest.mark.parametrize("engine", [NativeEngine, SlotEngine, CachedEngine])
    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_growing_changes_nothing(self, name, engine, monkeypatch):
        policy = exact(tiny(name))
        outs = []
        for first in (16, 256):
            for module in ("native.kv_cache", "native.scheduler", "hf"):
                monkeypatch.setattr(f"poise.engines.{module}.FIRST", first)
            held = engine(policy, batch=5)
            outs.append([sample(held, prompts(4), 2, max_tokens=40, temperature=1.0, seed=seed) for seed in (0, 1)])
        for small, large in zip(*outs, strict=True):
            assert torch.equal(small.tokens, large.tokens)
            assert torch.equal(small.mask, large.mask)
            torch.testing.assert_close(small.logp, large.logp)
            assert max(small.lengths) > 32  # it has grown twice

    @pytest.mark.parametrize("engine", [NativeEngine, CachedEngine])
    def test_a_limit_that_no_response_reaches_costs_nothing(self, engine, monkeypatch):
        policy = tiny("llama")
        monkeypatch.setattr(policy.base.config, "max_position_embeddings", 1 << 40)
        policy.model.generation_config.eos_token_id = list(range(0, VOCABULARY, 2))  # every other token ends a response
        # 10^12 tokens could not be reserved by any machine.
        out = sample(engine(policy), prompts(3), 4, max_tokens=10**12, temperature=1.0, seed=0)
        assert out.finished.all()
        assert max(out.lengths) < 200

    def test_every_call_begins_with_the_same_room(self, monkeypatch):
        monkeypatch.setattr("poise.engines.native.kv_cache.FIRST", 16)
        engine = NativeEngine(tiny("llama"))
        ask = lambda: engine.sample([Request([7, 8], 60), Request([9], 60)], Sampling(), 0)  # noqa: E731
        first = ask()
        keys = engine._decoder.keys
        assert keys.room > 16
        grown = keys.nbytes
        keys.clear()
        assert keys.room == 16
        assert keys.nbytes < grown
        assert torch.equal(ask().logp, first.logp)

    @pytest.mark.parametrize("engine", [NativeEngine, CachedEngine])
    def test_a_model_without_an_end_token_goes_on_to_the_limit(self, engine):
        policy = tiny("llama")
        policy.model.generation_config.eos_token_id = None
        policy.tokenizer.eos_token_id = None
        assert policy.end_tokens == []
        out = sample(engine(policy), prompts(2), 2, max_tokens=9, temperature=1.0, seed=0)
        assert out.lengths == [9] * 4
        assert not out.finished.any()
