"""The documents, and the Python code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def snippets(page):
    """The Python code blocks of a page, in order."""
    text = page.read_text()
    return [re.sub(r"(?m)^ {3}", "", code) if indent else code
            for indent, code in re.findall(r"(?ms)^( {3})?```python\n(.*?)^ *```", text)]  # fmt: skip


def files(page):
    """The code blocks of a page that begin with the name of a file: what a reader is told to save."""
    return dict(re.findall(r"(?ms)^```python\n# (\w+\.py)\n(.*?)^```", page.read_text()))


def method_table():
    """Method → engine → whether docs/scale.md says that they work together."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]]
             for line in (ROOT / "docs/scale.md").read_text().splitlines() if line.startswith("|")]  # fmt: skip
    head = next(line for line in lines if line[0] == "method")
    rows = lines[lines.index(head) + 2 :][:6]
    assert all(re.match("tested|yes|no ", cell) for row in rows for cell in row[1:])
    return {
        method: {engine: not cell.startswith("no") for engine, cell in zip(head[1:], row[1:], strict=True)}
        for row in rows
        for method in re.findall("`(.*?)`", row[0])
    }
