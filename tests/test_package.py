"""What `pip install .` puts into place, outside the source tree and without a link to it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command, folder, **env):
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with poise in it, installed from a copy of the sources with the setuptools that is here."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index"]
    run("-m", "pip", "install", *options, "--target", str(folder / "here"), str(source), folder=folder)
    return folder / "here"


def files(folder):
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }


def test_everything_is_shipped(installed):
    assert files(installed / "poise") == files(ROOT / "src/poise")


COMMANDS = """
import shlex, sys
import poise
from poise.cli.app import app
for command in sys.argv[1:]:
    app(shlex.split(command), standalone_mode=False)
print(poise.__file__)
"""


@pytest.mark.slow
def test_recipes_model_and_report_are_found_there(installed, tmp_path):
    """In one process: each would import torch and transformers anew."""
    env = {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    small = "steps=1 prompts=1 group=2 task.people=2 rollout.max_tokens=16 evaluation.problems=1"
    commands = ["train demo --dry-run", f"train demo {small} run=one", "report one", "tasks"]
    shown = run("-c", COMMANDS, *commands, folder=tmp_path, **env)
    assert shown.splitlines()[-1] == str(installed / "poise" / "__init__.py")
    assert "model: embedded" in shown
    assert "\nkk " in shown
    assert (tmp_path / "one/report.html").read_text().startswith("<!doctype html>")
