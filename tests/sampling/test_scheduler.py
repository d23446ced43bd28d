"""The native engine's rows: read once, given up when a response ends, with room that grows."""

from contextlib import nullcontext

import pytest
import torch

from poise.models.policy import ModelError
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.draws import Sampling
from poise.sampling.native import graphs
from poise.sampling.native.decoder import Decoder, layer_shapes
from poise.sampling.native.engine import NativeEngine
from poise.sampling.native.scheduler import Scheduler
from poise.sampling.native.slot_cache import SlotCache
from poise.sampling.requests import Request
from support.native_engines import SlotEngine
from support.sampled import ask
from support.tiny_models import VOCABULARY, exact, prompts, sample, tiny


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
        assert sorted(each.prompt.tokens for each in read) == sorted(map(tuple, asked))
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

    def test_a_graph_is_recorded_on_the_models_device_whichever_is_current(self, monkeypatch):
        asked, policy = {}, tiny("llama")
        cuda = {"Stream": lambda device: f"stream of {device}", "device": nullcontext, "synchronize": lambda _: None}
        cuda |= {"CUDAGraph": object, "graph": lambda _, **how: asked.update(how) or nullcontext()}
        for name, fake in cuda.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        cache = SlotCache(layer_shapes(policy), 2, 8, policy.head().weight.shape[1], next(policy.trunk.parameters()))
        decoder = graphs.GraphedDecoder(policy, cache)
        cache.set_lengths([3, 3], [0, 0], [4, 4])
        with torch.no_grad():
            decoder._record(2, Sampling())
        assert asked == {"pool": None, "stream": "stream of cpu", "capture_error_mode": "thread_local"}

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


class TestRoom:
    """Room for responses grows as they do, and what comes out is what it was with all of it reserved."""

    @pytest.mark.parametrize("engine", [NativeEngine, SlotEngine, CachedEngine])
    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_growing_changes_nothing(self, name, engine, monkeypatch):
        policy = exact(tiny(name))
        outs = []
        for first in (16, 256):
            for module in ("native.kv_cache", "native.scheduler", "cached_engine"):
                monkeypatch.setattr(f"poise.sampling.{module}.FIRST_ROOM", first)
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
        monkeypatch.setattr("poise.sampling.native.kv_cache.FIRST_ROOM", 16)
        engine = NativeEngine(tiny("llama"))
        wanted = [Request([7, 8], 60), Request([9], 60)]
        first = ask(engine, wanted, Sampling())
        cache = engine._decoder.cache
        assert cache.room > 16
        grown = cache.nbytes
        cache.clear()
        assert cache.room == 16
        assert cache.nbytes < grown
        assert torch.equal(ask(engine, wanted, Sampling()).logp, first.logp)

    @pytest.mark.parametrize("engine", [NativeEngine, CachedEngine])
    def test_a_model_without_an_end_token_goes_on_to_the_limit(self, engine):
        policy = tiny("llama")
        policy.model.generation_config.eos_token_id = None
        policy.tokenizer.eos_token_id = None
        assert policy.end_tokens == []
        out = sample(engine(policy), prompts(2), 2, max_tokens=9, temperature=1.0, seed=0)
        assert out.lengths == [9] * 4
        assert not out.finished.any()


@pytest.mark.parametrize(("small", "expected"), [(10**9, 1), (0, 2)])
def test_a_small_model_is_decoded_by_one_thread(small, expected, monkeypatch):
    monkeypatch.setattr("poise.sampling.native.engine.SMALL_MODEL", small)
    found, work = [], Scheduler.work
    monkeypatch.setattr(Scheduler, "work", lambda self: (found.append(torch.get_num_threads()), work(self))[1])
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
    decode = Scheduler._decode
    monkeypatch.setattr(Scheduler, "_decode", lambda self: (looks.append(1), decode(self))[1])
    NativeEngine(tiny("llama")).sample([Request([7, 8], 40), Request([9], 33)], Sampling(), 0)
    assert len(looks) == 5
