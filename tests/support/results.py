"""The pages of docs/results, and the figures that are beside them."""

from __future__ import annotations

import json
from typing import Any

from support.pages import ROOT

RESULTS = ROOT / "docs/results"


def words_of(name: str) -> str:
    """A page, with plain minus signs and in one line."""
    return " ".join((RESULTS / f"{name}.md").read_text().replace("−", "-").split())


def figures(name: str) -> dict[str, Any]:
    """The raw results of this name."""
    (path,) = RESULTS.glob(f"*/{name}.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def row(cells: list[str]) -> str:
    """A line of a table."""
    return " ".join(("| " + " | ".join(cells) + " |").split())
