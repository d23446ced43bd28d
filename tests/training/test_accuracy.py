"""avg@k, pass@k, maj@k and their intervals: by hand, by enumeration and by simulation."""

import json
from functools import cache
from itertools import combinations
from math import comb, sqrt
from random import Random
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from poise.training.accuracy import (
    ProblemResult,
    changes,
    exact_interval,
    majority,
    mean_interval,
    much,
    paired_interval,
    pass_at_k,
    summarise,
    without_repeats,
)

shares = st.lists(st.integers(0, 4).map(lambda c: c / 4), min_size=1, max_size=30)
levels = st.floats(0.01, 0.999)


def clopper_pearson(successes, n, level=0.95):
    return exact_interval(successes / n, n, level)


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 0, 2, 0.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs
        (4, 2, 2, 5 / 6),
        (4, 3, 2, 1.0),
        (10, 3, 5, 1 - 21 / 252),
        (2000, 1, 1000, 0.5),
    ],
)
def test_pass_at_k_by_hand(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, rel=1e-12)


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(st.integers(2, 200), st.data())
def test_pass_at_k_grows_with_k_and_with_c(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n - 1))
    assert 0 <= pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1) <= 1
    assert pass_at_k(n, c, k) <= pass_at_k(n, min(c + 1, n), k)
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)


def test_pass_at_k_has_no_bias():
    p, n, k = 0.2, 6, 3
    chance = {c: len(list(combinations(range(n), c))) * p**c * (1 - p) ** (n - c) for c in range(n + 1)}
    assert sum(chance[c] * pass_at_k(n, c, k) for c in chance) == pytest.approx(1 - (1 - p) ** k)
    assert sum(chance[c] * (1 - (1 - c / n) ** k) for c in chance) < 1 - (1 - p) ** k - 0.01  # the plug-in


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 1 - 0.025**0.1),
        (10, 10, 0.025**0.1, 1.0),
        (5, 10, 0.1871, 0.8129),
        (1, 29, 0.0009, 0.1776),
        (81, 263, 0.2527, 0.3676),
    ],
)
def test_clopper_pearson_by_hand(successes, n, low, high):
    # The last two are from Newcombe (1998), table I.
    assert clopper_pearson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 60), st.data(), levels)
def test_clopper_pearson_leaves_half_of_the_rest_on_either_side(n, data, level):
    c = data.draw(st.integers(0, n))
    low, high = clopper_pearson(c, n, level)
    tail = (1 - level) / 2
    assert sum(comb(n, i) * low**i * (1 - low) ** (n - i) for i in range(c, n + 1)) == pytest.approx(tail if c else 1)
    assert sum(comb(n, i) * high**i * (1 - high) ** (n - i) for i in range(c + 1)) == pytest.approx(
        tail if c < n else 1
    )


@given(st.integers(1, 500), st.data(), levels)
def test_clopper_pearson_contains_the_share_and_is_symmetric(n, data, level):
    c = data.draw(st.integers(0, n))
    low, high = clopper_pearson(c, n, level)
    assert 0 <= low <= c / n <= high <= 1
    assert low < high
    assert clopper_pearson(n - c, n, level) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@given(shares, levels)
def test_mean_interval_contains_the_mean_and_widens_with_the_level(values, level):
    low, high = mean_interval(values, level)
    assert 0 <= low <= fmean(values) <= high <= 1
    assert low < high
    wide = mean_interval(values, (1 + level) / 2)
    assert wide[0] <= low
    assert high <= wide[1]


@given(shares)
def test_mean_interval_is_no_wider_than_that_of_as_many_yes_or_no_problems(values):
    values = values * 4  # so that a whole number of yes-or-no problems has the same mean
    low, high = mean_interval(values)
    yes_or_no = clopper_pearson(round(sum(values)), len(values))
    assert yes_or_no[0] - 1e-12 <= low
    assert high <= yes_or_no[1] + 1e-12


@given(st.lists(st.booleans(), min_size=1))
def test_mean_interval_of_yes_or_no_is_exact(values):
    assert mean_interval(values) == pytest.approx(clopper_pearson(sum(values), len(values)))


def test_mean_interval_by_hand():
    # No spread: φ = 4 / (5 + 3), so that 5 problems are worth 10.
    assert mean_interval([0.5] * 5) == pytest.approx(clopper_pearson(5, 10))
    # Squares of 2 · ¼² = ⅛, half of ½ · ½: φ = (½ + 4) / (9 + 3), so that 9 problems are worth 24.
    assert mean_interval([0.25, *[0.5] * 7, 0.75]) == pytest.approx(clopper_pearson(12, 24))


def test_more_samples_of_the_same_problems_cannot_help_without_end():
    # Half the problems are always solved, half never: ten times the samples say nothing new.
    few = summarise([ProblemResult("1", (right,) * 4) for right in (True, False) * 20], 4)["overall"]["avg@4"]
    many = summarise([ProblemResult("1", (right,) * 40) for right in (True, False) * 20], 4)["overall"]["avg@4"]
    assert few == many
    assert few["high"] - few["low"] == pytest.approx(0.324, abs=1e-3)  # 20 of 40


def coverage(interval, a, b, problems, samples, trials=1500, seed=0):
    """How often an interval holds the true accuracy, the problems' own accuracies being Beta(a, b)."""
    rng = Random(seed)
    held, known = 0, cache(interval)
    for _ in range(trials):
        chances = [rng.betavariate(a, b) for _ in range(problems)]
        low, high = known(tuple(sorted(sum(rng.random() < p for _ in range(samples)) / samples for p in chances)))
        held += low <= a / (a + b) <= high
    return held / trials


def t_interval(values, quantile=2.045):  # 29 degrees of freedom
    half = quantile * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


@pytest.mark.parametrize(("a", "b"), [(1, 1), (0.2, 0.2), (5, 0.3), (0.1, 2), (50, 50)])
def test_the_interval_covers_as_often_as_it_says(a, b):
    assert 0.94 <= coverage(mean_interval, a, b, problems=30, samples=4, trials=800) <= 0.995


RARE = [(1, 19), (0.1, 1.9), (0.05, 0.95), (0.02, 0.98), (0.3, 2.7)]


@pytest.mark.parametrize(("problems", "samples"), [(5, 4), (10, 1), (10, 16), (20, 16), (30, 4)])
def test_few_problems_and_rare_success_are_covered_as_often(problems, samples):
    for a, b in RARE:
        assert coverage(mean_interval, a, b, problems, samples, trials=400) >= 0.93  # 0.95 less twice its error


def wilson(values):
    """Wilson's score interval at the effective number of problems, with one more of the greatest variance."""
    n, mean, z2 = len(values), fmean(values), 1.959964**2
    most = mean * (1 - mean)
    phi = min(1.0, (sum((v - mean) ** 2 for v in values) + most) / (n * most)) if most else 1.0
    n /= phi
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = sqrt(z2 * (most / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return centre - half, centre + half


def test_wilsons_interval_covers_too_seldom_where_success_is_rare():
    assert coverage(wilson, 0.05, 0.95, problems=20, samples=16) < 0.91
    assert coverage(wilson, 0.05, 0.95, problems=10, samples=1) < 0.93


def test_the_interval_is_little_wider_than_wilsons():
    rng = Random(0)
    for chance in (0.1, 0.3, 0.5):
        values = [sum(rng.random() < chance for _ in range(4)) / 4 for _ in range(200)]
        (low, high), (least, most) = mean_interval(values), wilson(values)
        assert high - low < 1.1 * (most - least)


def test_the_t_interval_is_as_good_in_the_middle_and_worse_at_the_ends():
    assert coverage(t_interval, 1, 1, problems=30, samples=4) >= 0.935
    assert coverage(t_interval, 0.1, 2, problems=30, samples=4) < 0.9


def test_samples_counted_as_problems_would_cover_too_seldom():
    # Why problems are the unit: 30 problems × 8 samples are not 240 independent ones.
    def naive(values):
        return clopper_pearson(round(sum(values) * 8), len(values) * 8)

    assert coverage(naive, 0.5, 0.5, problems=30, samples=8, trials=500) < 0.75


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        ("aba", "a"),
        ("abb", "b"),
        ("ab", "a"),  # a tie: the first seen
        ("bbaa", "b"),
        ([None, None, None, "a"], "a"),  # None never wins
        ([None, "b", "a", "a", None, None], "a"),
        ([None], None),
        ([], None),
        ([(1, 2), (1, 2), 3], (1, 2)),
    ],
)
def test_majority(answers, winner):
    assert majority(list(answers)) == winner


def result(difficulty, *said, right="r"):
    return ProblemResult(difficulty, tuple(answer == right for answer in said), said)


def test_summary_by_hand():
    results = [
        result("10", "r", "x", "x", "y"),  # avg ¼, pass 1, maj wrong
        result("2", "r", "r", "x", None),  # avg ½, pass 1, maj right
        result("2", None, None, None, "r"),  # avg ¼, pass 1, maj right: None has no vote
        result("2", None, None, None, None),
    ]
    made = summarise(results, 4)
    assert list(made["difficulty"]) == ["2", "10"]
    assert made["overall"]["problems"] == 4
    assert {key: made["overall"][key]["value"] for key in ("avg@4", "pass@4", "maj@4")} == {
        "avg@4": 0.25,
        "pass@4": 0.75,
        "maj@4": 0.5,
    }
    assert made["difficulty"]["2"]["maj@4"]["value"] == pytest.approx(2 / 3)
    assert made["difficulty"]["10"]["pass@4"]["value"] == 1
    low, high = clopper_pearson(2, 4)
    assert made["overall"]["maj@4"] == {"value": 0.5, "low": pytest.approx(low), "high": pytest.approx(high)}
    assert json.loads(json.dumps(made)) == made


def test_the_rows_of_a_single_difficulty_are_not_shown():
    one = {"avg@4": 1, "greedy": 2, "avg@4, difficulty all": 1, "greedy, difficulty all": 2}
    assert without_repeats(one) == {"avg@4": 1, "greedy": 2}
    two = {"avg@4": 1, "avg@4, difficulty 2": 0, "avg@4, difficulty 3": 2}
    assert without_repeats(two) == two
    assert without_repeats({}) == {}


def test_a_single_sample_has_one_row():
    shown = {"avg@1": 1, "greedy": 1, "avg@1, difficulty 2": 1, "avg@1, difficulty 3": 1}
    assert without_repeats(shown | {"pass@1": 1, "maj@1": 1, "pass@1, difficulty 2": 1}) == shown
    assert "pass@16" in without_repeats({"pass@16": 1})


def test_fewer_than_all_samples():
    made = summarise([result("1", "x", "x", "r", "r", "r")], 2)["overall"]
    assert made["avg@2"]["value"] == 0.6  # all samples
    assert made["pass@2"]["value"] == pytest.approx(1 - 1 / 10)  # without bias from all samples
    assert made["maj@2"]["value"] == 0  # the first two


def test_at_k_1_all_three_agree():
    made = summarise([result("1", "r"), result("1", "x"), result("1", None)], 1)["overall"]
    assert made["avg@1"] == made["pass@1"] == made["maj@1"]


def test_without_answers_there_is_no_majority():
    made = summarise([ProblemResult("easy", (True, False)), ProblemResult("hard", (False, False))], 2)
    assert set(made["overall"]) == {"problems", "avg@2", "pass@2"}
    assert list(made["difficulty"]) == ["easy", "hard"]
    unsaid = ProblemResult("easy", (True, False), (None, "x"))  # a task that names no answer for what is right
    assert set(summarise([unsaid, result("easy", "r", "x")], 2)["overall"]) == {"problems", "avg@2", "pass@2"}


@given(st.lists(st.lists(st.sampled_from(["r", "x", None]), min_size=3, max_size=3), min_size=1, max_size=20))
def test_majority_and_average_never_beat_pass(said):
    made = summarise([result("1", *answers) for answers in said], 3)["overall"]
    for name in ("avg@3", "maj@3"):
        assert made[name]["value"] <= made["pass@3"]["value"] + 1e-12
    for name in ("avg@3", "pass@3", "maj@3"):
        assert 0 <= made[name]["low"] <= made[name]["value"] <= made[name]["high"] <= 1


@pytest.mark.parametrize(
    ("up", "down"), [(5, 0), (6, 0), (7, 1), (8, 1), (9, 2), (10, 2), (13, 4), (14, 4), (15, 6), (17, 6)]
)
def test_the_interval_of_changes_excludes_0_where_the_exact_sign_test_does(up, down):
    low, high = paired_interval([1.0] * up + [-1.0] * down + [0.0] * 400)
    assert low < (up - down) / (up + down + 400) < high
    assert (low > 0) == (binomtest(up, up + down).pvalue <= 0.05)


@pytest.mark.parametrize(("problems", "share"), [(16, 0.1), (30, 0.05), (100, 0.02)])
def test_rare_changes_that_no_problem_shows_are_not_excluded(problems, share):
    seen = [paired_interval([1.0] * up + [0.0] * (problems - up)) for up in range(problems + 1)]
    chances = binom.pmf(range(problems + 1), problems, share)
    assert sum(chance for (low, high), chance in zip(seen, chances, strict=True) if low <= share <= high) > 0.93


def paired_runs(gain, problems, samples, trials=400):
    """Accuracies of problems before and after; their true accuracies rise by ``gain`` on average, not all alike."""
    generator = np.random.default_rng(0)
    for _ in range(trials):
        p = generator.beta(0.5, 0.5, problems)
        q = np.clip(p + gain + generator.normal(0, 0.05, problems), 0, 1)
        yield generator.binomial(samples, p) / samples, generator.binomial(samples, q) / samples


@pytest.mark.parametrize(("problems", "samples"), [(40, 1), (200, 4)])
def test_changes_by_chance_are_as_rare_as_they_should_be(problems, samples):
    found = [paired_interval(list(new - old)) for old, new in paired_runs(0.0, problems, samples)]
    assert np.mean([low > 0 or high < 0 for low, high in found]) <= 0.05 + 2 * 0.011


def test_a_paired_change_is_found_where_intervals_overlap():
    found = []
    for old, new in paired_runs(0.07, 300, 4):
        (_, most), (least, _) = mean_interval(list(old)), mean_interval(list(new))
        found.append((least > most, paired_interval(list(new - old))[0] > 0))
    apart, paired = np.mean(found, axis=0)
    assert apart < 0.2
    assert paired > 0.8


def test_changes_problem_by_problem():
    before = {"samples": 2, "problems": "a", "correct": [0, 1, 2, 0], "greedy": [0, 1, 1, 0]}
    after = before | {"correct": [2, 1, 2, 1]}
    found = changes(before, after)
    assert {name: row["value"] for name, row in found.items()} == {"avg@2": 0.375, "greedy": 0.0, "pass@2": 0.5}
    assert changes(before, after | {"problems": "b"}) == {}


def test_how_much_of_a_change_is_learning_to_stop():
    # of 600 answers 470 were cut off before and 22 after; of the others 40 % and 50 % are right
    words = much(0.4 * 130 / 600, 0.5 * 578 / 600, 470 / 600, 22 / 600)
    assert words.startswith("+33.6 of +39.5 points comes from fewer answers that are cut off or unreadable (78.3 → 3.7")
    assert much(0.0, 0.5, 1.0, 0.0).startswith("+50.0 of +50.0 points")
    assert "more answers" in much(0.5, 0.3, 0.0, 0.4)
    assert much(0.3, 0.5, 0.1, 0.1) == much(0.3, 0.5, 0.1, 0.3) == much(0.3, 0.3, 0.5, 0.0) == ""
