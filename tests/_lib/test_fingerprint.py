"""What code is made of: the same in every process, and another once a file, a function or a value has changed."""

import ast
import functools
import json
import linecache
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from poise import regulators
from poise._lib import user_code
from poise._lib.fingerprint import files, fingerprint, hashes
from poise.tasks.rewards import run as rewards

NOTEBOOK = """
import functools, json, torch
from poise._lib.fingerprint import fingerprint
POWER = 2

def helper(x):
    return x ** POWER

def reward(completions, **columns):
    return [helper(len(text)) for text in completions]

def scaled(factor):
    return lambda completions: [factor * each for each in reward(completions)]

class Judge:
    bonus = {1.5, "a", None}

    def __init__(self, limit):
        self.limit, self.me, self.seen = limit, self, {"a": [1, (2.0,)]}

    def __call__(self, completions):
        return [min(each, self.limit) for each in reward(completions)]

judge = Judge(3)
things = [reward, scaled(2), judge, judge.__call__, functools.partial(reward, a=1), functools.cache(helper)]
print(json.dumps([fingerprint(thing) for thing in things]))
"""


def printed(source, *, hash_seed="0"):
    """What a notebook's cell prints: code that is in no file."""
    run = [sys.executable, "-c", f"exec(compile({source!r}, '<cell>', 'exec'))"]
    env = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed}
    return subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_code_without_a_file_is_its_source_its_globals_and_its_values():
    before = printed(NOTEBOOK)
    assert printed(NOTEBOOK, hash_seed="7") == before
    for old, new, names in [
        ("POWER = 2", "POWER = 3", {"helper"}),
        ("helper(len", "-helper(len", {"reward"}),
        ("scaled(2)", "scaled(5)", {"scaled.<locals>.<lambda>"}),
        ("Judge(3)", "Judge(4)", {"Judge", "Judge.__call__"}),
        ('"a", None', '"b", None', {"Judge"}),
        ("min(each", "max(each", {"Judge.__call__"}),
        ("a=1", "a=2", {"partial"}),
    ]:
        assert old in NOTEBOOK
        then, now = (json.loads(text) for text in (before, printed(NOTEBOOK.replace(old, new))))
        changed = {name for a, b in zip(then, now, strict=True) for name in a | b if a.get(name) != b.get(name)}
        assert names <= changed <= {*names, "Judge"}, (old, changed)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A file with imports from beside it, in a package and out of it."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name, text in {
        "mine.py": "import json, torch, beside\nfrom pack import deep\nfrom pack.other import one as two\n",
        "beside.py": "x = 1\n",
        "json.py": "never imported\n",
        "pack/__init__.py": "from . import inner\n",
        "pack/inner.py": "from .other import one\nfrom .. import above\n",
        "pack/deep.py": "def broken(:\n",
        "pack/other.py": "from pack import inner\none = 1\n",
        "pack/unused.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("beside", "pack")]:
        del sys.modules[name]


def test_a_lambda_is_the_same_wherever_it_is_written(monkeypatch):
    """Its arguments count: rewards get the columns by name."""
    text = (
        "one = lambda answer: len(answer)\nother = list([lambda answer: len(answer)])[0]\nlast = lambda gold: len(gold)"
    )
    monkeypatch.setitem(linecache.cache, "<cell>", (len(text), None, text.splitlines(True), "<cell>"))
    left = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), left)
    one, other, last = (fingerprint(left[name]) for name in ("one", "other", "last"))
    assert one == other
    assert one != last


def test_a_file_is_made_of_what_it_imports_from_beside_it(package):
    found = hashes(files([package / "mine.py"]), package)
    assert list(found) == ["beside.py", "mine.py", "pack/__init__.py", "pack/deep.py", "pack/inner.py", "pack/other.py"]
    (package / "pack/inner.py").write_text("")
    now = hashes(files([package / "mine.py"]), package)
    assert [name for name in found if found[name] != now[name]] == ["pack/inner.py"]


def test_a_function_of_a_module_is_its_files(package):
    (package / "pack/inner.py").write_text("")
    (package / "pack/other.py").write_text("from pack import inner\ndef one(x=1): return x\n")
    from pack.other import one

    assert {"pack/__init__.py", "pack/inner.py", "pack/other.py", "one"} == fingerprint(one).keys()
    assert {"beside.py"} == fingerprint(__import__("beside")).keys()


def test_poise_and_installed_code_count_by_name_and_by_their_values():
    assert fingerprint(regulators.get("ar", alpha=0.3)) != fingerprint(regulators.get("ar", alpha=0.2))
    assert fingerprint(regulators.get("ar")).keys() == {type(regulators.get("ar")).__name__}
    assert fingerprint(pytest.approx) != fingerprint(pytest.raises)
    assert any(name.endswith(".py") for name in fingerprint(pytest.approx))  # its own file, not what that imports


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2)),
        (torch.ones(0), torch.ones(0, 1)),
        (functools.partial(print, 1), functools.partial(print, 2)),
        (__import__("re").compile("a"), __import__("re").compile("b")),
        ({"a": {1, 2}}, {"a": {1, 3}}),
        (Path("a"), Path("b")),
        (__import__("numpy").arange(3), __import__("numpy").arange(4)),
    ],
)
def test_values(one, other):
    assert fingerprint([one]) == fingerprint([one])
    assert fingerprint([one]) != fingerprint([other])


def test_what_cannot_be_read_is_its_type():
    assert fingerprint([threading.Lock()]) == fingerprint([threading.Lock()])
    assert fingerprint(iter(x for x in ())) != {}


SOFTER = """
from dataclasses import dataclass
import beside
import poise

@dataclass(frozen=True)
class Softer(poise.Regulator):
    def phases(self, batch):
        return [poise.Phase.of(batch, 0.25 * beside.x)]

    power = 0.25 * beside.x
"""


@pytest.mark.parametrize("path", ["softer.py:Softer", "softer.Softer"])
def test_edited_code_is_loaded_again_in_the_same_process(package, monkeypatch, path):
    """As of a notebook's cell ``%%writefile``: within a second, and with as many letters."""
    monkeypatch.chdir(package)
    monkeypatch.setattr(user_code, "FOLDERS", [str(package)])
    (package / "softer.py").write_text(SOFTER)
    known = user_code.load("regulator", path, regulators.Regulator)
    assert known.power == 0.25
    assert user_code.load("regulator", path, regulators.Regulator) is known
    (package / "softer.py").write_text(SOFTER.replace("0.25 *", "0.75 *"))
    assert user_code.load("regulator", path, regulators.Regulator).power == 0.75
    (package / "beside.py").write_text("x = 2\n")
    assert user_code.load("regulator", path, regulators.Regulator).power == 1.5
    before = user_code.code_of({"regulator": f"ar | {path}(a=1)"})
    assert before.keys() == {path}
    assert before[path].keys() == {"softer.py", "beside.py"}
    (package / "beside.py").write_text("x = 3\n")
    assert user_code.edited(before, user_code.code_of({"regulator": path})) == ["beside.py"]
    sys.modules.pop("softer", None)


def test_names_of_files_are_as_the_user_would_write_them(package, monkeypatch):
    monkeypatch.chdir(package.parent)
    name = f"{package.name}/mine.py"
    found = user_code.code_of(
        {"task": {"name": f"{name}:Mine", "reward": ["exact", "nowhere.py:x"]}, "regulator": "ar"}
    )
    assert {name, f"{package.name}/pack/other.py"} < found[f"{name}:Mine"].keys()
    assert found["nowhere.py:x"] == {}


def test_the_code_of_a_notebook_or_of_the_script_that_runs_is_known(monkeypatch):
    def code(power):
        cell = {"__name__": "__main__", "POWER": power}
        exec("def softer(batch):\n    return batch.mask ** POWER\n", cell)
        monkeypatch.setattr(sys.modules["__main__"], "softer", cell["softer"], raising=False)
        return user_code.code_of({"regulator": "__main__:softer"})

    assert code(2) == code(2)
    assert user_code.edited(code(2), code(3)) == ["softer"]
    assert user_code.code_of({"algorithm": "__main__:nowhere"}) == {}


def test_values_that_are_deep_or_share_their_parts_have_a_fingerprint():
    shared, deep = ["a"], None
    for _ in range(60):
        shared = [shared, shared]
    for _ in range(10_000):
        deep = [deep]
    assert fingerprint([shared]) == fingerprint([shared])
    assert fingerprint([deep]) == fingerprint([deep])


USES_BESIDE = "import poise, beside\n\n@poise.regulator\ndef mine(batch):\n    return beside.x\n"


def value(path):
    """What the helper says that the regulator of a file imported."""
    return user_code.load("regulator", path)(None)


def test_helpers_of_one_name_in_two_folders_are_refused_unless_they_are_the_same(package, monkeypatch):
    """Python keeps one module of a name: the second file would run with the first one's helper."""
    monkeypatch.chdir(package)
    for folder, x in (("a", 1), ("b", 2), ("c", 1)):
        (package / folder).mkdir()
        (package / folder / "mine.py").write_text(USES_BESIDE)
        (package / folder / "beside.py").write_text(f"x = {x}\n")
    (package / "beside.py").unlink()
    assert value("a/mine.py:mine") == value("c/mine.py:mine") == 1
    said = r"b.mine\.py imports .*b.beside\.py, but Python would import .*a.beside\.py instead.*: rename one of the two"
    with pytest.raises(ValueError, match=said):
        value("b/mine.py:mine")
    (package / "b/mine.py").write_text(USES_BESIDE.replace("beside", "lonely"))
    (package / "b/beside.py").rename(package / "b/lonely.py")
    assert value("b/mine.py:mine") == 2


def test_a_helper_in_the_current_folder_does_not_replace_the_one_beside_the_file(package, monkeypatch):
    monkeypatch.chdir(package)
    monkeypatch.setattr(user_code, "FOLDERS", [str(package)])
    (package / "v2").mkdir()
    (package / "v2/mine.py").write_text(USES_BESIDE)
    (package / "v2/beside.py").write_text("x = 2\n")
    with pytest.raises(ValueError, match="rename one of the two"):
        value("v2/mine.py:mine")
    assert "beside" not in sys.modules
    (package / "v2/beside.py").unlink()
    assert value("v2/mine.py:mine") == 1


def test_helpers_in_packages_are_compared_by_the_names_of_their_modules(package, monkeypatch):
    monkeypatch.chdir(package)
    (package / "a").mkdir()
    (package / "a/mine.py").write_text(USES_BESIDE)
    (package / "a/beside.py").write_text("x = 1\n")
    for folder, x in (("b", 2), ("c", 3)):
        (package / folder / "inner").mkdir(parents=True)
        (package / folder / "mine.py").write_text(USES_BESIDE.replace(", beside", "\nfrom inner import beside"))
        (package / folder / "inner/__init__.py").write_text("from .rest import beside\n")
        (package / folder / "inner/rest.py").write_text("from . import beside\n")
        (package / folder / "inner/beside.py").write_text(f"x = {x}\n")
    assert value("a/mine.py:mine") == 1
    assert value("b/mine.py:mine") == 2  # inner.beside is another module than beside
    with pytest.raises(ValueError, match=r"c/mine\.py imports .*c.inner.beside\.py, but .*b.inner.beside\.py"):
        value("c/mine.py:mine")


def test_a_helper_whose_file_has_moved_is_loaded_again(package, monkeypatch):
    monkeypatch.chdir(package)
    monkeypatch.setattr(user_code, "FOLDERS", [str(package)])
    (package / "beside.py").unlink()
    (package / "a").mkdir()
    (package / "a/mine.py").write_text(USES_BESIDE)
    (package / "a/beside.py").write_text("x = 1\n")
    (package / "a/__init__.py").touch()
    assert value("a/mine.py:mine") == value("a.mine.mine") == 1
    (package / "a").rename(package / "b")
    (package / "b/beside.py").write_text("x = 2\n")
    assert value("b/mine.py:mine") == value("b.mine.mine") == 2
    with pytest.raises(ValueError, match=r"there is no module 'a\.mine'"):
        value("a.mine.mine")
    monkeypatch.setitem(sys.modules, "beside", types.SimpleNamespace(__file__=str(package / "gone/beside.py")))
    with pytest.raises(ValueError, match=r"would import .*gone.beside\.py instead.*, or use a new process"):
        value("b/mine.py:mine")  # poise did not load that one


def test_a_module_named_with_dots_does_not_get_the_helper_of_a_file(package, monkeypatch):
    monkeypatch.chdir(package)
    monkeypatch.setattr(user_code, "FOLDERS", [str(package)])
    (package / "dotted.py").write_text(USES_BESIDE)
    (package / "v2").mkdir()
    (package / "v2/beside.py").write_text("x = 2\n")
    (package / "v2/mine.py").write_text("import sys\nsys.path.insert(0, __file__[:-8])\n" + USES_BESIDE)
    (package / "beside.py").rename(package / "later.py")
    assert value("v2/mine.py:mine") == 2
    (package / "later.py").rename(package / "beside.py")
    with pytest.raises(ValueError, match=r"dotted imports .*beside\.py, but Python would import .*v2.beside\.py"):
        value("dotted.mine")


def test_a_link_to_a_file_imports_and_is_made_of_what_is_beside_the_link(package, monkeypatch):
    monkeypatch.chdir(package)
    for folder, x in (("store", 1), ("linked", 2)):
        (package / folder).mkdir()
        (package / folder / "beside.py").write_text(f"x = {x}\n")
    (package / "beside.py").unlink()
    (package / "store/0a1b").write_text(USES_BESIDE)  # a store may keep files under other names
    (package / "linked/mine.py").symlink_to("../store/0a1b")
    assert value("linked/mine.py:mine") == 2
    before = user_code.code_of({"regulator": "linked/mine.py:mine"})
    assert before["linked/mine.py:mine"].keys() == {"linked/mine.py", "linked/beside.py"}
    reward = rewards.find("linked/mine.py:mine")
    assert {Path(name).name for name in reward.code[f"{reward.module}:mine"]} == {"mine.py", "beside.py"}
    (package / "linked/beside.py").write_text("x = 3\n")
    assert user_code.edited(before, user_code.code_of({"regulator": "linked/mine.py:mine"})) == ["linked/beside.py"]
    assert value("linked/mine.py:mine") == 3


def test_threads_that_read_code_parse_in_turn(tmp_path, monkeypatch):
    """In Python 3.11 ``ast.parse`` may raise SystemError if another thread parses before it returns."""
    parse, overlaps, busy = ast.parse, [], threading.Lock()

    def slow(*args, **settings):
        overlaps.append(not busy.acquire(blocking=False))
        time.sleep(0.01)
        tree = parse(*args, **settings)
        if not overlaps[-1]:
            busy.release()
        return tree

    monkeypatch.setattr(ast, "parse", slow)
    (source := tmp_path / "mine.py").write_text("import json\n")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: files([source]), range(8)))
    assert overlaps == [False] * 8
