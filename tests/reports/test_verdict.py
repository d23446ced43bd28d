"""What diagnose says of its figures."""

import pytest

from poise.reports.diagnose import verdict

NAMES = ("[0, 0.25]", "(0.25, 1]")


def method(share, moved):
    return {
        "share": share, "norm": [2.0, 1.0], "full": 2.0, "per_token": [3.0, 1.0], "split_cosine": [None],
        "influence": [{"moved": row} for row in moved], "displacement": None,
    }  # fmt: skip


def said(share=(0.6, 0.4), error=(0.1, 0.1), off=0.1, batches=8):
    mean = {"with_gradient": 5, "tokens": [5, 5], "token_share": [0.2, 0.8]}
    mean["regulators"] = {"grpo": method(list(share), [[1.0, 1.8], [0.5, 1.0], [1.0, 1.0]])}
    errors = {"regulators": {"grpo": method(list(error), [[off, off]] * 3)}}
    return " ".join(verdict(mean, errors, NAMES, batches))


def test_a_conclusion_follows_from_figures_that_are_surer_than_their_errors():
    assert "moves (0.25, 1] 1.8 times as far, (0.25, 1] alone moves [0, 0.25] 0.5 times as far: the unlikely" in said()
    assert "the unlikely tokens dominate" in said(error=(None, None), off=None, batches=1)  # no error


@pytest.mark.parametrize("settings", [{"share": (0.35, 0.65), "error": (0.35, 0.35)}, {"off": 0.5}])
def test_nothing_follows_where_an_error_is_as_large_as_its_value(settings):
    assert "dominate" not in said(**settings)
    assert "an error here is as large as its value, so nothing follows: measure more" in said(**settings)


def test_few_batches_know_little_of_their_own_error():
    assert "60 ± 23.6 % of the gradient of grpo (95 % interval over 8 batches)" in said()
    assert "60 ± 127 % of the gradient of grpo (95 % interval over 2 batches)" in said(batches=2)
    assert "so nothing follows" in said(batches=2)
