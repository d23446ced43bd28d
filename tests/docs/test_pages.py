"""What the documents show must run, and what they name must exist."""

import ast
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from poise import TokenBatch, advantages, objective, regulators, surrogates
from poise.tasks import SingleTurn, draw, judge
from poise.training.config.schema import keys
from support.pages import ROOT, files, snippets


def run_snippets(page):
    """All of a page's, in order, each on top of those before it; the names that are left."""
    found = snippets(page)
    assert found
    namespace = {"__name__": "snippets"}
    for code in found:
        exec(compile(code, str(page), "exec"), namespace)
    return namespace


def test_the_readme_regulates():
    left = run_snippets(ROOT / "README.md")
    kept = torch.tensor([[True, True, True], [True, True, False]])
    ar = 0.2 * left["old_logp"].exp() + 0.8
    torch.testing.assert_close(left["advantages"], torch.where(kept, ar, 0.0) * torch.tensor([[1.0], [-1.0]]))


def test_the_regulator_of_contributing_learns():
    mine = run_snippets(ROOT / "CONTRIBUTING.md")["SquareRoot"]()
    batch = TokenBatch(torch.tensor([[-1.0, -4.0]]), torch.ones(1, 2), torch.ones(1))
    torch.testing.assert_close(mine(batch)[0].policy, torch.tensor([[-0.5, -2.0]]).exp())
    sys.path.insert(0, str(ROOT / "examples/own-loop"))
    from minimal_loop import train

    history = train(mine, steps=40)
    assert history[0] < 0.3
    assert min(history[-3:]) > 0.6


def test_the_task_of_the_tasks_page():
    task = run_snippets(ROOT / "docs/tasks.md")["Mine"](largest=30)
    train, test = (draw(task, split, 0, 200) for split in ("train", "test"))
    assert draw(task, "train", 0, 200) == train
    assert not {problem.id for problem in train} & {problem.id for problem in test}
    replies = {"It is {}": 1.0, "It is 1{}": 0.0, "": 0.0}
    for reply, reward in replies.items():
        said = reply.format(train[0].data["answer"])
        assert judge(task, train[0], SingleTurn(task, train[0], said)).reward == reward


def test_the_diagnosis_of_the_report_page():
    left = run_snippets(ROOT / "docs/report.md")
    shares = left["found"]["regulators"]["grpo"]["share"]
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert left["tokens"]["change"].abs().max() > 0  # a step was taken
    torch.testing.assert_close(left["forward"]().detach(), left["batch"].old_logp)  # and undone


def test_the_comparison_of_the_page_on_statistics(capsys):
    left = run_snippets(ROOT / "experiments/instrument/statistics.md")
    assert left["found"]["arms"][1]["difference"]["p_adjusted"] == 2 / 2**8
    assert "against grpo: better" in capsys.readouterr().out


def test_the_detectable_differences_of_the_page_on_statistics():
    from poise.referee.compare.statistics import detectable

    rows = re.findall(r"(?m)^\| (\d+) \| ([\d.]+|none) \| ([\d.]+|none) \| ([\d.]+|none) \| ([\d.]+|none) \|$",
                      (ROOT / "experiments/instrument/statistics.md").read_text())  # fmt: skip
    assert len(rows) == 5
    for seeds, *written in rows:
        found = [detectable(int(seeds), 1.0, comparisons) for comparisons in (1, 3, 5, 10)]
        assert [float("inf" if text == "none" else text) for text in written] == pytest.approx(found, abs=0.006)


@pytest.mark.parametrize(
    ("page", "methods"),
    [
        ("README.md", [*regulators.TABLE]),
        ("docs/papers.md", [*regulators.TABLE, *surrogates.TABLE]),
        ("docs/surrogates.md", [*surrogates.TABLE]),
    ],
)
def test_every_method_is_in_the_tables(page, methods):
    rows = re.findall(r"(?m)^\| (`[\w-]+`(?:, `[\w-]+`)*) \|", (ROOT / page).read_text())
    assert re.findall(r"[\w-]+", " ".join(rows)) == methods  # a row may have two


def test_the_table_of_surrogates_has_their_defaults():
    rows = re.findall(r"(?m)^\| `([\w-]+)` \| .* \| (.*) \| .* \|$", (ROOT / "docs/surrogates.md").read_text())
    for name, settings in rows:
        written = re.findall(r"`(?:objective\.)?(\w+)` ([\d.e-]+|True)", settings)
        defaults = {field.name: field.default for field in fields(surrogates.TABLE[name])}
        assert {key: float(ast.literal_eval(value)) for key, value in written} == defaults, name
    assert [name for name, _ in rows] == [*surrogates.TABLE]


def test_the_surrogate_and_the_advantage_of_ones_own_of_the_surrogates_page():
    left = {"__name__": "snippets"}
    for code in snippets(ROOT / "docs/surrogates.md")[-2:]:
        exec(code, left)
    rewards, logp = torch.tensor([1.0, 0.0]), torch.tensor([[-1.0], [-2.0]])
    assert advantages.get(left["above"])(rewards, None, logp).tolist() == [0.5, -0.5]
    batch = TokenBatch(logp - 0.1, torch.ones(2, 1), rewards)
    settings = objective.Settings(surrogate=left["Powered"](power=2))
    loss, _ = objective.policy_loss(logp, batch, regulators.parse("grpo")(batch)[0], settings, normalizer=1.0)
    assert float(loss) == pytest.approx(-math.exp(0.2))


def test_links_lead_somewhere():
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("experiments/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\(([^)#]+)", (ROOT / "docs/index.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - {"index.md"}
    assert pages <= linked
    assert "../experiments/README.md" in linked


def test_the_examples_name_every_folder():
    linked = set(re.findall(r"\]\((\w[\w-]*)/README.md\)", (ROOT / "examples/README.md").read_text()))
    assert linked == {page.parent.name for page in ROOT.glob("examples/*/README.md")}
    assert all(len(page.read_text().splitlines()) <= 40 for page in ROOT.glob("examples/*/README.md"))


def test_the_laboratory_names_every_study():
    linked = set(re.findall(r"\]\((\w[\w-]*)/README.md\)", (ROOT / "experiments/README.md").read_text()))
    assert linked == {page.parent.name for page in ROOT.glob("experiments/*/README.md")}
    assert linked == {
        path.name for path in (ROOT / "experiments").iterdir() if path.is_dir() and path.name[0] not in "._"
    }


def names_of_the_package():
    """The dotted name of every module of poise, and of what each module and class defines or imports."""
    known = set()
    for path in (ROOT / "src/poise").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        known |= {module} | {f"{module}.{name}" for name in members(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                known |= {f"{module}.{node.name}.{name}" for name in members(node)}
    return known


def members(owner):
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign):
            yield from map(ast.unparse, node.targets)
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def code_spans(page):
    """What a page sets `like this`, outside its code blocks."""
    return [
        " ".join(span.split())
        for span in re.findall(r"`([^`]+)`", re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text()))
    ]


def test_files_that_pages_name_exist():
    kept = [
        f"/{path.relative_to(ROOT)}"
        for top in ("src", "tests", "benchmarks", "examples", "experiments", "scripts")
        for path in (ROOT / top).rglob("*")
    ]
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    named = {
        (page.name, span)
        for page in [*pages, *ROOT.glob("docs/**/*.md")]
        for span in code_spans(page)
        if re.fullmatch(r"[\w/-]+\.py|(src|tests|benchmarks|examples|experiments|scripts)/[\w./-]+", span)
        and span not in files(page)
    }
    assert ("ARCHITECTURE.md", "models/packing.py") in named
    assert not [(page, path) for page, path in named if not any(file.endswith(f"/{path.rstrip('/')}") for file in kept)]


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_names_of_the_code_exist(page):
    dotted = [re.match(r"[A-Za-z_]\w*(\.\w+)+(?=[(: ]|$)", span) for span in code_spans(page)]
    a_file = r".*\.(py|md|txt|toml|yaml|json|safetensors|html|css|js)"
    names = {found[0] for found in dotted if found and not re.fullmatch(a_file, found[0])}
    known = [f".{name}" for name in names_of_the_package() | {*keys({})}]
    assert names
    assert not [name for name in names if not any(each.endswith(f".{name}") for each in known)]


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
    sys.path.insert(0, str(ROOT / "examples/own-loop"))
    from minimal_loop import train

    history = train(method, steps=40)
    assert history[0] < 0.3
    assert min(history[-3:]) > 0.6
    assert "reward" in capsys.readouterr().out


@pytest.mark.parametrize("same", ["lopti(threshold=0)", "lopti(threshold=2)", "ar(alpha=0)"])
def test_settings_that_are_grpo_train_exactly_as_grpo(same):
    """A phase without tokens takes no optimizer step: with Adam's momentum it would show at once."""
    sys.path.insert(0, str(ROOT / "examples/own-loop"))
    from minimal_loop import train

    assert train(same, steps=8) == train("grpo", steps=8)


def test_the_minimal_loop_is_minimal():
    assert len((ROOT / "examples/own-loop/minimal_loop.py").read_text().splitlines()) < 100


@pytest.mark.docs
def test_the_minimal_loop_runs_as_a_script(monkeypatch):
    """With the command that it shows itself, in a process of its own; and with a mistake."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    (shown,) = re.findall(r"(?m)^python (examples/.*)$", (ROOT / "examples/own-loop/minimal_loop.py").read_text())
    command = [sys.executable, *shlex.split(shown)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, cwd=ROOT)
    rewards = [float(number) for number in re.findall(r"reward (\S+)", done.stdout)]
    assert len(rewards) == 6
    assert rewards[-1] > 0.9  # chance: 0.13
    monkeypatch.setattr(sys, "argv", ["minimal_loop.py", "lopty"])
    with pytest.raises(ValueError, match="did you mean 'lopti'"):
        runpy.run_path(str(ROOT / "examples/own-loop/minimal_loop.py"), run_name="__main__")


def test_nothing_says_to_install_poise_from_the_package_index():
    """The package of that name there is another one: what works is a clone."""
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    told = [f"{place.name}: {line}" for place in places for line in place.read_text().splitlines()
            if re.search(r"pip install[^`]* '?poise\b|'poise\[", line)]  # fmt: skip
    assert not told, "\n".join(told)


def test_the_table_of_versions_is_that_of_the_project():
    rows = re.findall(r"(?m)^\| ([\w-]+) \| `([^`]+)` \| ([\d.]+) \|", (ROOT / "docs/install.md").read_text())
    assert len(rows) == 8
    pinned = (ROOT / "constraints.txt").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    for name, allowed, tested in rows:
        assert f'"{name}{allowed}"' in project, name
        assert f"\n{name}=={tested}\n" in pinned, name


def test_the_address_of_the_repository_is_in_one_place():
    """A placeholder until the release: whoever replaces it must not search."""
    folders = ("docs", "src", ".github")
    places = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".yml")
    ]
    places += [path for path in ROOT.iterdir() if path.is_file()]
    named = [path.name for path in places if "OWNER" + "/poise" in path.read_text(errors="replace")]
    assert named == ["pyproject.toml"]
