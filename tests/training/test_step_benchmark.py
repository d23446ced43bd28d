"""A miniature of benchmarks/step.py, which measures a step of poise beside one of TRL."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step.py"


@pytest.mark.slow
def test_both_trainers_take_the_same_steps_and_each_is_timed(tmp_path):
    pytest.importorskip("trl")
    out, small = tmp_path / "out.json", ["--shape", "1M", "--prompts", "2", "--fixed-length", "8", "--trl-micro", "8"]
    command = [sys.executable, SCRIPT, *small, "--steps", "1", "--json", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(out.read_text())["fixed"]["each"]
    assert set(step) == {"poise", "trl"}
    for found in step.values():
        assert found["length"] == 8
        assert 0 < found["generation_s"] < found["step_s"]
