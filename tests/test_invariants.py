"""What must not matter: padding, the order of responses, and who their neighbours are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise import TokenBatch, regulators
from poise.diagnostics import displacement
from support.batches import fields_of, random_batch

DRAWN = {"random-split", "clip-cov"}  # drawn per place in the batch: another order draws other tokens


def close(a, b):
    """To the last bit or two: the vectorised exp and sigmoid round the ends of a row differently."""
    torch.testing.assert_close(a, b, rtol=1e-15, atol=0)


def padded(batch, extra):
    """The same batch with more columns of garbage on the right."""

    def pad(value):
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value is batch.head:
            return value
        shape = (len(value), extra, *value.shape[2:])
        garbage = torch.full(shape, torch.nan) if value.is_floating_point() else torch.full(shape, -7)
        return torch.cat([value, torch.zeros(shape, dtype=torch.bool) if value is batch.mask else garbage.to(value)], 1)

    return TokenBatch(**{name: pad(value) for name, value in fields_of(batch).items()})


@pytest.mark.parametrize("name", regulators.TABLE)
@given(seed=st.integers(0, 999), extra=st.integers(1, 6))
def test_padding_does_not_matter(name, seed, extra):
    batch = random_batch(seed)
    wide = padded(batch, extra)
    for a, b in zip(regulators.get(name)(batch), regulators.get(name)(wide), strict=True):
        close(a.policy, b.policy[:, :9])
        close(a.kl, b.kl[:, :9])
        assert not b.policy[:, 9:].any()


@pytest.mark.parametrize("name", [name for name in regulators.TABLE if name not in DRAWN])
@given(seed=st.integers(0, 999))
def test_the_order_of_responses_does_not_matter(name, seed):
    batch = random_batch(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    for a, b in zip(regulators.get(name)(batch), regulators.get(name)(batch.rows(order)), strict=True):
        torch.testing.assert_close(a.policy[order], b.policy, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "ar", "lopti", "tr-grpo", "amplify", "constant"])
@given(seed=st.integers(0, 999))
def test_token_by_token_regulators_do_not_see_the_neighbours(name, seed):
    """So these may also be applied to micro-batches, as some frameworks must."""
    batch = random_batch(seed)
    for i, phase in enumerate(regulators.get(name)(batch)):
        piece = regulators.get(name)(batch.rows(slice(3, 7)))[i]
        close(phase.policy[3:7], piece.policy)


@pytest.mark.parametrize("name", ["grpo", "ar", "lopti", "tr-grpo", "amplify", "constant", "nthr"])
def test_groups_do_not_see_each_other(name):
    batch = random_batch(4)
    for i, phase in enumerate(regulators.get(name)(batch)):
        piece = regulators.get(name)(batch.rows(slice(4, 8)))[i]
        torch.testing.assert_close(phase.policy[4:8], piece.policy)


def test_displacement_of_correct_responses():
    before = torch.tensor([[-1.0, -2.0], [-1.0, torch.nan], [-3.0, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    batch = TokenBatch(before, mask, torch.zeros(3), groups=torch.tensor([4, 4, 9]), correct=torch.tensor([1, 0, 1]))
    after = torch.tensor([[-0.5, -2.0], [-9.0, torch.inf], [-3.0, -3.5]], dtype=torch.float64)
    found = displacement(batch, before, after)
    assert found == {"lld/change": 0.0, "lld/fallen_share": 0.5, "questions": [0.5, -0.5]}
    for correct in (torch.zeros(12), None):  # none, or not known: it is never guessed
        batch = random_batch(correct=correct)
        assert displacement(batch, batch.old_logp, batch.old_logp) is None
