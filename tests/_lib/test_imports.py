"""Imports without garbage collection."""

import gc
import subprocess
import sys

import pytest

from poise._lib.imports import quick_imports


@pytest.fixture(autouse=True)
def nothing_stays_frozen():
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def new_module(tmp_path, monkeypatch):
    (tmp_path / "a_module_of_this_test.py").write_text("value = [[]]\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_module_of_this_test"
    sys.modules.pop("a_module_of_this_test", None)


def test_nothing_is_collected_inside_and_what_was_imported_never_is(new_module):
    before = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        __import__(new_module)
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_without_a_new_module_objects_stay_collectable():
    """Else every command in one process would keep what is garbage at that moment."""
    before = gc.get_freeze_count()
    with quick_imports():
        import json  # noqa: F401
    assert gc.get_freeze_count() == before


def test_a_failed_import_leaves_the_collector_as_it_was():
    with pytest.raises(ModuleNotFoundError), quick_imports():
        __import__("a_module_that_nobody_has")
    assert gc.isenabled()
    gc.disable()
    with quick_imports():
        pass
    assert not gc.isenabled()


def test_the_library_needs_no_module_that_windows_lacks():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['fcntl', 'resource']))\n"
        "import poise\n"
        "for name in ('regulators', 'objective', 'rewards', 'tasks', 'head'):\n"
        "    getattr(poise, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
