"""The native engine on CUDA: slots, flash attention, CUDA graphs, and the kernel that draws tokens."""

import pytest
import torch

from poise._lib import device as _device
from poise.lm_head import Head
from poise.models.attention import over_slots
from poise.models.policy import ModelError
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.choose import choose
from poise.sampling.draws import Sampling, uniform
from poise.sampling.native import graphs
from poise.sampling.native.engine import NativeEngine, supports
from poise.sampling.native.graphs import GraphedDecoder
from poise.sampling.requests import Request
from support import sampled_law
from support.chi_square import chi_square
from support.sampled import ask
from support.tiny_models import HEADS as MODEL_HEADS
from support.tiny_models import LEARNED, VOCABULARY, head_alone, learned, prompts, sample, tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile has many for its own code

NEVER = ()


def requests(count, seed=0, longest=40):
    g = torch.Generator().manual_seed(seed)
    asked = prompts(max(count // 5, 1), seed)
    limits = torch.randint(1, longest, (count,), generator=g).tolist()
    stops = torch.randint(6, VOCABULARY, (count, 3), generator=g).tolist()
    return [
        Request(asked[i % len(asked)], limit, stop) for i, (limit, stop) in enumerate(zip(limits, stops, strict=True))
    ]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_greedy_decoding_in_float32_is_that_of_transformers(name):
    policy = tiny(name, "cuda")
    asked = prompts(6)
    found = sample(NativeEngine(policy, batch=4), asked, 1, max_tokens=30, temperature=0.0, seed=0)
    for row, prompt in enumerate(asked):
        ids = torch.tensor([prompt], device="cuda")
        theirs = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, pad_token_id=0
        )[0, len(prompt) :]
        assert found.tokens[row][found.mask[row]].tolist() == theirs.tolist()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_half_precision_errs_no_more_than_twice_as_much_as_transformers(name, compiled):
    policy = tiny(name, "cuda", torch.bfloat16, compiled=compiled)
    whole = tiny(name, "cuda", torch.bfloat16)
    whole.model.float()  # the same weights
    assert supports(policy)
    engine = NativeEngine(policy, batch=24)
    out = sample(engine, prompts(12), 4, max_tokens=40, temperature=0.8, seed=0)
    assert isinstance(engine._decoder, GraphedDecoder)
    assert engine._decoder.graphs
    theirs = []
    with torch.no_grad():
        exactly, spread = (x[out.mask] for x in whole.score(out.batch, 0.8))
        for prompt, tokens, length in zip(out.prompts, out.tokens, out.lengths, strict=True):
            ids = torch.cat([torch.tensor(prompt, device="cuda"), tokens[:length]])
            logits = policy.model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / 0.8
            theirs.append(logits.log_softmax(-1).gather(1, tokens[:length, None])[:, 0])
    off = (out.logp[out.mask] - exactly).norm()
    assert off <= 2 * (torch.cat(theirs) - exactly).norm()
    assert (out.entropy[out.mask] - spread).norm() < 0.05 * spread.norm()


@pytest.mark.parametrize("name", LEARNED)
def test_a_row_that_has_ended_asks_for_no_position_that_is_not_there(name):
    policy = learned(name, positions=32)
    policy.model.to("cuda", torch.bfloat16)
    asked = torch.randint(6, VOCABULARY, (12, 12), generator=torch.Generator().manual_seed(0)).tolist()
    wanted = [Request(prompt, 20 - 3 * i % 11, NEVER) for i, prompt in enumerate(asked)]
    out = ask(NativeEngine(policy, batch=3), wanted, Sampling(), 0)  # three rows: some are decoded for nothing
    torch.cuda.synchronize()
    with torch.no_grad():
        logp, _ = policy.score(out.batch)
    assert (logp - out.logp)[out.mask].abs().mean() < 0.05


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9, "top_k": 20}])  # by the kernel that draws, and by torch
@pytest.mark.parametrize("name", MODEL_HEADS)
@pytest.mark.parametrize("engine", [NativeEngine, CachedEngine])
def test_scale_cap_and_temperature_are_rounded_as_in_the_update(name, engine, limits):
    policy, temperature = head_alone(name, "cuda")
    if engine is NativeEngine and not supports(policy):
        pytest.skip("the native engine cannot decode this model")
    out = sample(engine(policy), prompts(5), 4, max_tokens=20, temperature=temperature, seed=3, **limits)
    with torch.no_grad():
        found = policy.score(out.batch, temperature)
    for ours, theirs in zip(found, (out.logp, out.entropy), strict=True):
        gap = (ours - theirs)[out.mask].abs()
        # A sum of products in another order may be rounded to another bfloat16, for a few tokens.
        assert (gap > 1e-3).float().mean() < 0.05


@pytest.mark.parametrize("compiled", [False, True])
def test_requests_of_random_lengths_stops_and_limits(compiled):
    """Whatever was mixed up would have another log-probability than the training forward finds."""
    policy = tiny("llama", "cuda", torch.bfloat16, compiled=compiled)
    asked = requests(10_000)
    out = ask(NativeEngine(policy, batch=64), asked, Sampling(1.0), seed=7)
    assert out.prompts == [list(request.prompt.tokens) for request in asked]
    tokens = out.tokens.tolist()
    for request, row, length, ended in zip(asked, tokens, out.lengths, out.finished.tolist(), strict=True):
        stops = [i for i, token in enumerate(row[:length]) if token in request.stop]
        assert stops == ([length - 1] if ended else [])
        assert length == request.max_tokens or ended
    with torch.no_grad():
        logp, _ = policy.score(out.batch)
    gap = (logp - out.logp)[out.mask].abs()
    assert gap.mean() < 0.02
    assert gap.max() < 0.5


def test_a_sequence_depends_neither_on_its_row_nor_on_its_neighbours():
    policy = tiny("llama", "cuda", torch.bfloat16)
    asked = [Request(prompt, 30, NEVER, number) for number, prompt in enumerate(prompts(32))]
    first = ask(NativeEngine(policy), asked, Sampling(1.0), seed=1)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
    again = ask(NativeEngine(policy), [asked[i] for i in order], Sampling(1.0), seed=1)
    assert torch.equal(again.tokens, first.tokens[order])
    assert torch.equal(again.logp, first.logp[order])
    others = [Request(prompt, 30, NEVER, 100 + i) for i, prompt in enumerate(prompts(31, seed=5))]
    beside = ask(NativeEngine(policy), [*others, asked[3]], Sampling(1.0), seed=1)
    assert torch.equal(beside.tokens[-1], first.tokens[3])


def test_graphs_see_weights_that_have_changed():
    policy = tiny("llama", "cuda", torch.bfloat16)
    engine = NativeEngine(policy)
    settings = {"max_tokens": 20, "temperature": 1.0, "seed": 0}
    sample(engine, prompts(4), 4, **settings)
    held = engine._decoder
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.7)
    out = sample(engine, prompts(4), 4, **settings)
    assert engine._decoder is held
    with torch.no_grad():
        logp, _ = policy.score(out.batch)
    assert (logp - out.logp)[out.mask].abs().max() < 0.2


def test_graphs_stay_when_other_numbers_of_responses_are_asked_for():
    policy = tiny("llama", "cuda", torch.bfloat16)
    engine = NativeEngine(policy)

    def replies(number, tokens):
        asked = [Request(prompt, tokens, NEVER, i) for i, prompt in enumerate(prompts(number))]
        return ask(engine, asked, Sampling(1.0), seed=1)

    replies(32, 30)
    held = engine._decoder
    for number, tokens in ((20, 30), (27, 12), (32, 30)):
        out = replies(number, tokens)
        assert engine._decoder is held
        with torch.no_grad():
            logp, _ = policy.score(out.batch)
        assert (logp - out.logp)[out.mask].abs().mean() < 0.05
    replies(40, 10)
    grown = engine._decoder.cache
    assert (grown.slots, grown.length) == (40, held.cache.length)


def test_a_model_that_no_graph_can_hold_gets_the_other_engine():
    assert supports(tiny("llama", "cuda", torch.bfloat16))
    policy = tiny("llama", "cuda", torch.bfloat16)
    plain = policy.trunk.rotary_emb.forward

    def waits(x, position_ids):
        return plain(x, position_ids.clamp(max=int(position_ids.max())))

    policy.trunk.rotary_emb.forward = waits
    with pytest.warns(UserWarning, match="the fused step failed"):
        assert not supports(policy)
    notes = []
    assert isinstance(choose(policy, "auto", note=notes.append), CachedEngine)  # which warns of the step no more
    assert len(notes) == 1


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"top_k": 9}, {"temperature": 0.0}])
def test_other_settings_than_those_recorded_are_recorded_anew(settings):
    policy = tiny("llama", "cuda", torch.bfloat16)
    engine = NativeEngine(policy)
    sample(engine, prompts(3), 4, max_tokens=10, temperature=1.0, seed=0)
    wanted = {"temperature": 1.0} | settings
    found, fresh = (sample(e, prompts(3), 4, max_tokens=10, seed=0, **wanted) for e in (engine, NativeEngine(policy)))
    assert torch.equal(found.tokens, fresh.tokens)


HEADS = {
    "plain": {},
    "softcap": {"softcap": 10.0},
    "scaled": {"temperature": 0.7, "scale": 0.5, "bias": True},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 8, 70])
@pytest.mark.parametrize(("heads", "shared", "width"), [(9, 3, 64), (4, 2, 8), (4, 4, 96), (12, 2, 128), (8, 1, 256)])
def test_attention_to_slots(heads, shared, width, window, dtype):
    from poise.sampling.native import kernels

    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device="cuda").to(dtype)

    keys, values = normal(7, 150, shared, width), normal(7, 150, shared, width)
    query, key, value = (
        normal(5, heads, width),
        normal(5, 1, shared, width).transpose(1, 2)[:, :, 0],
        normal(5, shared, width),
    )
    used = torch.tensor([1, 5, 64, 65, 150], dtype=torch.int32, device="cuda")
    wanted = [x.clone() for x in (keys, values)]
    for store, new in zip(wanted, (key, value), strict=True):
        store[torch.arange(5), used.long() - 1] = new
    exact = over_slots(
        query.double(), *(x[:5].double() for x in wanted), *[used] * 2, used.long(), None, window
    )  # fmt: skip
    found = kernels.attend(query, key, value, keys, values, used, None, window)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])
    assert (found - exact).norm() < 0.01 * exact.norm()


class TestDrawing:
    def draw(self, name, rows, vocabulary, dtype, greedy=False, like=1.0):
        from poise.sampling.native import kernels

        g = torch.Generator("cuda").manual_seed(0)
        hidden = torch.randn(rows, 64, generator=g, device="cuda") * like
        weight = (torch.randn(vocabulary, 64, generator=g, device="cuda") / 8).to(dtype)
        settings = dict(HEADS[name])
        if settings.get("bias"):
            settings["bias"] = torch.randn(vocabulary, generator=g, device="cuda").to(dtype)
        head = Head(weight, **settings)
        product = hidden.to(dtype) @ weight.T
        points = torch.rand(3, rows + 5, generator=g, device="cuda", dtype=torch.float64)
        tokens = torch.full((3, rows + 5), -1, device="cuda")
        logp, entropy = torch.zeros(2, *points.shape, device="cuda")
        kernels.draw(product, head, greedy, points, torch.tensor([1], device="cuda"), tokens, logp, entropy)
        assert (tokens[[0, 2]] == -1).all()
        assert (tokens[1, rows:] == -1).all()
        found = (x[1, :rows] for x in (tokens, logp, entropy))
        logits = Head(weight.float(), **{**settings, **({"bias": head.bias.float()} if head.bias is not None else {})})
        expected = Sampling(0.0 if greedy else 1.0).draw(logits.finish(product.float()), points[1, :rows])
        return tuple(found), expected

    @pytest.mark.parametrize("name", HEADS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("vocabulary", [97, 4096, 49153])
    @pytest.mark.parametrize("greedy", [False, True])
    def test_it_is_what_plain_torch_draws(self, name, dtype, vocabulary, greedy):
        (token, logp, entropy), (own, own_logp, own_entropy) = self.draw(name, 200, vocabulary, dtype, greedy, 8.0)
        same = token == own  # sums are added up in another order, so a point on a border may fall on its other side
        assert same.float().mean() > 0.98
        torch.testing.assert_close(logp[same], own_logp[same], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(entropy, own_entropy, atol=1e-4, rtol=1e-4)

    def test_frequencies_match_the_softmax(self):
        from poise.sampling.native import kernels

        logits = (torch.randn(97, generator=torch.Generator().manual_seed(0)) * 2).cuda()
        count = 50_000
        number = torch.arange(count, device="cuda")
        points = uniform(3, number, torch.zeros_like(number))[None].contiguous()
        tokens = torch.zeros((1, count), dtype=torch.long, device="cuda")
        logp, entropy = torch.zeros(2, *points.shape, device="cuda")
        head, first = Head(logits[:, None]), torch.zeros(1, dtype=torch.long, device="cuda")
        kernels.draw(logits.expand(count, 97).contiguous(), head, False, points, first, tokens, logp, entropy)
        counts = torch.bincount(tokens[0], minlength=97)
        assert chi_square(counts.tolist(), (logits.softmax(-1) * count).tolist()) > 1e-3
        assert chi_square(counts.tolist(), ((logits / 1.1).softmax(-1) * count).tolist()) < 1e-6

    def test_an_impossible_token_is_never_drawn(self):
        from poise.sampling.native import kernels

        logits = torch.full((4, 9000), -300.0, device="cuda")
        logits[:, [1, 8000]] = 0.0
        near = 2.0**-24
        points = torch.tensor([[near, 0.5 - near, 0.5 + near, 1 - 2.0**-53]], dtype=torch.float64, device="cuda")
        tokens = torch.zeros((1, 4), dtype=torch.long, device="cuda")
        logp, entropy = torch.zeros(2, *points.shape, device="cuda")
        head, first = Head(torch.zeros(9000, 1, device="cuda")), torch.zeros(1, dtype=torch.long, device="cuda")
        kernels.draw(logits, head, False, points, first, tokens, logp, entropy)
        assert tokens[0].tolist() == [1, 1, 8000, 8000]

    def drawn(self, row, points):
        """The tokens that the kernel draws from copies of one row of logits, with log-probabilities and entropies."""
        from poise.sampling.native import kernels

        tokens = torch.zeros((1, len(points)), dtype=torch.long, device="cuda")
        logp, entropy = torch.zeros(2, *tokens.shape, device="cuda")
        head, first = Head(row[:, None]), torch.zeros(1, dtype=torch.long, device="cuda")
        product = row.expand(len(points), -1).contiguous()
        kernels.draw(product, head, False, points[None].contiguous(), first, tokens, logp, entropy)
        return tokens[0], logp[0], entropy[0]

    def test_improbable_tokens_are_drawn_with_their_probability(self):
        row = sampled_law.logits()
        sampled_law.check(lambda points: self.drawn(row.cuda(), points.cuda())[0].cpu(), row)

    def test_counts_by_decade_of_probability(self):
        row = sampled_law.logits()
        probs = row.double().softmax(0)
        decade = probs.log10().floor().clamp(min=-13).long().neg()
        counts, rounds, rows = torch.zeros(14, dtype=torch.long), 40, 4096
        number = torch.arange(rows, device="cuda")
        for position in range(rounds):
            points = uniform(5, number, torch.full_like(number, position))
            tokens, _, entropy = self.drawn(row.cuda(), points)
            counts += torch.bincount(decade[tokens.cpu()], minlength=14)
        expected = torch.zeros(14, dtype=torch.double).index_add_(0, decade, probs) * rounds * rows
        assert ((counts - expected).abs() <= 4 * expected.sqrt() + 4).all(), (counts, expected)
        assert entropy[0].item() == pytest.approx(torch.special.entr(probs).sum().item(), abs=1e-4)


def test_memory_that_is_not_there_is_said_early():
    with pytest.raises(torch.OutOfMemoryError, match=r"rollout\.max_tokens"):
        graphs.affordable(4, per_slot=2 << 40, free=_device.free_bytes(torch.device("cuda")), length=100)


def test_a_run_is_refused_if_not_even_one_slot_fits(monkeypatch):
    engine = NativeEngine(tiny("llama", "cuda", torch.bfloat16))
    slot = graphs.slot_bytes(engine.shapes, 64 + 128, 2)
    engine.check_memory(40, 128)
    monkeypatch.setattr(_device, "free_bytes", lambda _: slot)
    with pytest.raises(ModelError, match=r"lower rollout\.max_tokens"):
        engine.check_memory(40, 128)


def test_a_long_limit_grows_what_is_kept_of_the_responses():
    """In the queue, and in float32 the keys and values too; slots are of fixed length."""
    for dtype in (torch.float32, torch.bfloat16):
        policy = tiny("llama", "cuda", dtype)
        policy.base.config.max_position_embeddings = 4096
        out = ask(NativeEngine(policy), [Request([7, 8], 700, NEVER)] * 3, Sampling(), 0)
        assert out.lengths == [700] * 3
        with torch.no_grad():
            logp, _ = policy.score(out.batch)
        assert (logp - out.logp)[out.mask].abs().mean() < 0.02
