"""A miniature of benchmarks/real_sizes.py, which measures real models on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "real_sizes.py"

pytestmark = pytest.mark.slow


def measured(folder, *words):
    out = folder / "out.json"
    command = [sys.executable, SCRIPT, "--tiny", "--steps", "1", "--json", out, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["measurements"]
    assert [case["code"] for case in found.values()] == [0] * len(found), done.stderr
    return found


def parts_of(case):
    (step,) = case["steps"]
    parts = [step[name]["seconds"] for name in ("sampling", "scoring", "update")]
    assert min(parts) > 0
    assert sum(parts) <= step["seconds"] * (1 + 1e-9)
    return step


def test_every_part_of_a_step_is_measured_beside_its_forecast(tmp_path):
    cases = ["3B-nthr", "3B-24gb"]
    found = measured(tmp_path, "--cases", *cases)
    assert list(found) == cases
    for case in found.values():
        step = parts_of(case)
        assert step["tokens"] == 8 * 16  # no response ended early
        assert step["utilisation"] > 0
        assert step["sampling_floor"] > 0
        assert case["forecast"]["update_bytes"] > case["forecast"]["held_bytes"] > 0
    assert found["3B-nthr"]["forecast"]["held_bytes"] > found["3B-24gb"]["forecast"]["held_bytes"]


def test_responses_end_and_trl_takes_the_same_steps(tmp_path):
    pytest.importorskip("trl")
    words = ["--cases", "grpo", "7B-lora-trl", "--ends", "4", "--trl-engine", "generate"]
    found = measured(tmp_path, *words)
    assert parts_of(found["grpo"])["tokens"] < 8 * 16
    theirs = parts_of(found["7B-lora-trl"])
    assert theirs["tokens"] == 8 * 16
    assert theirs["prompt_tokens"] > 8
