"""The figures of the diagnostics against the mathematics."""

import math

import pytest
import torch

from poise import Head, TokenBatch, regulators
from poise.diagnostics import (
    ForwardLoop,
    Intervals,
    dominance,
    gradient_of,
    gradient_sizes,
    logit_rounding,
    step,
    token_gradient_sizes,
    unchanged,
)
from poise.objective import Settings
from poise.referee.diagnose import combine, verdict
from support.batches import fields_of, random_batch
from support.softmax_table import Table
from support.tiny_models import exact, prompts, responses, tiny

METHODS = ("grpo", "ar(alpha=0.3)", "lopti(threshold=0.5)", "tr-grpo", "amplify", "constant(weight=0.5)")


def of(names):
    return {name: regulators.parse(name) for name in names}


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)


# Intervals


def test_every_token_is_in_one_interval():
    batch = random_batch()
    for intervals in (Intervals(), Intervals.cut([0.1]), Intervals.cut([0.05, 0.3, 0.9])):
        masks = intervals.masks(batch)
        assert torch.equal(masks.sum(0), batch.mask.long())
        for (low, high), mask in zip(zip(intervals.edges, intervals.edges[1:], strict=False), masks, strict=True):
            assert ((batch.prob[mask] >= low) & (batch.prob[mask] <= high)).all()


def test_the_edges_belong_to_the_interval_above_and_one_to_the_last():
    logp = torch.tensor([[0.25, 0.5, 1.0, 0.2499]], dtype=torch.float64).log()
    masks = Intervals().masks(TokenBatch(logp, torch.ones(1, 4), torch.ones(1)))
    assert masks[:, 0].long().argmax(0).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("edges", [(0, 1), (0, 0.5, 0.5, 1), (0.1, 0.5, 1), (0, 0.5, 2)])
def test_intervals_that_are_none_are_refused(edges):
    with pytest.raises(ValueError, match="rise from 0 to 1"):
        Intervals(edges)


# Closed forms


@pytest.mark.parametrize("block", [1, 40, 1 << 20])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"softcap": 3.0, "temperature": 1.3, "scale": 0.5}])
def test_sizes_are_those_of_autograd(block, settings):
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(9, 5, generator=g).double(), 3 * torch.randn(11, 5, generator=g).double()
    targets, head = torch.randint(0, 11, (9,), generator=g), Head(weight, **settings)
    logits = head(hidden).requires_grad_()
    logp = logits.log_softmax(-1).gather(1, targets[:, None])
    gradient = torch.autograd.grad(logp.sum(), logits)[0]
    torch.testing.assert_close(
        gradient_sizes(hidden, targets, head, block=block), gradient.norm(dim=1), rtol=1e-12, atol=0
    )


def test_sizes_lie_between_one_minus_p_and_root_two_times_that():
    batch = random_batch()
    sizes = token_gradient_sizes(batch)
    p = (batch.hidden @ batch.head.T).softmax(-1).gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
    ratio = (sizes / (1 - p))[batch.mask]
    assert ((ratio >= 1) & (ratio <= math.sqrt(2) + 1e-12)).all()
    assert (sizes[~batch.mask] == 0).all()


def test_sizes_of_confident_tokens_do_not_vanish_in_rounding():
    head = torch.tensor([[20.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    size = gradient_sizes(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), head)
    rest = math.exp(-20) / (1 + 2 * math.exp(-20))
    assert size.item() == pytest.approx(math.sqrt((2 * rest) ** 2 + 2 * rest**2), rel=1e-5)  # 1 − p is 0 in float32


# Gradients


@pytest.mark.parametrize("name", METHODS)
def test_interval_gradients_add_up_to_the_gradient(name):
    policy = exact(tiny("llama"))
    rollouts = responses(prompts(2), [[9, 4, 7], [8, 1, 6]])
    old = policy.score(rollouts)[0].detach()
    batch = TokenBatch(old, rollouts.mask, torch.tensor([1.0, -0.5, 0.2, -1.0, 0.7, 0.1]).double())
    loop = ForwardLoop(batch, list(policy.model.parameters()), lambda: policy.score(rollouts)[0])
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    intervals = Intervals.cut(batch.prob[batch.mask].quantile(quarters).tolist())
    found = dominance(loop, of([name]), sgd(loop.parameters), intervals=intervals)[0]["regulators"][name]
    assert found["residual"] < 1e-12
    assert sum(found["share"]) == pytest.approx(1, abs=1e-12)
    # and as vectors, entry by entry
    phases = regulators.parse(name)(batch)
    whole = phases[0] if len(phases) == 1 else regulators.parse("grpo")(batch)[0]
    parts = [
        gradient_of(loop, type(whole)("part", whole.policy * mask, whole.kl * mask)) for mask in intervals.masks(batch)
    ]
    for column, expected in zip(zip(*parts, strict=True), gradient_of(loop, whole), strict=True):
        torch.testing.assert_close(sum(part for part in column if part is not None), expected, rtol=1e-9, atol=1e-14)
    low, high = (torch.cat([p.flatten() for p in part]) for part in parts[:2])
    assert found["cosine"][0][1] == pytest.approx(
        float(torch.nn.functional.cosine_similarity(low, high, dim=0)), abs=1e-12
    )


def test_norms_follow_one_minus_p():
    """With two words ‖e_y − π‖ = √2·(1 − p), tokens of a table are orthogonal, and |A| = 1 for all."""
    table = Table(rows=40)
    found = dominance(table.loop(), of(["grpo"]), sgd([table.logits]))[0]
    batch, pulls = table.batch, found["regulators"]["grpo"]
    masks, total = Intervals().masks(batch), batch.mask.sum()
    rest = 1 - batch.prob
    for i, mask in enumerate(masks):
        expected = rest[mask].square().sum().mul(2).sqrt() / total
        assert pulls["norm"][i] == pytest.approx(float(expected), rel=1e-12)
        mean_square = rest[mask].square().mean().mul(2).sqrt() / mask.sum().double().sqrt()
        assert pulls["per_token"][i] == pytest.approx(float(mean_square), rel=1e-12)
    by_token = [pulls["norm"][i] / found["tokens"][i] ** 0.5 for i in range(4)]
    assert by_token == sorted(by_token, reverse=True)


@pytest.mark.parametrize("name", METHODS)
def test_regulators_shift_the_shares_as_their_weights_say(name):
    table = Table(rows=20, vocabulary=7)
    found = dominance(table.loop(), of(["grpo", name]), sgd([table.logits]))[0]["regulators"][name]
    batch = table.batch
    weight = sum(phase.policy for phase in regulators.parse(name)(batch))
    pi = table.logits.detach().softmax(-1)
    error = torch.nn.functional.one_hot(table.targets, 7) - pi
    squares = (weight * error.norm(dim=-1)).square()
    parts = torch.stack([squares[mask].sum() for mask in Intervals().masks(batch)])
    shares = parts / parts.sum()  # orthogonal tokens: ⟨g_i, g⟩ = ‖g_i‖²
    assert found["share"] == pytest.approx(shares.tolist(), rel=1e-10)
    assert found["full"] == pytest.approx(float(parts.sum().sqrt() / batch.mask.sum()), rel=1e-12)


def test_ar_takes_from_the_unlikely_and_amplify_gives_to_them():
    table = Table(rows=20)
    found = dominance(table.loop(), of(["grpo", "ar(alpha=0.5)", "amplify(alpha=0.5)"]), sgd([table.logits]))
    shares = [found[0]["regulators"][name]["share"][0] for name in ("ar(alpha=0.5)", "grpo", "amplify(alpha=0.5)")]
    assert shares == sorted(shares)
    assert shares[0] < shares[1] < shares[2]


# Steps


def test_a_step_moves_its_own_tokens_by_what_the_softmax_says_and_no_others():
    table = Table(rows=24, vocabulary=5)
    lr, batch = 0.3, table.batch
    found = dominance(table.loop(), of(["grpo"]), sgd([table.logits], lr), clip=math.inf)[0]["regulators"]["grpo"]
    masks = Intervals().masks(batch)
    start = table.logits.detach()
    error = torch.nn.functional.one_hot(table.targets, 5) - start.softmax(-1)
    moved = start + lr * batch.token_advantages[..., None] / batch.mask.sum() * error
    after = moved.log_softmax(-1).gather(-1, table.targets[..., None])[..., 0]
    change = (after.exp() - batch.prob).abs()
    for i, row in enumerate(found["influence"][:-1]):
        for j, value in enumerate(row["moved"]):
            assert value == pytest.approx(float(change[masks[j]].mean()) if i == j else 0.0, rel=1e-9, abs=1e-18)
        assert row["rewarded"][i] > 0 > row["punished"][i]
    assert found["influence"][-1]["moved"] == pytest.approx([float(change[m].mean()) for m in masks], rel=1e-9)
    rows = batch.correct
    risen = torch.where(batch.mask, after - batch.old_logp, 0.0).sum(1)[rows]
    assert found["displacement"]["lld/change"] == pytest.approx(float(risen.mean()), rel=1e-9)


def test_phases_are_steps_one_after_the_other():
    table = Table(rows=6, vocabulary=5)
    loop = table.loop()
    optimizer = torch.optim.AdamW([table.logits], lr=0.05)
    name = "lopti(threshold=0.5)"
    _, tokens = dominance(loop, of([name]), optimizer, clip=math.inf)
    start = table.logits.detach().clone()
    for phase in regulators.parse(name)(table.batch):
        loop.gradient(phase)
        optimizer.step()
    expected = torch.where(table.batch.mask, table.logp() - table.batch.old_logp, 0.0)
    torch.testing.assert_close(tokens["change"], expected.detach(), rtol=1e-12, atol=1e-15)
    assert not torch.equal(start, table.logits)


def test_weights_and_optimizer_are_left_as_they_were():
    table = Table()
    optimizer = torch.optim.AdamW([table.logits], lr=0.05)
    loop = table.loop()
    loop.gradient(regulators.parse("grpo")(table.batch)[0])
    optimizer.step()
    weights = table.logits.detach().clone()
    state = {name: value.clone() for name, value in optimizer.state[table.logits].items()}
    dominance(loop, of(METHODS), optimizer)
    assert torch.equal(table.logits, weights)
    assert all(torch.equal(value, state[name]) for name, value in optimizer.state[table.logits].items())
    with unchanged(loop, optimizer):
        step(loop, optimizer, [torch.ones_like(weights)], 1.0)
        assert not torch.equal(table.logits, weights)
    assert torch.equal(table.logits, weights)


def test_momentum_alone_moves_nothing():
    table = Table()
    optimizer = torch.optim.AdamW([table.logits], lr=0.05)
    loop = table.loop()
    loop.gradient(regulators.parse("grpo")(table.batch)[0])
    optimizer.step()
    found, tokens = dominance(loop, {"none": regulators.parse("constant(weight=0)")}, optimizer)
    assert found["regulators"]["none"]["share"] == [None] * 4
    assert tokens["change"].abs().max() == 0


def test_what_a_regulator_finds_out_about_tokens_is_handed_on():
    batch = random_batch(advantages=torch.linspace(-1, 1, 12).double())
    parameter = torch.nn.Parameter(torch.where(batch.mask, batch.old_logp, 0.0))
    loop = ForwardLoop(batch, [parameter], lambda: parameter)
    _, tokens = dominance(loop, of(["grpo", "nthr"]), sgd([parameter]))
    assert tokens.keys() == {"size", "change", "nthr"}
    scored = tokens["nthr"].isfinite()
    assert scored.any()
    assert not scored[batch.correct].any()


def test_a_forward_pass_returns_entropies_for_an_entropy_bonus():
    table, settings = Table(), Settings(entropy_coef=0.1)
    phase = regulators.parse("grpo")(table.batch)[0]

    def forward():
        logs = table.logits.log_softmax(-1)
        return table.logp(), -(logs.exp() * logs).sum(-1)

    loop = ForwardLoop(table.batch, [table.logits], forward, settings)
    (found,), (plain,) = gradient_of(loop, phase), gradient_of(table.loop(), phase)
    mask = table.batch.mask
    (bonus,) = torch.autograd.grad(forward()[1][mask].sum() / mask.sum(), table.logits)
    torch.testing.assert_close(found, plain - 0.1 * bonus)
    assert torch.equal(loop.logp(), table.logp())
    with pytest.raises(ValueError, match=r"forward\(\) must return \(log-probabilities, entropies\)"):
        ForwardLoop(table.batch, [table.logits], table.logp, settings).gradient(phase)


# Words


def test_the_rounding_of_logits_by_hand():
    """A logit of 8.01 becomes 8 in bfloat16, whose steps are 1/16 there; one of 8 stays."""
    head = torch.tensor([[8.01], [8.0]])
    moved = logit_rounding(torch.ones(2, 1), torch.tensor([0, 1]), head)
    p = torch.tensor([8.01, 8.0]).softmax(0)
    torch.testing.assert_close(moved, (p - 0.5).abs())
    assert not logit_rounding(torch.ones(1, 1), torch.tensor([0]), torch.tensor([[8.0], [0.5]])).any()


def test_the_verdict_compares_the_update_with_the_noise_floor():
    mean, sentences = said()
    assert not any("noise floor" in sentence for sentence in sentences)
    moved = mean["regulators"]["grpo"]["influence"][-1]["moved"]
    for factor, rounding in ((0.5, False), (2.0, True)):
        mean["noise"] = {"again": [0.0] * 4, "bfloat16": [value and factor * value for value in moved]}
        last = verdict(mean, mean, Intervals().names, batches=2)[-1]
        assert last.startswith("noise floor of |Δp|: the same weights in smaller passes 0 in 0–0.25 and 0 in 0.75–1")
        assert ("part of the measured change is rounding" in last) is rounding


def test_means_and_errors_over_batches():
    first = {"a": 1.0, "list": [1.0, None], "questions": [1, 2, 3], "gone": {"x": 4.0}, "none": None}
    second = {"a": 3.0, "list": [2.0, 5.0], "questions": [4], "gone": None, "none": None}
    mean, error = combine([first, second])
    assert mean == {"a": 2.0, "list": [1.5, 5.0], "questions": [1, 2, 3, 4], "gone": {"x": 4.0}, "none": None}
    assert error["a"] == pytest.approx(1.0)
    assert error["list"] == [pytest.approx(0.5), None]
    alike = combine([{"questions": [1.0, -1.0]}, {"questions": [-1.0, 1.0]}])[0]
    assert alike == {"questions": [1.0, -1.0, -1.0, 1.0]}  # the first of one batch is not the first of the other


def said(batch_changes=None, names=("grpo", "ar(alpha=0.5)", "lopti(threshold=0.5)"), **settings):
    table = Table(rows=20, **settings)
    if batch_changes:
        table.batch = TokenBatch(**(fields_of(table.batch) | batch_changes))
    found = dominance(table.loop(), of(names), sgd([table.logits]))[0]
    mean, error = combine([found, found])
    return mean, verdict(mean, error, Intervals().names, batches=2)


def test_the_verdict_says_the_numbers():
    mean, sentences = said()
    for sentence, name, i in zip(sentences, ("0–0.25", "0.75–1"), (0, -1), strict=False):
        share = mean["regulators"]["grpo"]["share"][i]
        assert f"p in {name}: {100 * mean['token_share'][i]:.3g} % of the tokens" in sentence
        assert f"{100 * share:.3g} ± 0 % of the gradient of grpo" in sentence


def test_the_verdict_on_a_batch_that_teaches_nothing():
    _, sentences = said({"advantages": torch.zeros(20).double()})
    assert len(sentences) == 1
    assert "nothing to learn" in sentences[0]


def test_the_verdict_where_there_is_nothing_to_compare():
    _, sentences = said(names=("constant(weight=0)", "grpo"))
    assert sentences == ["constant(weight=0) leaves no gradient: put a method first that learns from these tokens."]
    likely = torch.full((20, 12), 0.9, dtype=torch.float64).log()
    _, sentences = said({"old_logp": likely})
    assert sentences == ["The interval 0–0.25 or 0.75–1 has no tokens: choose other intervals."]
