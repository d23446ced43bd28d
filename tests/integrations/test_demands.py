"""What regulators ask of a framework."""

import pytest

from poise import Phase, regulators
from poise.integrations.demands import part_beyond, probe


@pytest.mark.parametrize(
    ("method", "phases", "plain", "kl", "split"),
    [
        ("grpo", ("all",), True, "all", False),
        ("grpo(passes=2)", ("pass1", "pass2"), True, "all", False),
        ("ar", ("all",), False, "all", False),
        ("ar(alpha=0)", ("all",), True, "all", False),
        ("entropy", ("all",), False, "all", False),
        ("stare", ("all",), False, "all", False),
        ("blame", ("all",), False, "all", False),
        ("nthr", ("all",), False, "all", False),
        ("tr-grpo", ("all",), False, "weighted", False),
        ("tr-grpo(kl_weighted=False)", ("all",), False, "all", False),
        ("ar | lopti", ("low", "high"), False, "part", True),
        ("lopti(threshold=0)", ("low", "high"), False, "part", True),
        ("tr-grpo | lopti", ("low", "high"), False, "weighted", True),
    ],
)
def test_demands(method, phases, plain, kl, split):
    found = probe(regulators.parse(method))
    assert (found.phases, found.plain, found.kl, found.split) == (phases, plain, kl, split)


def test_a_mask_that_would_take_the_policy_term_away_is_no_mask():
    def no_kl(batch):
        return [Phase.of(batch, 1.0, 0.0)]

    assert probe(regulators.parse(no_kl)).kl == "weighted"


def test_an_error_says_where_it_came_up():
    def broken(_):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        probe(regulators.parse(broken))
    assert "example batch" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("method", "scope"),
    [
        ("ar", "token"), ("grpo | tr-grpo", "token"), ("lopti", "token"), ("nthr", "group"), ("ar | nthr", "group"),
        ("entropy", "batch"), ("nthr | random-split", "batch"),
    ],
)  # fmt: skip
def test_scopes(method, scope):
    found = regulators.parse(method)
    assert found.scope == scope
    assert part_beyond(found, scope) is None
    assert (part_beyond(found, "token") is None) == (scope == "token")


def test_a_function_looks_at_the_whole_batch_unless_it_says_otherwise():
    def mine(batch):
        return [Phase.of(batch, batch.prob.sqrt())]

    assert regulators.parse(mine).scope == "batch"
    mine.scope = "token"
    assert part_beyond(regulators.parse(mine), "token") is None
    with pytest.raises(TypeError, match="did you mean 'token'"):
        type("Mine", (regulators.Regulator,), {"scope": "tokens"})
