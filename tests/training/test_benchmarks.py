"""Miniatures of benchmarks/step.py (a step of poise beside one of TRL) and benchmarks/start.py (time to the first)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def found(script, out, *words):
    done = subprocess.run([sys.executable, BENCHMARKS / script, *words, "--json", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_both_trainers_take_the_same_steps_and_each_is_timed(tmp_path):
    pytest.importorskip("trl")
    small = ["--shape", "1M", "--prompts", "2", "--fixed-length", "8", "--trl-micro", "8", "--steps", "1"]
    (step,) = found("step.py", tmp_path / "out.json", *small)["fixed"]["each"]
    assert set(step) == {"poise", "trl"}
    for figures in step.values():
        assert figures["length"] == 8
        assert 0 < figures["generation_s"] < figures["step_s"]


def test_every_part_of_a_start_is_timed(tmp_path):
    small = ["prompts=2", "group=2", "rollout.max_tokens=4", "device=cpu"]
    (run,) = found("start.py", tmp_path / "out.json", "--repeats", "1", "--kept", *small)["runs"]
    parts = {"imports", "load_policy", "build_sampler", "preflight", "first step"}
    assert all(run["parts"][name][0] > 0 for name in parts)
    assert run["parts"]["imports"][0] > run["parts"]["settings"][0]
