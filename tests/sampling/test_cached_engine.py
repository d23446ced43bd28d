"""The engine against transformers' own forward and generate, on several architectures."""

import pytest
import torch
import transformers

from poise.models.loading import load_policy
from poise.models.policy import Policy
from poise.sampling.cached_engine import CachedEngine
from support.chi_square import chi_square
from support.tiny_models import ARCHITECTURES, VOCABULARY, Words, exact, prompts, sample, tiny


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_decoding_is_that_of_transformers(name):
    policy = tiny(name)
    asked = prompts(4)
    found = sample(CachedEngine(policy), asked, 1, max_tokens=30, temperature=0.0, seed=0)
    for row, prompt in enumerate(asked):
        ids = torch.tensor([prompt])
        theirs = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, pad_token_id=0
        )[0, len(prompt) :]
        ours = found.tokens[row][found.mask[row]]
        assert ours.tolist() == theirs.tolist()[: len(ours)]
        assert len(ours) == len(theirs) or not found.finished[row]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probabilities_agree_with_the_training_forward(name):
    policy = tiny(name)
    out = sample(CachedEngine(policy, batch=5), prompts(4), 3, max_tokens=24, temperature=0.6, seed=3)
    with torch.no_grad():
        logp, entropy = policy.score(out.batch, 0.6)
    torch.testing.assert_close(logp[out.mask], out.logp[out.mask], atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy[out.mask], out.entropy[out.mask], atol=1e-4, rtol=0)
    assert not out.logp[~out.mask].any()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reading_a_prompt_once_for_its_group_changes_neither_value_nor_gradient(name):
    policy = exact(tiny(name))
    out = sample(CachedEngine(policy), prompts(3), 4, max_tokens=12, temperature=1.0, seed=1)
    direction = torch.randn(out.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradients(states, weight):
        policy.model.zero_grad()
        (states.sum(-1) * weight).sum().backward()
        return [p.grad.clone() for p in policy.trunk.parameters()]

    plain = []  # each response behind its own prompt, in one pass without a cache
    for prompt, tokens, mask in zip(out.prompts, out.tokens, out.mask, strict=True):
        ids = torch.tensor([prompt + tokens[mask].tolist()])
        plain.append(policy.trunk(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1])
    shared = policy.hidden(out.batch)
    bound = 1e-10 if shared.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(shared, torch.cat(plain), rtol=bound, atol=bound)
    weight = direction[out.mask]
    for a, b in zip(gradients(shared, weight), gradients(torch.cat(plain), weight), strict=True):
        assert (a - b).norm() <= bound * b.norm()


def test_a_response_ends_with_its_end_token_and_nothing_follows():
    out = sample(CachedEngine(tiny("llama")), prompts(8), 8, max_tokens=60, temperature=1.5, seed=0)
    assert out.finished.any()
    assert not out.finished.all()
    for tokens, mask, finished in zip(out.tokens, out.mask, out.finished, strict=True):
        length = int(mask.sum())
        assert mask[:length].all()
        assert (tokens[:length] == 5).sum() == int(finished)
        assert not finished or tokens[length - 1] == 5
        assert finished or length == out.tokens.shape[1]


def test_the_seed_fixes_the_tokens():
    engine = CachedEngine(tiny("llama"))
    draw = lambda seed: sample(engine, prompts(4), 4, max_tokens=20, temperature=1.0, seed=seed).tokens  # noqa: E731
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_frequencies_match_the_softmax(temperature):
    policy = tiny("llama")
    prompt = prompts(1)[0]
    out = sample(CachedEngine(policy), [prompt], 20_000, max_tokens=1, temperature=temperature, seed=0)
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt])).logits[0, -1]
    expected = (logits / temperature).softmax(-1) * 20_000
    counts = torch.bincount(out.tokens[:, 0], minlength=VOCABULARY)
    assert chi_square(counts.tolist(), expected.tolist()) > 1e-3
    assert chi_square(counts.tolist(), ((logits / (1.3 * temperature)).softmax(-1) * 20_000).tolist()) < 1e-6


def test_the_embedded_model_reads_and_writes_any_text():
    policy = load_policy("embedded", device="cpu")
    for text in (
        "Zoë says: 「こんにちは」 \x00 <script>",
        "(1) Ada is a knight",
        "<think>Ada knight\nAda true ok</think>",
    ):
        assert policy.decode(policy.tokenizer(text)["input_ids"]) == text


def test_an_unknown_step_between_trunk_and_head_is_caught():
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 2
            return out

    torch.manual_seed(0)
    model = Odd(ARCHITECTURES["llama"]()).eval()
    with pytest.raises(ValueError, match="between trunk and head"):
        Policy(model, Words())
