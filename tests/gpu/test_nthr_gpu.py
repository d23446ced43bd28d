"""NTHR on a GPU: the kernels against plain torch, both forms against float64, and the weights that come of it."""

import pytest
import torch

from poise import Head, TokenBatch, regulators
from poise.head import influence_elementwise as influence_steps
from poise.head.influence_elementwise import Rows
from support.batches import random_batch
from support.influence_scores import scores

DEVICE = "cuda"
influence_kernels = pytest.importorskip("poise.head.influence_kernels", reason="no Triton")
HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 6.0, "scale": 0.8},
    "bias": {"bias": True, "temperature": 1.3, "softcap": 20.0},
}


def make_head(g, kind, vocabulary, width, dtype=torch.bfloat16):
    """Some logits far from the others, so that the entropy is a few nats."""
    settings = dict(HEADS[kind])
    if settings.pop("bias", False):
        settings["bias"] = torch.randn(vocabulary, generator=g, device=DEVICE)
    weight = 2.5 * torch.randn(vocabulary, width, generator=g, device=DEVICE) / width**0.5
    return Head(weight.to(dtype), **settings)


def sample(g, head, count):
    hidden = torch.randn(count, head.weight.shape[1], generator=g, device=DEVICE).to(head.weight.dtype)
    return hidden, torch.multinomial(head(hidden).float().softmax(-1), 1, generator=g)[:, 0]


def error(found, expected):
    """Relative; 0 where both are 0, as for a single correct response that has none to be scored against."""
    difference = float((found.double() - expected.double()).norm())
    return difference and difference / float(expected.double().norm())


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 128, 4096 + 77])  # a slice narrower than a block, and one of more than one
def test_walk_is_that_of_plain_torch(kind, dtype, width):
    g = torch.Generator(DEVICE).manual_seed(0)
    n, start = 7, 100
    head = make_head(g, kind, start + 2 * width, 4, dtype)
    targets = torch.randint(0, head.vocabulary, (n,), generator=g, device=DEVICE)
    targets[:2] = torch.tensor([start, start + width - 1], device=DEVICE)
    found, expected = (Rows.start(torch.empty(n, 1, device=DEVICE)) for _ in range(2))
    memory = torch.full((n, width + 3), torch.nan, device=DEVICE, dtype=dtype)  # the rows of a slice lie apart
    for turn, first in enumerate((start, start + width, 0)):
        raw = ((1 + 12 * turn) * torch.randn(n, width, generator=g, device=DEVICE)).to(dtype)  # peaks rise
        for update, write in ((True, False), (True, True), (False, True)):  # the slice counts twice: no matter
            ours, plain = memory[:, :width].copy_(raw), raw.clone()
            shrink = influence_kernels.walk(ours, head, first, targets, found, update=update, write=write)
            wanted = influence_steps.walk(plain, head, first, targets, expected, update=update, write=write)
            if update:
                torch.testing.assert_close(shrink, wanted, rtol=1e-4, atol=1e-30)
                for name in ("top", "others", "own"):
                    torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
            if write:
                written = influence_steps.stored(ours), influence_steps.stored(plain)
                torch.testing.assert_close(*written, rtol=1e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-6)
    assert memory[:, width:].isnan().all()  # nothing beside the slice was touched


@pytest.mark.parametrize("shape", [(1, 1), (33, 200), (64, 128)])
def test_rescale_is_that_of_plain_torch(shape):
    g = torch.Generator(DEVICE).manual_seed(0)
    pairs = torch.randn(shape, generator=g, device=DEVICE)
    left, right = torch.ones(shape[0], device=DEVICE), torch.ones(shape[1], device=DEVICE)
    left[-1], right[0] = 0.25, 0.5
    expected = pairs.clone()
    influence_steps.rescale(expected, left, right)
    influence_kernels.rescale(pairs, left, right)
    torch.testing.assert_close(pairs, expected)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("self_inclusive", [False, True])
def test_columns_are_those_of_plain_torch(kind, self_inclusive):
    g = torch.Generator(DEVICE).manual_seed(0)
    head = make_head(g, kind, 11, 4)
    n, height, first = 150, 131, 5
    targets = torch.randint(0, 11, (n,), generator=g, device=DEVICE)
    owner = torch.arange(n, device=DEVICE) // 40
    noise = lambda *shape: torch.randn(*shape, generator=g, device=DEVICE)  # noqa: E731
    rows = Rows(noise(n), noise(n).exp(), noise(n))
    given = noise(height, n).exp(), noise(height, n), noise(height, n).bfloat16(), noise(height, n).bfloat16()
    args = head, targets, owner, rows, first, self_inclusive
    for width in (n, 70):  # of all tokens, or of the first ones
        part = [x[:, :width].contiguous() for x in given]
        found = influence_kernels.columns(*part, *args)
        assert found.shape == (width,)
        assert error(found, influence_steps.columns(*part, *args)) < 1e-5


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("self_inclusive", [False, True])
def test_combine_is_that_of_plain_torch(count, self_inclusive):
    g = torch.Generator(DEVICE).manual_seed(0)
    parts = torch.randn(count, 50, 33, generator=g, device=DEVICE)[:, :41]
    total, products = influence_kernels.combine(parts, self_inclusive, torch.bfloat16)
    expected = influence_steps.combine(parts, self_inclusive, torch.bfloat16)
    torch.testing.assert_close(total, expected[0], rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(products, expected[1], rtol=1e-4, atol=1e-2)


def naive(head, hidden, targets, lengths, self_inclusive):
    """All pairs with whole arrays, in the dtype that it is given."""
    errors = head(hidden).to(hidden.dtype).softmax(-1).neg_()
    errors[torch.arange(len(targets), device=DEVICE), targets] += 1
    n = sum(lengths)
    pairs = (errors[:n] @ errors.T).double() * (hidden[:n] @ hidden.T).double()
    negative = pairs[:, n:].sum(0)
    if not self_inclusive:
        for own in torch.arange(n).split(lengths):
            pairs[own[0] : own[-1] + 1, own[0] : own[-1] + 1] = 0
    means = [part.sum() / part.shape[1] for part in pairs[:, :n].split(lengths, 1)]
    return negative, torch.stack(means)


def as_double(head):
    bias = None if head.bias is None else head.bias.double()
    return Head(head.weight.double(), bias, head.temperature, head.scale, head.softcap)


@pytest.mark.parametrize("self_inclusive", [False, True])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("lengths", "wrong", "vocabulary"), [([40, 70, 30], 150, 5003), ([300], 64, 4096)])
@pytest.mark.parametrize("block", [None, 1 << 17])
def test_both_forms_are_as_near_to_float64_as_the_naive_form(lengths, wrong, vocabulary, kind, self_inclusive, block):
    g = torch.Generator(DEVICE).manual_seed(len(lengths))
    head = make_head(g, kind, vocabulary, 96)
    hidden, targets = sample(g, head, sum(lengths) + wrong)
    *positive, negative = zip(hidden.split([*lengths, wrong]), targets.split([*lengths, wrong]), strict=True)
    exact = naive(as_double(head), hidden.double(), targets, lengths, self_inclusive)
    rough = naive(head, hidden, targets, lengths, self_inclusive)
    # One error for both kinds: a handful of means says little about the precision of either.
    allowed = 2 * max(error(a, b) for a, b in zip(rough, exact, strict=True))
    for form in ("pair", "linear"):
        found = scores(head, positive, negative, self_inclusive=self_inclusive, form=form, block=block)
        for ours, truth in zip(found, exact, strict=True):
            assert error(ours, truth) <= allowed


@pytest.mark.parametrize("form", ["pair", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_precisions(form, dtype):
    g = torch.Generator(DEVICE).manual_seed(3)
    head = make_head(g, "plain", 3001, 64, dtype)
    hidden, targets = sample(g, head, 300)
    *positive, negative = zip(hidden.split([50, 70, 180]), targets.split([50, 70, 180]), strict=True)
    exact = naive(as_double(head), hidden.double(), targets, [50, 70], False)
    for ours, truth in zip(scores(head, positive, negative, form=form), exact, strict=True):
        assert error(ours, truth) < (1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("n_correct", [0, 1, 2, 4])
def test_flags_are_those_of_float64_but_for_a_margin(n_correct):
    g = torch.Generator(DEVICE).manual_seed(n_correct)
    head = make_head(g, "temperature", 2003, 64)
    hidden, targets = (part.view(12, 40, *part.shape[1:]) for part in sample(g, head, 480))
    given = {
        "old_logp": torch.zeros(12, 40, device=DEVICE),
        "mask": torch.rand(12, 40, generator=g, device=DEVICE) > 0.2,
        "advantages": torch.zeros(12, device=DEVICE),
        "groups": torch.arange(3, device=DEVICE).repeat_interleave(4),
        "correct": (torch.arange(12, device=DEVICE) % 4) < n_correct,
        "targets": targets,
    }
    batch = TokenBatch(**given, hidden=hidden, head=head)
    exact = TokenBatch(**given, hidden=hidden.double(), head=as_double(head))
    ours, truth = (regulators.get("nthr", eta=0.0)(b)[0] for b in (batch, exact))
    assert ours.metrics["scored_share"] == truth.metrics["scored_share"] == (1 if n_correct == 2 else 0)
    if n_correct != 2:
        assert torch.equal(ours.policy, batch.mask.float())
        return
    assert 0 < ours.metrics["flagged_share"] < 1
    for rows in batch.group_members():
        right, wrong = rows[:2], rows[2:]
        take = lambda r: (exact.hidden[r][batch.mask[r]], targets[r][batch.mask[r]])  # noqa: E731
        result = scores(exact.head, [take(r) for r in right], take(wrong))
        gap = (result.negative - result.positive.min()).abs() / result.negative.square().mean().sqrt()
        flipped = (ours.policy != truth.policy)[wrong][batch.mask[wrong]]
        assert (gap[flipped] < 0.1).all()  # only scores beside the threshold fall on its other side
        assert float(flipped.float().mean()) < 0.05


def test_a_batch_on_the_gpu_gives_the_weights_of_the_cpu():
    batch = random_batch(5)
    moved = TokenBatch(
        **{
            name: value.to(DEVICE) if isinstance(value := getattr(batch, name), torch.Tensor) else value
            for name in TokenBatch.__dataclass_fields__
        }
    )
    assert torch.equal(regulators.get("nthr")(moved)[0].policy.cpu(), regulators.get("nthr")(batch)[0].policy)
