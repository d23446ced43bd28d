"""The file of a run's warnings."""

import json

import pytest

from poise.runs.folder import DamagedError, RunFolder
from poise.runs.subscribers import warnings
from poise.runs.subscribers.warnings import RunWarning


def test_warnings_are_kept_in_order(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    assert warnings.read(folder) == []
    first, second = RunWarning("b", 3, "What.", "Do."), RunWarning("a", 4, "More.", "Do more.")
    warnings.save(folder, [first, second])
    assert warnings.read(RunFolder.open(folder.path)) == [first, second]
    assert str(first) == "warning after step 3: What.\n  Do."
    assert str(RunWarning("c", 0, "What.", "Do.")) == "warning: What.\n  Do."


def test_a_run_that_never_began_leaves_none(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    warnings.save(folder, [RunWarning("a", 0, "What.", "Do.")])
    folder.discard()
    assert not folder.path.exists()


@pytest.mark.parametrize(
    "data", [3, "x", {}, [3], [{"name": "a"}], [{"name": "a", "step": "1", "what": "", "remedy": ""}]]
)
def test_a_damaged_file_is_named(tmp_path, data):
    folder = RunFolder.create(tmp_path / "run", {})
    (folder.path / "warnings.json").write_text(json.dumps(data))
    with pytest.raises(DamagedError, match=r"warnings\.json"):
        warnings.read(folder)
