"""The quickstart notebook, run cell by cell in a kernel of its own, with smaller runs."""

import os
import re
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from support.pages import ROOT

NOTEBOOK = ROOT / "examples/quickstart.ipynb"
SMALLER = {'"steps": 8': '"steps": 2', '"prompts": 8': '"prompts": 2', '"problems": 32': '"problems": 2'}


def outputs(cell):
    return [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]


def printed(cell):
    return "".join(output["text"] for output in outputs(cell) if output.output_type == "stream")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
@pytest.mark.docs
def test_the_quickstart_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    shutil.copy(NOTEBOOK, tmp_path)
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, 4)
    for cell in notebook.cells:
        for written, smaller in SMALLER.items():
            cell.source = cell.source.replace(written, smaller)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert "writefile" not in NOTEBOOK.read_text()  # objects need no files
    trained = [cell for cell in notebook.cells if "poise.train(" in cell.source]
    assert len(trained) == 4
    for cell in trained[:2]:
        bar, curve = (output.data for output in outputs(cell) if output.output_type == "display_data")
        assert '<progress value="1.0000"' in bar["text/html"]
        assert "2/2  reward" in bar["text/plain"]
        assert curve["image/png"].startswith("iVBORw0KGgo")  # a PNG
        assert "step  " not in printed(cell)  # the bar shows the steps
    assert re.search(r"avg@2 +0\.\d+ \[", printed(trained[0]))
    assert '"regulator": "python:Softer"' in (tmp_path / "runs/softer/config.json").read_text()
    resumed = trained[2].outputs[-1].data
    assert "runs/softer" in resumed["text/plain"]
    assert "10 steps" in resumed["text/html"]
    assert "data:image/png;base64," in resumed["text/html"]
    assert "python:Softer: not the same object" in printed(trained[3])
    assert "weight 0." in printed(notebook.cells[-1])


def test_the_notebook_as_it_is_kept():
    """Its outputs are those of a run without an error, and small."""
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert "'.[train]' pandas ipykernel -c constraints.txt" in notebook.cells[0].source  # the extra has neither
    assert not [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert NOTEBOOK.stat().st_size < 200_000
    assert not re.search(r"/(home|root|tmp|work)/", NOTEBOOK.read_text())
