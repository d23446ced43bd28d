"""A miniature of benchmarks/mismatch.py, which measures how far sampler and policy are apart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mismatch.py"


@pytest.mark.slow
def test_every_sampled_token_is_in_one_range_of_depth_and_of_probability(tmp_path):
    out = tmp_path / "out.json"
    settings = ["prompts=2", "group=2", "rollout.max_tokens=40", "device=cpu", "dtype=float32"]
    done = subprocess.run([sys.executable, SCRIPT, "tiny", *settings, "--tokens", "200", "--json", out],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    depth, probability = found["by_depth"], found["by_probability"]
    assert sum(row["tokens"] for row in depth) == sum(row["tokens"] for row in probability) >= 200
    assert [row["from"] for row in depth] == [0, 16]
    for row in depth:
        assert 0 < row["mean"] <= row["p99.9"] < 1e-4
        assert row["outside"] == 0
