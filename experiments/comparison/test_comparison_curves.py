"""comparison_curves.py: what it reads of a comparison, and that it draws it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from support.comparisons import finish, make

pytestmark = pytest.mark.studies


def test_curves_of_all_runs_are_read_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("comparison_curves")
    plan = make(tmp_path)
    for number, arm in enumerate(plan.arms):
        for seed in plan.seeds:
            steps = 1 if (number, seed) == (1, 2) else None  # it diverged
            finish(plan.run(arm, arm.variants[0], seed), 0.5 + seed / 10 + number, steps=steps)
    moved = (tmp_path / "cmp").joinpath("arms", "ar", "seed-1").rename(tmp_path / "elsewhere")
    names = [{"name": arm.name} for arm in plan.arms]
    (tmp_path / "cmp" / "comparison.json").write_text(json.dumps({"settings": {"steps": 2}, "arms": names}))
    results, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["curves", str(results), str(picture), f"Small={tmp_path / 'cmp'},{moved}"])
    script.main()
    (system,) = json.loads(results.read_text())["systems"].values()
    assert system["settings"] == {"steps": 2}
    assert [[*runs] for runs in system["arms"].values()] == [["0", "1", "2"]] * 2
    start, end = system["arms"]["grpo"]["1"]["curve"]
    assert (start["step"], start["tokens"], start["accuracy"], start["metrics"]) == (0, 0, 0.2, {})
    assert (end["step"], end["tokens"], end["optimizer_steps"], end["accuracy"]) == (2, 100, 2, 0.6)
    assert end["metrics"] == {"tokens/sampled": 50, "time/step": 1}
    assert system["arms"]["ar"]["2"]["state"] == "diverged"
    drawn = picture.read_bytes()
    monkeypatch.setattr(sys, "argv", ["curves", str(results), str(picture)])  # the picture alone, from the file
    script.main()
    assert picture.read_bytes() == drawn
