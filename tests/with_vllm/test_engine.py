"""vLLM as an engine, against transformers and the policy's own forward pass. One vLLM serves them all, on a CPU."""

import random

import numpy
import pytest
import torch
import transformers

from poise.models.loading import load_policy
from poise.models.policy import ModelError, Policy
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.draws import Sampling
from poise.sampling.requests import Request
from poise.sampling.vllm_engine import VllmEngine, weights
from support.chi_square import chi_square
from support.sampled import ask
from support.tiny_models import sample
from support.vllm_engines import small, start


@pytest.fixture(scope="module")
def engine():
    return start(small())


@pytest.fixture(autouse=True)
def _as_it_was(request):
    """Whatever a test does to the weights of the engine's policy is undone."""
    if "engine" not in request.fixturenames:
        yield
        return
    policy = request.getfixturevalue("engine").policy
    kept = {name: value.clone() for name, value in policy.model.state_dict().items()}
    yield
    policy.model.load_state_dict(kept)


def prompts(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (n,), generator=g).tolist()
    return [torch.randint(6, 700, (length,), generator=g).tolist() for length in lengths]


def shortfalls(policy, found):
    """How far each sampled token's logit is below the highest, by transformers' own forward pass over the response."""
    for prompt, tokens, mask in zip(found.prompts, found.tokens, found.mask, strict=True):
        answer = tokens[mask]
        ids = torch.cat([torch.tensor(prompt), answer])
        with torch.no_grad():
            logits = policy.model(ids[None]).logits[0, len(prompt) - 1 : -1]
        yield logits.amax(-1) - logits.gather(-1, answer[:, None])[:, 0]


def perturb(policy, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=g))


def check_greedy(engine):
    """Every token is the likeliest after those before it; of two that nearly tie, rounding may choose."""
    found = sample(engine, prompts(6), 1, max_tokens=30, temperature=0.0, seed=0)
    below = torch.cat(list(shortfalls(engine.policy, found)))
    assert below.max() < 1e-3
    assert (below == 0).float().mean() > 0.95
    return found.tokens.tolist()


def test_greedy_decoding_is_that_of_transformers_after_every_change_of_the_weights(engine):
    seen = [check_greedy(engine)]
    for seed in (1, 2):
        perturb(engine.policy, seed)
        seen.append(check_greedy(engine))
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_policys_and_those_of_vllm_next_to_them(engine, temperature):
    out = sample(engine, prompts(5), 4, max_tokens=40, temperature=temperature, seed=3)
    with torch.no_grad():
        logp, entropy = engine.policy.score(out.batch, temperature)
    torch.testing.assert_close(logp[out.mask], out.logp[out.mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy[out.mask], out.entropy[out.mask], atol=1e-5, rtol=0)
    assert not torch.equal(out.sampler_logp, out.logp)  # another arithmetic
    torch.testing.assert_close(out.sampler_logp, out.logp, atol=1e-4, rtol=0)
    assert not out.logp[~out.mask].any()
    assert out.prompts == [prompt for prompt in prompts(5) for _ in range(4)]


def test_what_top_p_and_top_k_leave_out_is_not_drawn(engine):
    asked = prompts(1)
    wide = sample(engine, asked, 200, max_tokens=1, temperature=1.0, seed=0)
    for settings in ({"top_k": 3}, {"top_p": 0.8}):
        out = sample(engine, asked, 200, max_tokens=1, temperature=1.0, seed=0, **settings)
        drawn = out.tokens.unique()
        assert 1 < len(drawn) < len(wide.tokens.unique())
        with torch.no_grad():
            probs = engine.policy.model(torch.tensor(asked)).logits[0, -1].softmax(-1)
        ordered = probs.sort(descending=True)
        kept = 3 if "top_k" in settings else int((ordered.values.cumsum(0) < 0.8).sum()) + 1
        assert set(drawn.tolist()) <= set(ordered.indices[:kept].tolist())
        torch.testing.assert_close(
            out.logp[:, 0], probs.log()[out.tokens[:, 0]], atol=1e-4, rtol=0
        )  # the whole softmax
        assert out.sampler_logp is None


def test_sampled_frequencies_match_the_softmax(engine):
    prompt = prompts(1)[0]
    out = sample(engine, [prompt], 4_000, max_tokens=1, temperature=0.7, seed=0)
    with torch.no_grad():
        expected = (engine.policy.model(torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1) * 4_000
    counts = torch.bincount(out.tokens[:, 0], minlength=len(expected))
    assert chi_square(counts.tolist(), expected.tolist()) > 1e-3


def test_the_seed_fixes_the_tokens_and_rows_differ(engine):
    draw = lambda seed: sample(engine, prompts(3), 4, max_tokens=20, temperature=1.0, seed=seed).tokens  # noqa: E731
    first = draw(1)
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))
    assert len({tuple(row) for row in first.tolist()}) == len(first)
    assert torch.equal(draw(2**63 - 1), draw(2**63 - 1))


def test_a_response_ends_with_its_end_token_and_nothing_follows(engine):
    end = engine.policy.tokenizer.eos_token_id
    with torch.no_grad():
        embedding = engine.policy.model.get_input_embeddings().weight
        embedding[end] = embedding[10:200].mean(0) * 6  # likelier than it was
    out = sample(engine, prompts(8), 8, max_tokens=60, temperature=1.5, seed=0)
    assert out.finished.any()
    assert not out.finished.all()
    for tokens, mask, finished in zip(out.tokens, out.mask, out.finished, strict=True):
        length = int(mask.sum())
        assert mask[:length].all()
        assert (tokens[:length] == end).sum() == int(finished)
        assert not finished or tokens[length - 1] == end
        assert finished or length == 60


def test_the_models_own_end_token_ends_no_response_that_does_not_name_it(engine):
    end = engine.policy.model.config.eos_token_id
    with torch.no_grad():
        embedding = engine.policy.model.get_input_embeddings().weight
        embedding[end] = embedding[10:200].mean(0) * 6
    out = ask(engine, [Request(prompt, 40) for prompt in prompts(8) * 4], Sampling(1.5), 0)
    assert (out.tokens == end).any()
    assert out.lengths == [40] * 32
    assert not out.finished.any()


def test_an_end_token_that_the_model_does_not_have_ends_nothing_and_is_no_mistake(engine):
    size, [prompt] = engine.policy.model.config.vocab_size, prompts(1)
    plain, named = (
        ask(engine, [Request(prompt, 20, stop)], Sampling(1.0), 0).tokens for stop in ((), (size, 1_000_000))
    )
    assert torch.equal(plain, named)


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_that_vllm_would_change_or_refuse_is_refused(engine, temperature):
    with pytest.raises(ModelError, match=rf"rollout.temperature={temperature}: vLLM samples at 0 and from 0.01 to 2"):
        engine.sample([Request(prompts(1)[0], 4)], Sampling(temperature), 0)


def test_a_push_that_is_interrupted_is_not_sampled_from(engine, monkeypatch):
    monkeypatch.setattr(engine, "_push", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.sample([Request(prompts(1)[0], 4)], Sampling(1.0), 0)
    with pytest.raises(ModelError, match="cannot be used again"):
        engine.sample([Request(prompts(1)[0], 4)], Sampling(1.0), 0)
    engine._failed = False  # nothing was pushed in this test


def test_a_model_that_vllm_runs_by_transformers_code_stays_usable():
    torch.manual_seed(0)
    config = transformers.SmolLM3Config(
        vocab_size=800, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    policy = Policy(model, load_policy("embedded").tokenizer)
    out = sample(start(policy), prompts(3), 2, max_tokens=8, temperature=1.0, seed=0)
    assert float((out.logp - out.sampler_logp)[out.mask].abs().max()) < 1e-3
    assert policy.model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_the_batch_may_be_bounded_and_the_head_untied():
    engine = start(small(tied=False, seed=5), batch=2)
    check_greedy(engine)
    perturb(engine.policy, 1)
    check_greedy(engine)


def test_half_precision_differs_and_says_by_how_much():
    policy = small()
    policy.model.bfloat16()
    out = sample(start(policy), prompts(5), 4, max_tokens=40, temperature=1.0, seed=3)
    gap = (out.logp - out.sampler_logp)[out.mask]
    assert 1e-4 < gap.abs().mean() < 0.2


def test_adapters_are_merged():
    import peft

    plain = small()
    adapted = peft.get_peft_model(
        plain.model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    )
    policy = Policy(adapted.eval(), plain.tokenizer)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    merged = {name: value.clone() for name, value in weights(policy)}
    engine = start(policy)
    with_adapters = check_greedy(engine)
    with policy.model.disable_adapter():  # the adapters make a difference
        without = sample(CachedEngine(policy), prompts(6), 1, max_tokens=30, temperature=0.0, seed=0)
    assert with_adapters != without.tokens.tolist()
    again = dict(weights(policy))
    assert all(torch.equal(value, again[name]) for name, value in merged.items())  # nothing was merged for good
    assert {*merged} == {*small().model.state_dict()}


def test_vllm_draws_no_random_numbers_of_the_process():
    engine = start(small())

    def drawn():
        return random.random(), numpy.random.random(), float(torch.rand(()))  # noqa: NPY002

    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
    expected = drawn()
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
    sample(engine, prompts(2), 1, max_tokens=4, temperature=1.0, seed=0)  # vLLM starts, and seeds them all
    assert drawn() == expected


def test_what_has_no_room_is_refused(engine):
    with pytest.raises(ModelError, match=r"rollout\.max_tokens=2000 are more than the 1024"):
        sample(engine, prompts(1), 1, max_tokens=2000, temperature=1.0, seed=0)


def test_a_model_that_vllm_cannot_run_is_refused():
    engine = start(load_policy("embedded", device="cpu"))
    with pytest.raises(ModelError, match=r"vLLM cannot sample from LlamaForCausalLM here .*head_dim=40"):
        sample(engine, [[1, 2, 3]], 1, max_tokens=4, temperature=1.0, seed=0)


def test_another_model_in_vllm_is_noticed(monkeypatch):
    policy = small()
    other = small(seed=1)
    monkeypatch.setattr("poise.sampling.vllm_engine.weights", lambda _: weights(other))
    for before, advice in (
        (0, "use rollout.engine=auto"),
        (1, "vLLM was started in this process before: start a new process"),
    ):
        monkeypatch.setattr(VllmEngine, "started", before)
        with pytest.raises(ModelError, match=f"does not run the same model; {advice}"):
            sample(start(policy), [[1, 2, 3]], 1, max_tokens=4, temperature=1.0, seed=0)


def test_a_vllm_that_raised_is_not_asked_again(monkeypatch):
    engine = start(small())
    check_greedy(engine)
    monkeypatch.setattr(engine._llm, "_run_engine", lambda *_, **__: 1 / 0)  # with the requests in its queue
    with pytest.raises(ZeroDivisionError):
        sample(engine, prompts(2), 1, max_tokens=4, temperature=1.0, seed=0)
    monkeypatch.undo()
    with pytest.raises(ModelError, match="cannot be used again"):
        sample(engine, prompts(2), 1, max_tokens=4, temperature=1.0, seed=0)
