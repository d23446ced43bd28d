"""NTHR against a naive double loop, in both forms, on every kind of group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise import Head, TokenBatch, regulators
from poise.head import influence
from poise.head.influence import group_scores
from poise.regulators import nthr
from poise.regulators.base import scorers, with_scores
from support.batches import fields_of, random_batch
from support.influence_scores import scores


def naive(head, positive, negative, self_inclusive):
    """The definition, pair by pair."""

    def error(hidden, target):
        pi = head(hidden[None])[0].softmax(-1)
        return torch.nn.functional.one_hot(target, len(pi)) - pi

    def score(h, y, responses):
        return sum(
            torch.dot(error(h, y), error(hk, yk)) * torch.dot(h, hk)
            for r in responses
            for hk, yk in zip(*r, strict=True)
        )

    minus = torch.stack([score(h, y, positive) for h, y in zip(*negative, strict=True)])
    plus = []
    for i, own in enumerate(positive):
        others = positive if self_inclusive else [r for j, r in enumerate(positive) if j != i]
        plus.append(
            sum(score(h, y, others) for h, y in zip(*own, strict=True)) / len(own[1]) if others else minus.new_zeros(())
        )
    return minus, torch.stack(plus)


def tokens(g, n, width=4, vocabulary=9):
    return torch.randn(n, width, generator=g, dtype=torch.float64), torch.randint(0, vocabulary, (n,), generator=g)


def make_head(g, width=4, vocabulary=9):
    weight = torch.randn(vocabulary, width, generator=g, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=g, dtype=torch.float64)
    return Head(weight, bias, temperature=0.7, softcap=5.0)


@pytest.mark.parametrize("self_inclusive", [False, True])
@pytest.mark.parametrize("lengths", [[3], [2, 5], [1, 4, 2]])
@pytest.mark.parametrize("block", [1, 40, 1 << 22])
def test_both_forms_agree_with_the_definition(lengths, self_inclusive, block):
    g = torch.Generator().manual_seed(len(lengths))
    head = make_head(g)
    positive, negative = [tokens(g, n) for n in lengths], tokens(g, 6)
    expected = naive(head, positive, negative, self_inclusive)
    for form in ("pair", "linear", "auto"):
        found = scores(head, positive, negative, self_inclusive=self_inclusive, form=form, block=block)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sure", ["correct", "wrong"])
def test_a_late_largest_logit_rescales_the_pairs_of_either_side(sure):
    """Only some tokens meet their largest logit in a later slice of the vocabulary, far above those before."""
    g = torch.Generator().manual_seed(0)
    head = Head(torch.randn(9, 4, generator=g, dtype=torch.float64))
    late = head.weight[8]

    def response(n, surer):
        hidden, targets = tokens(g, n)
        return (hidden * 0.1 + late * 60 if surer else hidden * 0.1), targets

    positive = [response(n, sure == "correct" and n == 3) for n in (2, 3)]
    negative = response(4, sure == "wrong")
    expected = naive(head, positive, negative, False)
    found = scores(head, positive, negative, form="pair", block=27)  # three words at a time
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lengths", [[0, 3], [3, 0], [2, 0, 4]])
def test_an_empty_response_adds_nothing(lengths):
    g = torch.Generator().manual_seed(0)
    head, negative = make_head(g), tokens(g, 4)
    positive = [tokens(g, n) for n in lengths]
    without = scores(head, [each for each in positive if len(each[1])], negative, form="pair")
    found = scores(head, positive, negative, form="pair")
    torch.testing.assert_close(found.negative, without.negative)
    assert not scores(head, [tokens(g, 0)], negative, form="pair").negative.any()  # nothing correct


@given(seed=st.integers(0, 9999), n=st.lists(st.integers(1, 7), min_size=1, max_size=4), block=st.integers(1, 400))
def test_forms_agree(seed, n, block):
    g = torch.Generator().manual_seed(seed)
    head, positive, negative = make_head(g), [tokens(g, k) for k in n], tokens(g, 5)
    pair, linear = (scores(head, positive, negative, form=form, block=block) for form in ("pair", "linear"))
    for a, b in zip(pair, linear, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_scores_are_inner_products_of_gradients_at_the_head():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 4, generator=g, dtype=torch.float64).requires_grad_()
    positive, negative = [tokens(g, 3), tokens(g, 2)], tokens(g, 2)

    def gradient(h, y):
        return torch.autograd.grad((h @ weight.T).log_softmax(-1)[y], weight)[0]

    total = sum(gradient(h, y) for response in positive for h, y in zip(*response, strict=True))
    expected = [(gradient(h, y) * total).sum() for h, y in zip(*negative, strict=True)]
    found = scores(weight.detach(), positive, negative)
    torch.testing.assert_close(found.negative, torch.stack(expected))


def test_half_precision_is_accumulated_in_float32():
    g = torch.Generator().manual_seed(0)
    head, positive, negative = make_head(g).weight, [tokens(g, 40), tokens(g, 30)], tokens(g, 50)
    half = [(h.bfloat16(), y) for h, y in positive], (negative[0].bfloat16(), negative[1])
    exact = scores(
        head.bfloat16().double(), *[[(h.double(), y) for h, y in half[0]], (half[1][0].double(), half[1][1])]
    )
    for form in ("pair", "linear"):
        found = scores(head.bfloat16(), *half, form=form)
        assert found.negative.dtype == torch.float32
        torch.testing.assert_close(found.negative.double(), exact.negative, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.positive.double(), exact.positive, rtol=1e-4, atol=1e-4)


def all_pairs(head, hidden, targets, lengths):
    """The definition with whole arrays, in whatever precision it is given."""
    errors = head(hidden).softmax(-1).neg_()
    errors[torch.arange(len(targets)), targets] += 1
    n = sum(lengths)
    pairs = (errors[:n] @ errors.T).double() * (hidden[:n] @ hidden.T).double()
    negative = pairs[:, n:].sum(0)
    for own in torch.arange(n).split(lengths):
        pairs[own[0] : own[-1] + 1, own[0] : own[-1] + 1] = 0
    return negative, torch.stack([part.sum() / part.shape[1] for part in pairs[:, :n].split(lengths, 1)])


def as_double(head):
    bias = None if head.bias is None else head.bias.double()
    return Head(head.weight.double(), bias, head.temperature, head.scale, head.softcap)


def sampled_group(g, head, sizes):
    """Targets drawn from the distributions themselves, as in rollouts."""
    hidden = torch.randn(sum(sizes), head.weight.shape[1], generator=g).to(head.weight.dtype)
    targets = torch.multinomial(head(hidden).float().softmax(-1), 1, generator=g)[:, 0]
    *positive, negative = zip(hidden.split(sizes), targets.split(sizes), strict=True)
    return hidden, targets, positive, negative


@pytest.mark.parametrize("block", [5000, 1 << 20])
@pytest.mark.parametrize("kind", ["plain", "softcap", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands_are_as_near_as_the_naive_form(dtype, kind, block):
    """The route of a GPU, here in plain torch: at most twice the error of all pairs in bfloat16."""
    g = torch.Generator().manual_seed(0)
    weight = 3 * torch.randn(1501, 64, generator=g) / 8  # an entropy of about 4 nats
    settings = {"plain": {}, "softcap": {"softcap": 12.0, "temperature": 0.7}, "bias": {"scale": 1.2}}[kind]
    bias = torch.randn(1501, generator=g).to(dtype) if kind == "bias" else None
    head = Head(weight.to(dtype), bias, **settings)
    hidden, targets, positive, negative = sampled_group(g, head, sizes := [60, 90, 40, 200])
    exact = all_pairs(as_double(head), hidden.double(), targets, sizes[:-1])
    coarse = Head(head.weight.bfloat16(), None if bias is None else bias.bfloat16(), **settings)
    rough = all_pairs(coarse, hidden.bfloat16(), targets, sizes[:-1])
    for form in ("pair", "linear"):
        found = scores(head, positive, negative, form=form, half=True, block=block)
        for ours, theirs, truth in zip(found, rough, exact, strict=True):
            assert ours.dtype == torch.float32
            assert (ours - truth).norm() <= 2 * (theirs - truth).norm()


@pytest.mark.parametrize("form", ["pair", "linear"])
def test_confident_tokens_do_not_cancel_in_float32(form):
    """1 − π is 1e-6 here and keeps its digits: it is summed from the other tokens, not taken from 1."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 32, generator=g)
    hidden = weight[(targets := torch.randint(0, 50, (90,), generator=g))] + torch.randn(90, 32, generator=g) / 10
    sizes = [20, 30, 40]
    *positive, negative = zip(hidden.split(sizes), targets.split(sizes), strict=True)
    truth = [(h.double(), y) for h, y in (*positive, negative)]
    exact = scores(weight.double(), truth[:-1], truth[-1], form=form)
    for a, b in zip(scores(weight, positive, negative, form=form), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("half", [False, True])
def test_logits_that_rise_along_the_vocabulary(half):
    """Each slice towers over the one before: what was summed has to shrink with the running maximum."""
    g = torch.Generator().manual_seed(0)
    head = Head(torch.randn(60, 8, generator=g) * torch.linspace(0.1, 40, 60)[:, None], torch.arange(60.0) * 2)
    hidden, targets, positive, negative = sampled_group(g, head, sizes := [10, 12, 20])
    exact = all_pairs(as_double(head), hidden.double(), targets, sizes[:-1])
    for form in ("pair", "linear"):
        found = scores(head, positive, negative, form=form, block=42 * 4, half=half)
        for a, b in zip(found, exact, strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()


def test_tokens_that_cannot_be_sampled():
    g = torch.Generator().manual_seed(0)
    bias = torch.zeros(40, dtype=torch.float64)
    bias[:10] = bias[30:] = -torch.inf  # whole slices of them, the first included
    head = Head(torch.randn(40, 4, generator=g, dtype=torch.float64), bias)
    short = Head(head.weight[10:30])
    positive, negative = [tokens(g, n, 4, 20) for n in (3, 4)], tokens(g, 5, 4, 20)
    expected = scores(short, positive, negative)
    moved = [(h, y + 10) for h, y in (*positive, negative)]
    for form in ("pair", "linear"):
        for a, b in zip(scores(head, moved[:-1], moved[-1], form=form, block=36), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["pair", "linear"])
def test_the_threshold_does_not_cancel_in_float32(form):
    """A response's score with itself is far larger than with the others: it must not be added and taken off again."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(2000, 64, generator=g, dtype=torch.float64) / 8
    positive, negative = [tokens(g, 300, 64, 2000) for _ in range(4)], tokens(g, 50, 64, 2000)
    exact = scores(weight, positive, negative, form=form)
    rough = scores(weight.float(), [(h.float(), y) for h, y in positive], (negative[0].float(), negative[1]), form=form)
    for a, b in zip(rough, exact, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-4


def test_the_cheaper_form_is_chosen(monkeypatch):
    g = torch.Generator().manual_seed(0)
    chosen = []
    for form in ("_pair", "_linear"):
        monkeypatch.setattr(
            influence, form, lambda _, group, *__, form=form: (chosen.append(form), torch.zeros(len(group.hidden)))[1]
        )
    scores(make_head(g), [tokens(g, 8)], tokens(g, 50))
    scores(make_head(g), [tokens(g, 9)], tokens(g, 1))
    assert chosen == ["_pair", "_linear"]  # pairs up to 2·d = 8 tokens of correct responses


def test_groups_do_not_see_each_other():
    g = torch.Generator().manual_seed(0)
    made = make_head(g)
    groups = [[3, 2, 4], [20, 9], [1, 1, 1, 1, 2]]  # the second in the linear form
    parts = [[tokens(g, count) for count in group] for group in groups]
    hidden, targets = (torch.cat(values) for values in zip(*(part for group in parts for part in group), strict=True))
    found = group_scores(made, hidden, targets, groups)
    alone = [scores(made, positive, negative) for *positive, negative in parts]
    for name in ("negative", "positive"):
        torch.testing.assert_close(getattr(found, name), torch.cat([getattr(one, name) for one in alone]))


def test_the_group_whose_scores_are_not_finite_is_named():
    batch = random_batch(0, correct=torch.tensor([1, 1, 0, 0] * 3))
    hidden = batch.hidden.clone()
    hidden[6] = torch.inf
    with pytest.raises(ValueError, match=r"the group in rows \[4, 5, 6, 7\] are not finite"):
        regulators.get("nthr")(TokenBatch(**(fields_of(batch) | {"hidden": lambda rows: hidden[rows]})))


def test_scores_that_are_not_finite_are_an_error():
    batch = random_batch(0, hidden=lambda rows: torch.full((len(rows), 9, 5), torch.nan, dtype=torch.float64))
    with pytest.raises(ValueError, match="are not finite: check hidden and head"):
        regulators.get("nthr", self_inclusive=True)(batch)


def test_an_opaque_head_is_refused():
    g = torch.Generator().manual_seed(0)
    with pytest.raises(TypeError, match="cannot be sliced: pass its weight"):
        scores(lambda h: h, [tokens(g, 2)], tokens(g, 2))


def expected_weights(batch, beta=1.0, eta=None, self_inclusive=False):
    """The method, from its definition."""
    weight = batch.mask.double()
    for rows in batch.group_members():
        right = [int(r) for r in rows if batch.correct[r]]
        wrong = [int(r) for r in rows if not batch.correct[r]]
        if not wrong or len(right) < (1 if self_inclusive else 2):
            continue
        take = lambda r: (batch.hidden[r][batch.mask[r]], batch.targets[r][batch.mask[r]])  # noqa: E731
        factor = 2 * abs(0.5 - len(right) / len(rows)) if eta is None else eta
        for r in wrong:
            minus, plus = naive(Head(batch.head), [take(i) for i in right], take(r), self_inclusive)
            weight[r][batch.mask[r]] = torch.ones_like(minus).masked_fill(minus > beta * plus.min(), factor)
    return weight


@pytest.mark.parametrize("settings", [{}, {"eta": 0.0}, {"beta": 0.3}, {"self_inclusive": True, "eta": 0.25}])
@pytest.mark.parametrize("seed", range(4))
def test_weights_against_the_definition(seed, settings):
    batch = random_batch(seed, group=5)
    (phase,) = regulators.get("nthr", **settings)(batch)
    torch.testing.assert_close(phase.policy, expected_weights(batch, **settings), rtol=1e-12, atol=1e-12)
    assert torch.equal(phase.kl, batch.mask.double())


@pytest.mark.parametrize("n_correct", [0, 1, 2, 4])
def test_groups_with_none_one_some_and_all_correct(n_correct):
    correct = (torch.arange(12) % 4) < n_correct
    batch = random_batch(3, correct=correct)
    (exclusive,) = regulators.get("nthr", eta=0.0)(batch)
    (inclusive,) = regulators.get("nthr", eta=0.0, self_inclusive=True)(batch)
    assert (exclusive.metrics["scored_share"] > 0) == (n_correct == 2)
    assert (inclusive.metrics["scored_share"] > 0) == (n_correct in (1, 2))
    torch.testing.assert_close(exclusive.policy, expected_weights(batch, eta=0.0))
    torch.testing.assert_close(inclusive.policy, expected_weights(batch, eta=0.0, self_inclusive=True))
    assert exclusive.policy[correct].eq(batch.mask[correct]).all()  # correct responses are never touched


def test_a_correct_response_without_tokens_is_passed_over():
    batch = random_batch(1, prompts=1, correct=torch.tensor([True, True, False, False]))
    mask = batch.mask.clone()
    mask[0] = False
    emptied = TokenBatch(**(fields_of(batch) | {"mask": mask}))
    (phase,) = regulators.get("nthr")(emptied)
    assert phase.metrics["scored_share"] == 0  # one correct response is left, and none to compare it with


@pytest.mark.parametrize(
    ("places", "expected"), [(1, [[0, 1, 2, 3], [8, 10, 9, 11]]), (1000, [[0, 1, 2, 3, 8, 10, 9, 11]])]
)
def test_hidden_states_given_lazily_are_asked_for_once_for_scored_groups(places, expected, monkeypatch):
    monkeypatch.setattr(nthr, "TOKENS", places)  # how many groups are asked for at once
    correct = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0])
    batch = random_batch(5, correct=correct)
    asked = []

    def lazy(rows):
        asked.append(rows.tolist())
        return batch.hidden[rows]

    (phase,) = regulators.get("nthr")(TokenBatch(**(fields_of(batch) | {"hidden": lazy})))
    assert asked == expected
    assert torch.equal(phase.policy, regulators.get("nthr")(batch)[0].policy)


@pytest.mark.parametrize("settings", [{}, {"beta": 0.3, "self_inclusive": True}])
@pytest.mark.parametrize("seed", range(3))
def test_scores_and_weights_in_two_places(seed, settings):
    """A framework scores where the hidden states are, group by group, and weighs where the whole batch is."""
    batch = random_batch(seed, prompts=4, group=5, correct=torch.tensor([1, 1, 0, 0, 0] * 2 + [1] * 5 + [0] * 5))
    method = regulators.get("nthr", **settings) | regulators.get("ar")
    (part,) = scorers(method)
    pieces = [part.scores(batch.rows(slice(first, first + 5))) for first in range(0, 20, 5)]
    blind = TokenBatch(**(fields_of(batch) | {"hidden": None, "head": None, "targets": None}))
    (expected,), (found,) = method(batch), with_scores(method, [torch.cat(pieces)])(blind)
    assert torch.equal(found.policy, expected.policy)
    assert found.metrics == expected.metrics
    assert 0 < found.metrics["flagged_share"] < 1
    torch.testing.assert_close(found.tokens["nthr"], expected.tokens["nthr"], equal_nan=True)
    pieces[0] = torch.full_like(pieces[0], torch.nan)  # was not whole anywhere
    (left,) = with_scores(regulators.get("nthr", **settings), [torch.cat(pieces)])(blind)
    assert torch.equal(left.policy[:5], batch.mask[:5].double())
    assert left.metrics["scored_share"] == expected.metrics["scored_share"] / 2


def test_scores_for_elsewhere_must_be_finite():
    batch = random_batch(0, correct=torch.tensor([1, 1, 0, 0] * 3))
    hidden = batch.hidden.clone()
    hidden[6] = torch.inf
    with pytest.raises(ValueError, match=r"the group in rows \[4, 5, 6, 7\] are not finite"):
        regulators.get("nthr").scores(TokenBatch(**(fields_of(batch) | {"hidden": lambda rows: hidden[rows]})))


def test_a_linear_layer_is_a_head():
    batch = random_batch(2)
    layer = torch.nn.Linear(5, 7, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(batch.head)
    layered = TokenBatch(**(fields_of(batch) | {"head": layer}))
    assert torch.equal(regulators.get("nthr")(layered)[0].policy, regulators.get("nthr")(batch)[0].policy)
