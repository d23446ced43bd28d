"""What a batch accepts, what it refuses and how it says so, and how it is cut."""

import pytest
import torch

from poise import Head, Phase, TokenBatch, regulators
from poise.batch import Extent, Prompt
from support.batches import fields_of, random_batch


def simple(**changes):
    base = {"old_logp": torch.full((2, 3), -1.0), "mask": torch.ones(2, 3), "advantages": torch.tensor([1.0, -1.0])}
    return TokenBatch(**(base | changes))


def test_positional_order_is_the_documented_one():
    batch = TokenBatch(torch.full((1, 2), -1.0), torch.ones(1, 2), torch.ones(1), torch.zeros(1, dtype=torch.long))
    assert batch.groups is not None
    assert batch.mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_logp": torch.zeros(3)}, r"old_logp must be \(B, T\)"),
        ({"old_logp": torch.zeros(0, 3)}, "not empty"),
        ({"mask": torch.ones(2, 4)}, r"mask must have shape \(2, 3\), got \(2, 4\)"),
        ({"mask": torch.full((2, 3), 0.5)}, r"mask\[0, 0\] = 0.5"),
        ({"advantages": torch.ones(3)}, r"advantages must have shape \(2,\) or \(2, 3\), got \(3,\)"),
        ({"advantages": torch.tensor([1.0, torch.nan])}, r"advantages\[1\] = nan"),
        ({"advantages": torch.ones(2, dtype=torch.long)}, "advantages must be floating point"),
        ({"old_logp": torch.tensor([[-1.0, -1, -1], [-1, -torch.inf, -1]])}, r"old_logp\[1, 1\] = -inf"),
        ({"entropy": torch.tensor([[0.1, torch.nan, 1], [1, 1, 1]])}, r"entropy\[0, 1\] = nan"),
        ({"rewards": torch.tensor([torch.inf, 1.0])}, r"rewards\[0\] = inf"),
        ({"groups": torch.zeros(2)}, "groups must hold integers"),
        ({"correct": torch.tensor([0.0, 2.0])}, r"correct\[1\] = 2.0"),
        ({"hidden": torch.zeros(2, 3)}, r"hidden must have shape \(2, 3, 'd'\)"),
        ({"hidden": torch.full((2, 3, 4), torch.nan)}, r"hidden\[0, 0\] = not finite"),
        ({"targets": torch.full((2, 3), 7), "head": torch.zeros(5, 4)}, r"targets\[0, 0\] = 7: not a token"),
        *(
            ({"hidden": torch.zeros(2, 3, 4), "head": head}, "head has width 5, hidden has 4")
            for head in (torch.zeros(7, 5), torch.nn.Linear(5, 7), Head(torch.zeros(7, 5)))
        ),
        ({"head": torch.zeros(5)}, r"weight must be \(V, d\)"),
    ],
)
def test_bad_fields_are_named_with_their_index(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        simple(**changes)


@pytest.mark.parametrize("value", [[[1.0]], 3, "text"])
def test_other_types_are_refused_by_name(value):
    with pytest.raises(TypeError, match="rewards must be a torch tensor"):
        simple(rewards=value)


def test_values_outside_the_mask_may_be_anything():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    logp = torch.tensor([[-1.0, -2.0, torch.nan], [torch.inf, torch.nan, -torch.inf]])
    batch = simple(old_logp=logp, mask=mask, advantages=torch.tensor([1.0, torch.nan]))
    assert torch.equal(batch.token_advantages, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert batch.prob[0, 2] == 0
    assert batch.prob[1].sum() == 0


def test_probabilities_given_as_log_probabilities_are_caught_where_they_matter():
    batch = simple(old_logp=torch.full((2, 3), 0.8))
    with pytest.raises(ValueError, match=r"old_logp\[0, 0\] = 0.8 is positive"):
        regulators.get("ar")(batch)


def test_gradients_are_cut():
    batch = simple(old_logp=torch.full((2, 3), -1.0, requires_grad=True))
    assert not batch.old_logp.requires_grad


@pytest.mark.parametrize(("given", "kept"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_weights_keep_the_dtype_of_old_logp_at_least_float32(given, kept):
    batch = random_batch(dtype=getattr(torch, given))
    for name in regulators.TABLE:
        for phase in regulators.get(name)(batch):
            assert phase.policy.dtype == phase.kl.dtype == getattr(torch, kept)


@pytest.mark.parametrize("ix", [slice(2, 5), torch.tensor([4, 0, 7]), [1, 1], torch.arange(12) % 3 == 0])
def test_rows_slices_every_field_and_phases_alike(ix):
    batch = random_batch()
    piece = batch.rows(ix)
    for name, value in fields_of(batch).items():
        expected = value if name == "head" or value is None else value[ix]
        assert value is None or torch.equal(getattr(piece, name).nan_to_num(9), expected.nan_to_num(9)), name
    phase = regulators.get("ar")(batch)[0]
    assert torch.equal(phase.rows(ix).policy, phase.policy[ix])


def test_a_slice_makes_no_copy_and_checks_nothing():
    batch = random_batch()
    piece = batch.rows(slice(2, 5))
    assert piece.old_logp.data_ptr() == batch.old_logp[2:5].data_ptr()
    batch.old_logp[2, 0] = torch.nan  # a check would now fail
    batch.rows(slice(2, 5))


def test_lazy_hidden_states_follow_the_rows():
    batch = random_batch()
    asked = []

    def lazy(rows):
        asked.append(rows.tolist())
        return batch.hidden[rows]

    piece = TokenBatch(**(fields_of(batch) | {"hidden": lazy})).rows([5, 3, 8]).rows(torch.tensor([2, 0]))
    assert torch.equal(piece.hidden_of(torch.tensor([1, 0])), batch.hidden[[5, 8]])
    assert asked == [[5, 8]]


def test_lazy_hidden_states_of_a_wrong_shape_are_refused():
    batch = random_batch(hidden=lambda rows: torch.zeros(len(rows), 2, 5))
    with pytest.raises(ValueError, match=r"hidden\(rows\) must return \(8, 9, d\)"):
        regulators.get("nthr", self_inclusive=True)(batch)


def test_head_walks_the_vocabulary_in_slices():
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(11, 4, generator=g), torch.randn(11, generator=g)
    head = Head(weight, bias, temperature=0.7, scale=0.5, softcap=3.0)
    hidden = torch.randn(6, 4, generator=g)
    whole = 3 * torch.tanh(0.5 * (hidden @ weight.T + bias) / 3) / 0.7
    torch.testing.assert_close(head(hidden), whole)
    torch.testing.assert_close(torch.cat([head.logits(hidden, slice(i, i + 4)) for i in (0, 4, 8)], 1), whole)


@pytest.mark.parametrize("value", [-0.1, torch.nan, torch.inf])
def test_a_phase_with_impossible_weights_is_refused(value):
    batch = simple()
    with pytest.raises(ValueError, match=r"phase 'all': policy\[0, 0\]"):
        regulators.Function(lambda b: [Phase.of(b, value)])(batch)


def test_a_phase_that_reaches_outside_the_mask_is_refused():
    batch = simple(mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"kl\[0, 2\] = 1.0"):
        Phase("all", ones * batch.mask, ones).check(batch)


def test_rows_take_along_what_the_host_knows_of_them():
    batch = random_batch(prompts=2, group=2)
    extents = [Extent(Prompt((i,)), n, n) for i, n in enumerate(batch.lengths.tolist())]
    whole = TokenBatch(**(fields_of(batch) | {"extents": extents}))
    for ix in ([3, 1], torch.tensor([3, 1]), torch.tensor([False, True, False, True]), slice(1, None), []):
        part = whole.rows(ix)
        assert torch.equal(part.old_logp[part.mask], batch.old_logp[ix][batch.mask[ix]])
        assert [extent.prompt.tokens[0] for extent in part.extents] == torch.arange(4)[ix].tolist()
        assert part.rows(slice(0, 1)).extents == part.extents[:1]
        assert batch.rows(ix).extents is None
    assert whole.rows(slice(None)).old_logp.data_ptr() == whole.old_logp.data_ptr()
    with pytest.raises(ValueError, match="extents must have 4 entries, got 3"):
        TokenBatch(**(fields_of(batch) | {"extents": extents[:3]}))
