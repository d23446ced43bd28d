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
