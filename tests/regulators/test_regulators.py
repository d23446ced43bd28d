"""Golden values, reductions to GRPO, and what composition means."""

import math

import pytest
import torch

from poise import Phase, TokenBatch, regulators, token_weights
from support.batches import fields_of, random_batch

PROBS = torch.tensor([[0.1, 0.5, 1.0], [0.001, 0.4, 0.9]], dtype=torch.float64)


def golden(**fields):
    base = {
        "old_logp": PROBS.log(),
        "mask": torch.ones(2, 3),
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
    }
    return TokenBatch(**(base | fields))


def weights(name, batch=None, **settings):
    return regulators.get(name, **settings)(batch or golden())


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-12, atol=1e-12)


def test_grpo_is_ones():
    (phase,) = weights("grpo")
    assert phase.name == "all"
    assert phase.policy.eq(1).all()
    assert phase.kl.eq(1).all()


def test_two_passes():
    phases = weights("grpo", passes=2)
    assert [phase.name for phase in phases] == ["pass1", "pass2"]
    assert all(phase.policy.eq(1).all() for phase in phases)


def test_ar():
    (phase,) = weights("ar", alpha=0.2)
    close(phase.policy, [[0.82, 0.9, 1.0], [0.8002, 0.88, 0.98]])
    assert phase.kl.eq(1).all()


def test_amplify():
    (phase,) = weights("amplify", alpha=0.1)
    close(phase.policy, [[1.09, 1.05, 1.0], [1.0999, 1.06, 1.01]])


def test_blame_punishes_what_was_less_likely_than_a_typical_token():
    entropy = torch.full((2, 3), 0.5, dtype=torch.float64)
    (phase,) = weights("blame", golden(entropy=entropy))
    e = math.exp(0.5)
    close(phase.policy, [[1, 1, 1], [1 - 0.001 * e, 1 - 0.4 * e, 0]])  # 0.9·e > 1: typical
    assert phase.kl.eq(1).all()
    (phase,) = weights("blame", golden(entropy=entropy), alpha=0.5)
    close(phase.policy, [[1, 1, 1], [1 - 0.0005 * e, 1 - 0.2 * e, 0.5]])


@pytest.mark.parametrize("wordings", [2, 7, 1000])
def test_blame_does_not_depend_on_wording(wordings):
    entropy = torch.rand(2, 3, dtype=torch.float64)
    plain = golden(entropy=entropy)
    worded = golden(old_logp=PROBS.log() - math.log(wordings), entropy=entropy + math.log(wordings))
    close(weights("blame", worded)[0].policy, weights("blame", plain)[0].policy)


def test_lopti():
    low, high = weights("lopti", threshold=0.4)
    assert (low.name, high.name) == ("low", "high")
    # exp(log(0.4)) is 0.4 here: a token at the threshold belongs to the high side
    close(low.policy, [[1, 0, 0], [1, 0, 0]])
    close(high.policy, [[0, 1, 1], [0, 1, 1]])
    assert torch.equal(low.kl, low.policy)
    assert torch.equal(high.kl, high.policy)


def test_lopti_reversed():
    assert [p.name for p in weights("lopti", order="high-first")] == ["high", "low"]


def test_tr_grpo():
    (phase,) = weights("tr-grpo", alpha=2.0, tau=0.5, mu=0.25, low=0.55, high=1.2)
    expected = [[min(max(2 * (1 / (1 + math.exp(-p / 0.5)) - 0.25), 0.55), 1.2) for p in row] for row in PROBS.tolist()]
    close(phase.policy, expected)
    assert phase.policy[1, 0] == 0.55
    assert phase.policy[0, 2] == 1.2
    assert torch.equal(phase.kl, phase.policy)
    (plain,) = weights("tr-grpo", kl_weighted=False)
    assert plain.kl.eq(1).all()


def test_tr_grpo_defaults_rise_from_low_to_high_and_fall_when_reversed():
    p = torch.linspace(1e-300, 1, 101, dtype=torch.float64)[None]
    batch = TokenBatch(p.log(), torch.ones_like(p), torch.ones(1))
    regulator = regulators.TokenRegulation()
    (rising,), (falling,) = regulator(batch), regulators.TokenRegulation(direction="falling")(batch)
    assert (rising.policy.diff() >= 0).all()
    assert (falling.policy.diff() <= 0).all()
    close(rising.policy[0, [0, -1]], [regulator.low, regulator.high])
    close(rising.policy, falling.policy.flip(1))


def test_entropy_keeps_the_top_share_and_all_of_the_kl():
    entropy = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], dtype=torch.float64)
    (phase,) = weights("entropy", golden(entropy=entropy), quantile=0.34)
    close(phase.policy, [[0, 0, 0], [1, 1, 1]])  # ceil(0.34 · 6) = 3
    assert phase.kl.eq(1).all()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    (phase,) = weights("entropy", golden(entropy=entropy, mask=mask), quantile=0.2)
    close(phase.policy, [[0, 0, 0], [0, 1, 0]])  # the highest of the five that count


def test_entropy_keeps_ties():
    (phase,) = weights("entropy", golden(entropy=torch.ones(2, 3)), quantile=0.2)
    assert phase.policy.eq(1).all()


def test_clip_cov_takes_only_candidates():
    logp = torch.tensor([[-8.0, -0.1, -0.1], [-0.1, -0.1, -0.1]])
    advantages = torch.tensor([[-2.0, 0.1, 0.1], [0.1, 0.1, 0.1]])
    batch = golden(old_logp=logp, advantages=advantages)
    cov = (advantages - advantages.mean()) * (logp - logp.mean())
    assert cov[0, 0] > 5
    assert cov[0, 1:].max() < 1  # so the first token is the only possible candidate, and only with a higher ceiling
    assert weights("clip-cov", batch)[0].policy.eq(1).all()
    (phase,) = weights("clip-cov", batch, high=50.0, seed=3)
    close(phase.policy, [[0, 1, 1], [1, 1, 1]])
    assert phase.metrics["clipped_share"] == pytest.approx(1 / 6)
    assert phase.kl.eq(1).all()


def test_clip_cov_is_a_covariance():
    """Both means are taken off: a constant added to all advantages or all log-probabilities changes nothing."""
    batch = random_batch(prompts=8, length=40)
    settings = {"share": 1.0, "low": 0.3, "high": 5.0}
    zeros = regulators.get("clip-cov", **settings)(batch)[0].policy
    cov_a = batch.token_advantages - batch.token_advantages[batch.mask].mean()
    cov = cov_a * (batch.old_logp - batch.old_logp[batch.mask].mean())
    assert torch.equal(zeros == 0, ~batch.mask | ((cov > 0.3) & (cov < 5.0)))


def test_stare_weights_the_least_probable_tokens_of_one_side_while_entropy_is_low():
    entropy = torch.full((2, 3), 0.2)
    (phase,) = weights("stare", golden(entropy=entropy))
    close(phase.policy, [[1.1, 1, 1], [1, 1, 1]])  # ceil(0.1 · 3) = 1 of the first response's
    assert phase.kl.eq(1).all()
    assert phase.metrics == {"entropy": pytest.approx(0.2), "chosen_share": pytest.approx(1 / 6)}
    (phase,) = weights("stare", golden(entropy=entropy), side="negative", weight=0.9, share=0.5)
    close(phase.policy, [[1, 1, 1], [0.9, 0.9, 1]])
    (phase,) = weights("stare", golden(entropy=entropy + 0.1))
    assert phase.policy.eq(1).all()
    assert weights("stare", golden(entropy=entropy + 1), max_entropy=None)[0].policy[0, 0] == 1.1


def test_numbers_of_the_same_name_stand_side_by_side_in_a_composition():
    batch = golden(entropy=torch.full((2, 3), 0.2))
    (phase,) = regulators.parse('stare(share=1) | stare(side="negative") | stare')(batch)
    shares = [phase.metrics[name] for name in ("chosen_share", "chosen_share_2", "chosen_share_3")]
    assert shares == pytest.approx([1 / 2, 1 / 6, 1 / 6])
    first, second = torch.zeros(2, 3), torch.ones(2, 3)
    marked = [lambda batch, t=tokens: [Phase.of(batch, tokens={"mine": t})] for tokens in (first, second)]
    (phase,) = (regulators.get("grpo") | marked[0] | marked[1])(batch)
    assert phase.tokens["mine"] is first
    assert phase.tokens["mine_2"] is second


def test_two_methods_with_one_seed_draw_apart():
    batch = random_batch(prompts=8, length=40)
    (clipped,) = weights("clip-cov", batch, share=0.3, low=-1e9, high=1e9)
    first, _ = weights("random-split", batch, share=0.3)
    both = ((clipped.policy == 0) & (first.policy > 0) & batch.mask).sum() / first.policy.sum()
    assert 0.15 < both < 0.45
    crossed = regulators.parse("random-split(share=0.5) | random-split(share=0.5, seed=1)")(batch)
    assert all(phase.policy.any() for phase in crossed)


def test_clip_cov_draws_the_share_of_all_tokens():
    batch = random_batch(prompts=8, length=40)
    (phase,) = weights("clip-cov", batch, share=0.05, low=-1e9, high=1e9)
    assert (phase.policy[batch.mask] == 0).sum() == int(0.05 * batch.mask.sum())


def test_stapo_silences_rare_certain_rewarded_tokens_and_renormalises():
    entropy = torch.tensor([[0.0, 0.5, 0.5], [0.0, 1.0, 2.0]], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0], dtype=torch.float64)
    (phase,) = weights("stapo", golden(entropy=entropy, advantages=advantages))
    close(phase.policy, [[1.2, 1.2, 1.2], [0, 1.2, 1.2]])  # 6 tokens, 5 kept
    assert phase.kl.eq(1).all()
    assert phase.metrics["silenced_share"] == pytest.approx(1 / 6)
    (unrewarded,) = weights("stapo", golden(entropy=entropy, advantages=-advantages))
    assert unrewarded.policy.eq(1).all()
    hesitant = torch.full((2, 3), 0.0, dtype=torch.float64)
    hesitant[1, 0] = 1.0
    (uncertain,) = weights("stapo", golden(entropy=hesitant, advantages=advantages))
    assert uncertain.policy.eq(1).all()


def test_constant():
    (phase,) = weights("constant", weight=0.9)
    assert phase.policy.eq(0.9).all()
    assert phase.kl.eq(1).all()


def test_random_split_has_the_share_and_is_complete():
    batch = random_batch(prompts=8, length=40)
    first, second = weights("random-split", batch, share=0.3, seed=5)
    assert first.policy.sum() == round(0.3 * int(batch.mask.sum()))
    assert torch.equal(first.policy + second.policy, batch.mask.to(torch.float64))
    assert torch.equal(first.kl, first.policy)


@pytest.mark.parametrize("like", ["lopti(threshold=0.4)", "ar(alpha=0.3) | lopti(threshold=0.5)"])
def test_a_random_split_follows_another_methods_share(like):
    control, followed = regulators.get("random-split", like=like), regulators.parse(like)
    sizes = []
    for seed in range(3):
        batch = random_batch(seed, prompts=8, length=40)
        first, second = control(batch)
        low, _ = followed(batch)
        assert (first.policy > 0).sum() == (low.policy > 0).sum()
        assert not torch.equal(first.policy > 0, low.policy > 0)
        assert torch.equal(first.policy + second.policy, batch.mask.to(torch.float64))
        sizes.append(float(first.policy.sum() / batch.mask.sum()))
    assert len(set(sizes)) == 3  # it follows batch by batch


def test_a_constant_follows_another_methods_mean():
    (phase,) = weights("constant", like="ar(alpha=0.2)")
    close(phase.policy, torch.full((2, 3), float((0.2 * PROBS + 0.8).mean()), dtype=torch.float64))
    assert phase.kl.eq(1).all()
    (phase,) = weights("constant", like="tr-grpo")
    (followed,) = weights("tr-grpo")
    assert phase.kl.unique().item() == pytest.approx(followed.kl.mean().item())
    batch = random_batch(1)
    for phase, followed in zip(weights("constant", batch, like="lopti"), weights("lopti", batch), strict=True):
        assert phase.policy.sum() == pytest.approx(followed.policy.sum().item())


def test_controls_that_follow_have_a_text_form_and_refuse_what_contradicts():
    for text in ("random-split(like='lopti(threshold=0.3)')", "constant(like='nthr')"):
        assert regulators.text(regulators.parse(text)) == text
        assert regulators.parse(text) == regulators.parse(text)
    assert regulators.parse("constant(like='nthr')").needs == regulators.get("nthr").needs
    assert regulators.parse("constant(like='lopti')").phase_count == 2
    assert regulators.parse("constant(like='ar')").scope == "batch"
    for wrong in ("random-split(like='ar')", "random-split(share=0.3, like='lopti')", "constant(0.5, like='ar')"):
        with pytest.raises(ValueError, match="like"):
            regulators.parse(wrong)


@pytest.mark.parametrize("text", ["random-split(share=0.5)", "clip-cov(share=0.3, low=-1e9, high=1e9)"])
def test_what_is_drawn_depends_on_seed_and_batch_alone(text):
    batch, other = random_batch(1), random_batch(2)
    drawn = regulators.parse(text)(batch)[0].policy
    assert torch.equal(drawn, regulators.parse(text)(batch)[0].policy)
    reseeded = regulators.parse(text[:-1] + ", seed=1)")(batch)[0].policy
    assert not torch.equal(drawn, reseeded)
    both = batch.mask & other.mask
    assert not torch.equal(drawn[both], regulators.parse(text)(other)[0].policy[both])
    state = torch.get_rng_state()
    regulators.parse(text)(batch)
    assert torch.equal(state, torch.get_rng_state())  # nobody else's random numbers are touched


@pytest.mark.parametrize(
    "text",
    [
        "ar(alpha=0)", "amplify(alpha=0.0)", "lopti(threshold=0)", "lopti(threshold=1.001)", "lopti(threshold=7)",
        "nthr(eta=1)", "nthr(eta=1, self_inclusive=True)", "constant(weight=1)", "entropy(quantile=1)",
        "stapo(max_prob=0)", "stare(weight=1)", "stare(share=0)", "blame(alpha=0)",
        "random-split(share=0)", "random-split(share=1)", "clip-cov(share=0)",
        "random-split(like='lopti(threshold=0)')", "constant(like='ar(alpha=0)')",
        "tr-grpo(low=1.0, high=1.0)", "ar(alpha=0) | lopti(threshold=0) | nthr(eta=1)",
    ],
)  # fmt: skip
def test_settings_that_are_grpo_exactly(text):
    batch = random_batch()
    phases = [p for p in regulators.parse(text)(batch) if p.policy.any() or p.kl.any()]
    assert len(phases) == 1
    assert torch.equal(phases[0].policy, batch.mask.to(torch.float64))
    assert torch.equal(phases[0].kl, batch.mask.to(torch.float64))


def test_lopti_at_exactly_one_isolates_the_certain_tokens():
    _, high = weights("lopti", threshold=1.0)
    close(high.policy, [[0, 0, 1], [0, 0, 0]])


def test_composition_multiplies_weights_and_splits_phases():
    batch = random_batch()
    low, high = (regulators.get("ar", alpha=0.3) | regulators.get("lopti", threshold=0.5))(batch)
    assert (low.name, high.name) == ("low", "high")
    (ar,) = regulators.get("ar", alpha=0.3)(batch)
    torch.testing.assert_close(low.policy + high.policy, ar.policy)
    assert torch.equal((low.policy > 0), batch.mask & (batch.prob < 0.5))
    assert torch.equal(low.kl + high.kl, batch.mask.to(torch.float64))  # AR leaves the KL alone
    four = regulators.parse("grpo(passes=2) | lopti")(batch)
    assert [p.name for p in four] == ["pass1/low", "pass1/high", "pass2/low", "pass2/high"]


def test_composition_is_associative_and_gathers_needs_and_reports():
    a, b, c = regulators.get("ar"), regulators.get("nthr"), regulators.get("entropy")
    assert (a | b) | c == a | (b | c)
    assert (a | b | c).needs == b.needs | c.needs
    (phase,) = (a | b | c)(random_batch())
    assert "flagged_share" in phase.metrics


def test_phases_of_ones_own_that_multiply_have_an_end():
    many = regulators.parse(lambda batch: [Phase.of(batch, name=str(i)) for i in range(11)])
    with pytest.raises(ValueError, match="make 121 phases together"):
        (many | many)(random_batch())
    assert regulators.parse("lopti | grpo(passes=3) | random-split").phase_count == 12


def test_plain_callables_compose_on_either_side():
    def half(batch):
        return [Phase.of(batch, 0.5)]

    batch = random_batch()
    for made in (regulators.get("lopti") | half, half | regulators.get("lopti")):
        assert {0.0, 0.5} == set(made(batch)[0].policy.unique().tolist())


def test_every_regulator_reads_the_raw_batch_and_changes_nothing():
    batch = random_batch()
    before = {k: v.clone() for k, v in fields_of(batch).items() if v is not None}
    for name in regulators.TABLE:
        regulators.get(name)(batch)
    for name, value in before.items():
        assert torch.equal(value.nan_to_num(9), getattr(batch, name).nan_to_num(9))


@pytest.mark.parametrize(("name", "field"), [("entropy", "entropy"), ("stapo", "entropy"), ("nthr", "correct")])
def test_a_missing_field_is_named(name, field):
    with pytest.raises(ValueError, match=rf"needs TokenBatch.{field} .*which this batch lacks"):
        weights(name)


def test_phases_may_be_yielded_and_must_have_names_of_their_own():
    batch = golden()

    def generated(batch):
        yield Phase.of(batch, 2.0, name="one")
        yield Phase.of(batch, 3.0, name="two")

    assert [phase.policy.max() for phase in regulators.Function(generated)(batch)] == [2, 3]
    with pytest.raises(ValueError, match="distinct names"):
        regulators.Function(lambda b: [Phase.of(b), Phase.of(b)])(batch)


def test_weights_may_be_given_per_response():
    batch = random_batch(prompts=3, group=3)  # as many responses as tokens: nothing may be transposed
    weight = torch.arange(9.0)
    phase = Phase.of(batch, weight)
    assert torch.equal(phase.policy, batch.mask * weight[:, None].double())
    with pytest.raises(ValueError, match="weights must be"):
        Phase.of(batch, torch.ones(4))


def test_a_misspelt_need_is_caught_where_it_is_written():
    with pytest.raises(TypeError, match="did you mean 'hidden'"):
        type("Mine", (regulators.Regulator,), {"needs": frozenset({"hiden"})})


def test_token_weights():
    batch = golden()
    made = token_weights("ar(alpha=0.2)", old_logp=batch.old_logp, advantages=batch.advantages, mask=batch.mask)
    close(made, [[0.82, 0.9, 1.0], [0.8002, 0.88, 0.98]])
    with pytest.raises(TypeError, match=r"unknown field of TokenBatch 'alpha'.*settings go into the text form"):
        token_weights("ar", alpha=0.2, old_logp=batch.old_logp, advantages=batch.advantages, mask=batch.mask)
    with pytest.raises(ValueError, match=r"2 phases \(low, high\)"):
        token_weights("lopti", old_logp=batch.old_logp, advantages=batch.advantages, mask=batch.mask)


def test_an_empty_mask_is_no_error():
    batch = random_batch(mask=torch.zeros(12, 9))
    for name in regulators.TABLE:
        for phase in regulators.get(name)(batch):
            assert not phase.policy.any()


class TestSummary:
    def test_golden(self):
        batch = golden()
        found = regulators.summary(regulators.get("lopti")(batch), batch)
        assert found["reg/low/weight_mean"] == pytest.approx(2 / 6)
        assert found["reg/low/kl_weight_mean"] == pytest.approx(2 / 6)
        assert found["reg/low/zero_share"] == pytest.approx(4 / 6)
        assert found["reg/low/effective_tokens"] == pytest.approx(2)
        assert found["reg/high/weight_p0.25-0.50"] == 1
        assert found["reg/high/weight_p0.50-0.75"] == 1
        assert found["reg/low/weight_p0.75-1.00"] == 0
        assert found["reg/low/weight_p0.00-0.25"] == 1
        uneven = regulators.summary([Phase.of(batch, PROBS)], batch, intervals=(0, 0.3, 1))
        assert uneven["reg/all/effective_tokens"] == pytest.approx(float(PROBS.sum() ** 2 / PROBS.square().sum()))
        assert uneven["reg/all/weight_p0.30-1.00"] == pytest.approx((0.5 + 1.0 + 0.4 + 0.9) / 4)

    def test_an_interval_without_tokens_is_left_out(self):
        batch = golden(old_logp=torch.full((2, 3), -0.01))
        assert "reg/all/weight_p0.00-0.25" not in regulators.summary(regulators.get("ar")(batch), batch)

    def test_nthr_adds_its_flagged_share(self):
        batch = random_batch()
        found = regulators.summary(regulators.get("nthr", eta=0.0)(batch), batch)
        wrong = batch.mask & ~batch.correct[:, None]
        zero = found["reg/all/zero_share"] * batch.mask.sum()
        assert found["reg/all/flagged_share"] == pytest.approx(float(zero / wrong.sum()))

    def test_all_are_finite_numbers(self):
        batch = random_batch()
        for name in regulators.TABLE:
            for key, value in regulators.summary(regulators.get(name)(batch), batch).items():
                assert key.startswith("reg/")
                assert isinstance(value, float)
                assert math.isfinite(value)


@pytest.mark.parametrize("name", [name for name, kind in regulators.TABLE.items() if kind.scope != "batch"])
def test_a_piece_of_its_scope_is_all_that_a_regulator_looks_at(name):
    batch, regulator = random_batch(seed=3, prompts=4, group=4), regulators.get(name)
    whole = regulator(batch)
    size = 1 if regulator.scope == "token" else 4
    for first in range(0, len(batch.mask), size):
        piece = slice(first, first + size)
        for phase, part in zip(whole, regulator(batch.rows(piece)), strict=True):
            torch.testing.assert_close(part.policy, phase.policy[piece])
            torch.testing.assert_close(part.kl, phase.kl[piece])
