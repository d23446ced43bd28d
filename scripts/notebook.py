"""Runs examples/quickstart.ipynb and keeps its outputs: python scripts/notebook.py

What Jupyter says on standard error is left out, and the curves are made smaller. Needs the extra dev.
"""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined([output for output in cell.outputs if output.get("name") != "stderr"])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, NOTEBOOK)


def _joined(outputs: list[Any]) -> list[Any]:
    """The outputs, with the pieces of what was printed in one, and smaller pictures."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
            kept[-1].text += output.text
            continue
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _smaller(output.data["image/png"])
        kept.append(output)
    return kept


def _smaller(png: str) -> str:
    """Every second pixel of a picture: the outputs are kept in the repository."""
    pixels = plt.imread(io.BytesIO(base64.b64decode(png)))
    rows, columns = pixels.shape[0] // 2 * 2, pixels.shape[1] // 2 * 2
    halves = pixels[:rows, :columns].reshape(rows // 2, 2, columns // 2, 2, -1).mean((1, 3))
    file = io.BytesIO()
    plt.imsave(file, halves)
    return base64.b64encode(file.getvalue()).decode("ascii")


if __name__ == "__main__":
    main()
