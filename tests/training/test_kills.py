"""A small version of benchmarks/kills.py: the full one, a hundred runs, is in experiments/reliability."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.slow
def test_runs_that_were_killed_end_like_one_that_was_not(tmp_path):
    out = tmp_path / "kills.json"
    done = subprocess.run([sys.executable, SCRIPT, "--runs", "4", "--out", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["kills"] >= 5  # one of them while it resumes
    assert found["differences"] == []
    assert found["identical_ends"] == 4
    assert found["unreadable_checkpoints"] == 0
