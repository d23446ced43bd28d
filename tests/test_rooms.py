"""Which package may import which: nobody imports from a room above their own."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import poise

ROOT = Path(poise.__file__).parent
ROOMS = [  # from the ground up; what stands in one line may import each other
    ("_lib",),
    ("lm_head", "batch", "objective", "objective_settings", "surrogates", "advantages"),
    ("head", "regulators", "diagnostics"),
    ("tasks.rewards", "rewards"),
    ("tasks",),
    ("runs",),
    ("sampling.requests", "sampling.draws"),  # what an engine is asked for, and random numbers
    ("models",),
    ("sampling",),
    ("training.config",),
    ("training",),
    ("runs.subscribers",),  # the upper floor of runs: it follows the steps
    ("trainer",),
    ("referee",),
    ("api",),
    ("integrations",),
    ("cli",),
    ("__main__",),
]
FLOOR = {name: floor for floor, names in enumerate(ROOMS) for name in names}
LIBRARY = {name for names in ROOMS[:3] for name in names}  # `pip install poise` has torch alone


def room_of(name):
    """The room of a module, by its name within the package; None if it is in none."""
    parts = name.split(".")
    return next((room for room in (".".join(parts[:2]), parts[0]) if room in FLOOR), None)


def own_room(path):
    """The room of a file."""
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def imports(path):
    """(line, room, whole name) of every import of the package's own modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]  # which may be modules
        for name in names:
            package, _, inside = name.partition(".")
            if package == "poise" and (room := room_of(inside)):
                yield node.lineno, room, name


def test_every_module_is_in_a_room():
    assert [path for path in ROOT.rglob("*.py") if not own_room(path)] == [ROOT / "__init__.py"]
    assert {own_room(path) for path in ROOT.rglob("*.py")} - {None} == set(FLOOR)


def test_no_room_imports_one_above_it():
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in ROOT.rglob("*.py")
        if (own := own_room(path))
        for line, room, name in imports(path)
        if FLOOR[room] > FLOOR[own]
    ]
    assert not upward, "\n".join(upward)


def test_everything_that_touches_transformers_is_in_models_and_sampling():
    others = set()
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transformers" for name in names):
                others.add(room)
    assert others <= {"models", "sampling", "integrations"}
    assert not others & LIBRARY


TESTS = Path(__file__).parent


def test_the_script_for_newer_versions_runs_tests_that_exist():
    root = ROOT.parents[1]
    named = runpy.run_path(str(root / "scripts" / "newer_versions.py"))["FOLDERS"]
    assert not [folder for folder in named if not (root / "tests" / folder).is_dir()]


def test_a_step_can_be_followed():
    """A reader of one step of recipe tiny, console included, opens at most 42 files."""
    script = ROOT.parents[1] / "scripts" / "walk.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300)
    files, edges = map(int, re.search(r"enters (\d+) files, .*; (\d+) file-to-file edges", done.stdout).groups())
    assert 30 < files <= 42, done.stdout
    assert 60 < edges <= 90, done.stdout


def test_no_test_imports_another():
    """What several tests need is in tests/support, which imports nothing of the tests."""
    own = {path.name.removesuffix(".py") for path in TESTS.rglob("*") if path.suffix == ".py" or path.is_dir()}
    own = own - {path.stem for path in (TESTS / "support").iterdir()} - {"support"} | {"tests"}
    assert "test_rooms" in own
    found = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module] if node.level == 0 else ["tests"]
            found += [f"{path.relative_to(TESTS)}:{node.lineno}" for name in names if name.split(".")[0] in own]
    assert not found, "\n".join(found)


def imported_by(command, names):
    """A process that ran ``poise`` with these words; the last thing that it prints are those of the modules it has."""
    code = (
        "import sys\n"
        f"sys.argv = ['poise', *{command}]\n"
        "from poise.__main__ import main\n"
        "try: main()\n"
        f"finally: print([name for name in {names} if name in sys.modules])\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("command", "message"),
    [(["train", "tiny", "budget=ten"], "budget = 'ten'"), (["compare", "regulator=ar;grpo", "seeds=1"], "seeds = 1")],
)
def test_a_mistake_in_a_setting_is_answered_before_transformers_is_imported(command, message):
    """That import takes seconds, in which nothing is printed."""
    done = imported_by(command, ("transformers", "poise.trainer"))
    assert message in done.stderr + done.stdout
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stepz=3"], "unknown key 'stepz'; did you mean 'steps'?"),
        (["objective.clip_low=3"], "objective: clip_low must be between 0.0 and 1.0"),
        (["optim.lr=high", "group=0"], "optim.lr = 'high'"),
        (["task.people=0"], "task: "),
        (["nothing-is-set"], "one recipe at a time"),
    ],
)
def test_most_mistakes_in_settings_are_answered_before_torch_is_imported(overrides, message):
    done = imported_by(["train", "tiny", *overrides], ("torch", "numpy"))
    assert message in done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["tasks", "--help"]])
def test_help_and_version_import_nothing_heavy(arguments):
    done = imported_by(
        arguments, ("torch", "transformers", "matplotlib", "numpy", "scipy", "poise.tasks", "poise.training.config")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
