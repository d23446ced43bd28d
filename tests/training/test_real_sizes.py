"""A miniature of benchmarks/real_sizes.py, which measures real models on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "real_sizes.py"


@pytest.mark.slow
def test_every_part_of_a_step_is_measured_beside_its_forecast(tmp_path):
    out, cases = tmp_path / "out.json", ["3B-nthr", "3B-24gb"]
    command = [sys.executable, SCRIPT, "--tiny", "--steps", "1", "--json", out, "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["cases"]
    assert list(found) == cases
    for case in found.values():
        assert "error" not in case, case["error"]
        (step,) = case["steps"]
        parts = [step[name]["seconds"] for name in ("sampling", "scoring", "update")]
        assert min(parts) > 0
        assert sum(parts) <= step["seconds"]
        assert step["tokens"] == 8 * 16  # no response ended early
        assert step["utilisation"] > 0
        assert case["forecast"]["update_bytes"] > case["forecast"]["held_bytes"] > 0
    assert found["3B-nthr"]["forecast"]["held_bytes"] > found["3B-24gb"]["forecast"]["held_bytes"]
