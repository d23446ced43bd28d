"""The wheel as a user gets it: what is in it, and that it works in an empty folder, far from the clone."""

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

import poise

ROOT = Path(__file__).parents[2]
HERE = Path(poise.__file__).parent
SMALL = "steps=1 prompts=1 group=2 task.people=2 rollout.max_tokens=16 evaluation.problems=1"
API = """
import torch, poise
old_logp, mask = torch.tensor([[-0.1, -3.0]]), torch.ones(1, 2)
weights = poise.token_weights("ar(alpha=0.2)", old_logp=old_logp, advantages=torch.ones(1), mask=mask)
assert torch.allclose(weights, 0.2 * old_logp.exp() + 0.8), weights
rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(20)]
result = poise.train(
    data=rows, reward="number", steps=1, prompts=1, group=2, evaluation="off", run="two", quiet=True,
    rollout={"max_tokens": 8},
)
assert result.model.config.model_type == "llama"
import poise.integrations.trl, poise.integrations.token_export
print(poise.__file__)
"""


def files(folder):
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }


def run(folder, *command):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_is_shipped():
    assert files(HERE) == files(ROOT / "src/poise")
    (archive,) = Path(sys.prefix, "dist").glob("poise_rl-*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml", "setup.py", "src/poise/py.typed"} <= names


def test_what_the_index_shows():
    about = metadata.metadata("poise-rl")
    assert about["Version"] == poise.__version__
    links = re.findall(r"\]\(([^)]+)\)", about["Description"])
    assert [link for link in links if not link.startswith("https://")] == []
    assert any("/raw/main/" in link and link.endswith(".png") for link in links)
    assert not any("poise[" in requirement for requirement in metadata.requires("poise-rl"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("far")


def test_the_command_line(place):
    command = Path(sys.executable).parent / "poise"
    assert run(place, command, "--version").strip() == poise.__version__
    run(place, command, "train", "tiny", *SMALL.split(), "run=one", "--quiet")
    assert json.loads((place / "one/summary.json").read_text())["steps"] == 1
    run(place, command, "report", "one")
    assert (place / "one/report.html").read_text().startswith("<!doctype html>")


def test_the_python_api_and_the_adapters(place):
    assert run(place, sys.executable, "-c", API).split()[-1] == str(HERE / "__init__.py")
