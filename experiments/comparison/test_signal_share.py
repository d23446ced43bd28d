"""Signal and noise of gradients: figures of made-up batches whose signal is known."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from poise import TokenBatch, regulators
from poise.batch import Phase
from support.batches import random_batch

pytestmark = pytest.mark.studies


@pytest.fixture(scope="module")
def study() -> Any:
    return importlib.import_module("signal_share")


def rows(signal: torch.Tensor, noise: float, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return signal + noise * torch.randn(count, len(signal), generator=generator)


def test_the_signal_is_found_below_the_noise(study: Any) -> None:
    signal = torch.zeros(1000)
    signal[0] = 1.0
    found = rows(signal, 0.5, 400, 0)
    assert study.within(found, found) == pytest.approx(1 + 1000 * 0.25, rel=0.02)
    error = study.error(found, found)
    assert study.between(found, found) == pytest.approx(1.0, abs=4 * error)
    assert error < 0.2


def test_efficiency_is_the_squared_cosine_with_the_signal(study: Any) -> None:
    signal = torch.zeros(100)
    signal[0] = 3.0
    plain = rows(signal, 1.0, 2000, 1)
    assert study.efficiency(plain, plain) == pytest.approx(9 / 109, rel=0.1)
    assert study.efficiency(7 * plain, plain) == pytest.approx(study.efficiency(plain, plain))  # size does not matter
    halved = plain.clone()
    halved[:, 1:] /= 2
    assert study.efficiency(halved, plain) == pytest.approx(9 / (9 + 100 / 4), rel=0.1)


def test_the_error_of_a_gain_is_its_spread_over_samples(study: Any) -> None:
    signal = torch.zeros(60)
    signal[0] = 3.0
    gains, errors = [], []
    for seed in range(60):
        plain = rows(signal, 1.0, 40, seed)
        halved = torch.cat([plain[:, :20], plain[:, 20:] / 2], 1)
        gains.append(study.efficiency(halved, plain) / study.efficiency(plain, plain))
        errors.append(study.gain_error(halved, plain))
    spread = float(torch.tensor(gains).std())
    assert spread < 2 * sum(errors) / len(errors) < 4 * spread
    assert study.gain_error(7 * plain, plain) == pytest.approx(0.0, abs=1e-6)  # size does not matter, nor does noise


def test_the_best_weights_leave_out_the_kind_that_is_noise(study: Any) -> None:
    signal = torch.zeros(50)
    signal[3] = 2.0
    deciding, wording = rows(signal, 0.3, 600, 2), rows(torch.zeros(50), 2.0, 600, 3)
    plain = deciding + wording
    found = study.best([deciding, wording], plain)
    expected = study.efficiency(deciding, plain) / study.efficiency(plain, plain)
    assert found["gain"] == pytest.approx(expected, rel=0.1)
    assert all(abs(weights[1]) < 0.1 and weights[0] == 1 for weights in found["weights"])


def test_every_way_of_telling_tokens_apart_covers_each_token_once(study: Any) -> None:
    batch = random_batch()
    assert batch.targets is not None
    size = int(batch.targets.max()) + 1
    words = study.word_kinds([["try", "true", "ok", "knight", "Ada"][i % 5] for i in range(size)])
    for kinds in study.token_kinds(batch, words).values():
        assert torch.equal(sum(mask.int() for mask in kinds.values()), batch.mask.int())


def test_blame_is_the_wrong_side_of_the_trials(study: Any) -> None:
    import oracles

    batch = random_batch()
    (phase,) = oracles.sided(batch, right=False)
    assert torch.allclose(phase.policy, regulators.parse("blame")(batch)[0].policy)
    assert study.word_kinds is oracles.word_kinds


def test_the_share_of_the_gradient_on_deciding_words() -> None:
    import deciding_share

    prob = torch.tensor([[0.5, 0.9, 0.2], [0.25, 0.75, 0.5]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    batch = TokenBatch(prob.log(), mask, torch.tensor([2.0, -1.0], dtype=torch.float64))
    decides = torch.tensor([[True, False, False], [False, True, False]])
    size = 2 * (0.5 + 0.1 + 0.8) + (0.75 + 0.25)
    assert deciding_share.share(batch, [Phase.of(batch, 1.0)], decides) == pytest.approx((2 * 0.5 + 0.25) / size)
    phases = regulators.parse("lopti")(batch)
    assert deciding_share.share(batch, phases, decides) == pytest.approx((2 * 0.5 + 0.25) / size)
    half = Phase.of(batch, torch.where(decides, 0.5, 1.0))
    assert deciding_share.share(batch, [half], decides) == pytest.approx(0.625 / (size - 0.625))


def test_the_rate_that_a_score_is_worth() -> None:
    import effective_rate

    rates, scores = [1e-5, 2e-5, 4e-5], [0.1, 0.3, 0.4]
    found = [effective_rate.rate_at(rates, scores, score) for score in (0.0, 0.1, 0.2, 0.3, 0.35, 0.4, 0.5)]
    half = 2**0.5
    assert found == pytest.approx([1e-5 / half, 1e-5, 1e-5 * half, 2e-5, 2e-5 * half, 4e-5, 8e-5])
    falls = [effective_rate.rate_at(rates, [-score for score in scores], -score) for score in (0.0, 0.2, 0.5)]
    assert falls == pytest.approx([found[0], found[2], found[6]])  # entropy, say
    assert effective_rate.rate_at(rates, [0.3, 0.3, 0.4], 0.35) == pytest.approx(2e-5 * half)  # a flat piece
    assert effective_rate.rate_at(rates, [0.2, 0.3, 0.3], 0.25) == pytest.approx(1e-5 * half)
    assert math.isnan(effective_rate.rate_at(rates, [0.3] * 3, 0.3))


def test_two_phases_that_share_no_noise_are_worth_the_root_of_two() -> None:
    import effective_rate

    generator = torch.Generator().manual_seed(0)
    low, high = (size * torch.randn(400, 500, generator=generator) + 0.2 for size in (3.0, 1.0))
    whole = low + high

    def factor(*phases: torch.Tensor) -> float:
        return float(effective_rate.factor_of(phases, whole)["factor"])

    assert factor(whole) == pytest.approx(1.0)
    assert factor(0.1 * whole) == pytest.approx(1.0)  # Adam divides it away
    assert factor(whole, whole) == pytest.approx(2.0)
    assert factor(low, high) == pytest.approx(2**0.5, rel=0.02)
    assert factor(0.5 * whole, 0.5 * whole) == pytest.approx(2.0)  # halves that are alike


def test_rates_that_arms_are_worth_from_their_curves() -> None:
    import effective_rate

    plain = {1e-4: 0.2, 2e-4: 0.4}
    curves = {("grpo", rate): {seed: [end, end, 0.9, 0.9] for seed in range(4)} for rate, end in plain.items()}
    curves["twice", 1e-4] = {seed: [0.4, 0.4] for seed in range(3)}  # the seeds and batches that all have
    curves["faster", 1e-4] = {seed: [value, 0.0] for seed, value in enumerate((0.4, 0.6, 0.8))}
    found = effective_rate.from_runs(curves, "grpo")
    assert (found["seeds"], found["batches"], found["rates"]) == ([0, 1, 2], 1, [1e-4, 2e-4])
    rows = {(row["arm"], row["rate"]): row for row in found["rows"]}
    assert [rows["grpo", rate]["factor"] for rate in plain] == pytest.approx([1.0, 1.0])
    assert rows["twice", 1e-4]["factor"] == pytest.approx(2.0)
    assert (rows["twice", 1e-4]["error"], rows["twice", 1e-4]["beyond"]) == (pytest.approx(0.0, abs=1e-6), False)
    faster = rows["faster", 1e-4]
    assert faster["by_seed"] == pytest.approx([2.0, 4.0, 8.0])
    assert (faster["factor"], faster["beyond"], faster["scores"]) == (pytest.approx(4.0), True, [0.4, 0.6, 0.8])
    without = [2**2.5, 4.0, 2**1.5]  # each seed left out in turn
    spread = sum((value - sum(without) / 3) ** 2 for value in without)
    assert faster["error"] == pytest.approx((spread * 2 / 3) ** 0.5, rel=1e-5)
    assert effective_rate.from_runs(curves, "grpo", share=1.0)["batches"] == 2
