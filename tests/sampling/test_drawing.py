"""How a token is drawn: in proportion to its probability, by random numbers that a seed fixes."""

import math

import pytest
import torch

from poise.sampling.draws import Sampling, mix, uniform
from poise.sampling.native.engine import NativeEngine
from support import sampled_law
from support.chi_square import chi_square
from support.tiny_models import VOCABULARY, prompts, sample, tiny


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
        rows = torch.arange(50).repeat(100)
        for k in range(40):
            point = uniform(k, rows, torch.arange(100).repeat_interleave(50))
            drawn[rows, Sampling(1.0, 0.7, 12).draw(logits[rows], point)[0]] = True
        assert torch.equal(drawn, theirs)

    def test_an_impossible_token_is_never_drawn(self):
        logits = torch.tensor([[-200.0, 0.0, -200.0, 0.0, -200.0]])
        for point in (2.0**-24, 0.5 - 2.0**-24, 0.5 + 2.0**-24, 1 - 2.0**-24):
            token, logp, entropy = Sampling().draw(logits, torch.tensor([point]))
            assert token.item() == (1 if point < 0.5 else 3)
            assert logp.item() == pytest.approx(-math.log(2))
            assert entropy.item() == pytest.approx(math.log(2))

    def test_improbable_tokens_are_drawn_with_their_probability(self):
        row = sampled_law.logits()
        probs = row.softmax(0)
        sampled_law.check(lambda points: Sampling()._choose(probs.expand(len(points), -1), points), row)

    def test_a_point_beyond_all_weights_draws_the_last_token_that_has_one(self):
        logits = torch.tensor([[0.0, 0.3, -0.7, -200.0, -torch.inf]])
        assert Sampling().draw(logits, torch.tensor([1 - 2.0**-53]))[0].item() == 2

    def test_a_logit_of_minus_infinity_adds_nothing_to_the_entropy(self):
        logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
        for temperature in (0.0, 1.0):
            _, logp, entropy = Sampling(temperature).draw(logits.clone(), torch.tensor([0.3]))
            assert entropy.item() == pytest.approx(math.log(2))
            assert logp.item() == pytest.approx(-math.log(2))

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

    def test_all_their_bits_are_random(self):
        bits = (uniform(0, torch.arange(4000), torch.zeros(4000).long()) * 2.0**53).long()
        ones = torch.stack([bits >> k & 1 for k in range(53)]).double().mean(1)
        assert (ones - 0.5).abs().max() < 0.05

    @pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**64 + 5])
    def test_they_are_uniform_and_neighbours_unrelated(self, seed):
        drawn = uniform(seed, torch.arange(300)[:, None], torch.arange(400)[None])
        assert drawn.min() >= 0
        assert drawn.max() < 1
        bins = 16
        cell = (drawn * bins).long()
        even = [drawn.numel() / bins] * bins
        assert chi_square(torch.bincount(cell.flatten(), minlength=bins).tolist(), even) > 1e-4
        other = uniform(seed + 1, torch.arange(300)[:, None], torch.arange(400)[None])
        for neighbour in (cell.roll(1, 0), cell.roll(1, 1), (other * bins).long()):
            pairs = torch.bincount((cell * bins + neighbour).flatten(), minlength=bins**2).tolist()
            assert chi_square(pairs, [drawn.numel() / bins**2] * bins**2) > 1e-4
