"""rltr.py: its plan, and its statistics of runs whose results are known."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from poise.referee.compare.plan import read_plan

pytestmark = pytest.mark.studies


@pytest.fixture
def rltr() -> Any:
    return importlib.import_module("rltr")


def test_the_plan_has_every_arm_with_every_seed(rltr: Any, tmp_path: Path) -> None:
    study = rltr.Study(tmp_path, tmp_path / "runs", time.monotonic(), rltr.SETTINGS, rltr.RECEIVER)
    plan = read_plan("tiny", study.overrides)
    algorithms = [arm.variants[0].config.build_algorithm() for arm in plan.arms]
    assert [algorithm.transfer for algorithm in algorithms] == [0.0, 0.5, 3.5, 3.5]
    assert [algorithm.receiver for algorithm in algorithms] == ["start"] * 3 + [str(tmp_path / "runs" / "receiver")]
    assert plan.size == study.jobs == 4 * 8
    config = plan.baseline.variants[0].config
    assert (config.evaluation.problems, config.evaluation.samples, config.evaluation.every) == (512, 16, 20)


def made(steps: int, final: float, seed: int) -> dict[str, Any]:
    """A run with an evaluation every 20 steps, on a straight line from 0.2, with the receiver's tokens on top."""
    scores = [0.2 + (final - 0.2) * step / 80 + seed / 1000 for step in range(0, steps + 1, 20)]
    curve = [
        [20 * i, 1000.0 * 20 * i, 1.0 * i, {"accuracy": y, "maj@16": y + 0.1, "greedy": 0.5}]
        for i, y in enumerate(scores)
    ]
    metrics: dict[str, list[float | None]] = {"tokens/receiver": [300] * steps, "transfer/uncut": [None] * steps}
    for name in ("transfer/mean", "transfer/after_right", "transfer/after_wrong", "transfer/cut/0.25"):
        metrics[name] = [final / 2] * steps
    return {"state": "finished", "steps": steps, "curve": curve, "metrics": metrics}


def test_arms_are_compared_at_the_last_step_that_all_have(
    rltr: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["rltr(transfer=0)", "rltr(transfer=1)"]
    finals = dict(zip(names, (0.5, 0.6), strict=True))
    runs = {name: {str(seed): made(80, finals[name], seed) for seed in range(6)} for name in names}
    for name in names:
        for seed in runs[name].values():
            seed["metrics"] = {key: seed["metrics"].get(key, [None] * 80) for key in rltr.METRICS}
    for seed in ("4", "5"):  # two runs were cut off
        runs[names[1]][seed]["curve"] = runs[names[1]][seed]["curve"][:4]
    found = {"samples": 16, "commands": ["poise compare …"], "runs": runs}
    (tmp_path / "rltr.json").write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["rltr.py", str(tmp_path), "--read"])
    with pytest.raises(SystemExit) as ended:
        rltr.main()
    assert ended.value.code == 0
    written = json.loads((tmp_path / "rltr.json").read_text())
    assert written["step"] == 60  # with six seeds, where step 80 has four
    against = written["scores"]["maj@16"]["arms"][1]["difference"]
    assert against["mean"] == pytest.approx(0.1 * 60 / 80)
    assert against["seeds"] == [0, 1, 2, 3, 4, 5]
    tokens = [arm["cost"]["tokens"] for arm in written["scores"]["avg@16"]["arms"]]
    assert tokens == [60_000 - 60 * 300, 60_000]  # the receiver of the baseline only looks on
    mean = written["transfer"][names[1]]["transfer/mean"]
    assert (mean["mean"], mean["difference"]["mean"]) == pytest.approx((0.3, 0.05))
    shown = capsys.readouterr().out
    assert "After 60 steps:" in shown
    assert "| `rltr(transfer=1)` | 6 | 0.502 [" in shown
    assert (tmp_path / "rltr.png").read_bytes().startswith(b"\x89PNG")


def test_a_study_that_measured_nothing_says_so(rltr: Any) -> None:
    with pytest.raises(SystemExit, match="no evaluation that all arms have"):
        rltr.analysed({"samples": 16, "runs": {"a": {"0": made(0, 0.5, 0)}, "b": {}}})
