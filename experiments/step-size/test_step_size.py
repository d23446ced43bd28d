"""The study of the step size: its tables follow from raw.json, and a control of the drift does what its page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import step_size
import step_size_tables
import torch

import poise
from poise.training.update import UpdatePlan

HERE = Path(__file__).parent

pytestmark = pytest.mark.studies


def test_the_page_has_the_tables_of_its_data(tmp_path: Path) -> None:
    page = (HERE / "README.md").read_text()
    assert step_size_tables.written(page) == page, "run python experiments/step-size/step_size_tables.py"
    step_size_tables.picture(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_speed_factor_is_recomputed() -> None:
    raw = json.loads((HERE / "raw.json").read_text()).values()

    def greedy(arm: str, lr: float) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Steps and accuracies by seed, made monotone by the min-max formula of isotonic regression."""
        found = {}
        for run in raw:
            if (run["regime"], run["arm"], run["lr"]) == ("sums", arm, lr) and run["seed"] < 100:
                steps, y = map(np.array, zip(*sorted((int(k), v) for k, v in run["greedy"].items()), strict=True))
                n = range(len(y))
                found[run["seed"]] = (
                    steps,
                    np.array([max(min(y[i : j + 1].mean() for j in n[k:]) for i in n[: k + 1]) for k in n]),
                )
        return found

    base, factors = greedy("grpo", 2.5e-5), []
    for seed, (steps, y) in greedy("rate", 6.25e-6).items():
        if seed in base:
            fine = np.arange(0, 64.005, 0.01)
            level = np.interp(fine, *base[seed])
            at = float(y[steps == 32][0])
            on = fine[np.abs(level - at) < 1e-9]  # on a plateau the step nearest to the cut counts
            first = fine[level >= at - 1e-12][:1] if not len(on) else on[np.abs(on - 32).argmin()][None]
            factors.append(float(max(first[0], 8) / 32) if len(first) else 2.0)
    page = (HERE / "README.md").read_text()
    (row,) = re.findall(r"(?m)^\| rate \| 6.25e-06 \|.*$", page)
    shown = float(re.findall(r"\d+\.\d+", row.split("|")[4])[0])
    assert shown == pytest.approx(np.exp(np.log(factors).mean()), abs=0.02)


@pytest.mark.parametrize("kind", ["rescale", "rate", "passes"])
def test_a_control_reaches_its_target(kind: str) -> None:
    torch.manual_seed(0)
    policy = poise.load_policy("embedded", dtype="float32")
    task = poise.tasks.get("kk", people=2)
    sampler = poise.Sampler(policy, poise.engines.choose(policy), task, max_tokens=24)
    problems = poise.tasks.draw(task, "train", seed=0, count=2)
    trajectories, _ = poise.Grpo(4).collect(problems, sampler, seed=0)
    batch = poise.make_batch(trajectories, policy)
    advantages = torch.tensor([1.0, -1.0] * 4)
    batch = poise.batch.TokenBatch(**{**vars(batch), "advantages": advantages})
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    control = step_size.Update(kind, target=1e-4, per_response=True)
    phases = poise.regulators.parse("grpo")(batch)
    found = control(policy, optimizer, batch, phases, UpdatePlan())
    drift = step_size.drifts(policy, batch, UpdatePlan())[1]
    assert found["optim/drift_response"] == pytest.approx(drift)
    if kind == "rescale":
        assert drift == pytest.approx(1e-4, rel=0.5)
        assert optimizer.param_groups[0]["lr"] == 1e-5
    elif kind == "rate":
        factor = float(np.clip((1e-4 / drift) ** 0.5, 0.5, 2))
        assert control.rate == pytest.approx(1e-5 * factor)
    else:
        assert drift >= 1e-4 or found["optim/passes"] == step_size.MOST
