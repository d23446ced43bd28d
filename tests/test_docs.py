"""What the documents show must run, and what they name must exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from poise import regulators

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/dominance.md")]


def snippets(page):
    text = page.read_text()
    return [re.sub(r"(?m)^ {3}", "", code) if indent else code
            for indent, code in re.findall(r"(?ms)^( {3})?```python\n(.*?)^ *```", text)]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write a run folder
    found = snippets(page)
    assert found
    namespace = {"__name__": "snippets"}
    for code in found:  # in order, each on top of those before it
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/papers.md"], ids=lambda page: page.name)
def test_every_regulator_is_in_the_tables(page):
    named = set(re.findall(r"(?m)^\| `([\w-]+)` \|", page.read_text()))
    assert named == set(regulators.TABLE)


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text())) <= targets


def test_import_adds_nothing_heavy_to_torch():
    code = (
        "import torch, sys; before = set(sys.modules); import poise; "
        "print(*{m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["poise"]


@pytest.mark.parametrize("method", ["grpo", "ar(alpha=0.3) | lopti(threshold=0.5)", "nthr"])
def test_the_minimal_loop_learns(method, capsys):
    sys.path.insert(0, str(ROOT / "examples"))
    from minimal_loop import train

    history = train(method, steps=40)
    assert history[0] < 0.3
    assert min(history[-3:]) > 0.6
    assert "reward" in capsys.readouterr().out


@pytest.mark.parametrize("same", ["lopti(threshold=0)", "lopti(threshold=2)", "ar(alpha=0)"])
def test_settings_that_are_grpo_train_exactly_as_grpo(same):
    """A phase without tokens takes no optimizer step: with Adam's momentum it would show at once."""
    sys.path.insert(0, str(ROOT / "examples"))
    from minimal_loop import train

    assert train(same, steps=8) == train("grpo", steps=8)


def test_the_minimal_loop_is_minimal():
    assert len((ROOT / "examples/minimal_loop.py").read_text().splitlines()) < 100


def test_the_minimal_loop_runs_as_a_script():
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples/minimal_loop.py"), "lopty"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    assert "did you mean 'lopti'" in done.stderr
