"""docs/results.md is what its script writes from the raw data, and short."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.studies


def test_the_page_of_results_is_up_to_date_and_short() -> None:
    script = importlib.import_module("results")
    page = script.page()
    assert script.OUT.read_text() == page, "run python experiments/comparison/results.py"
    assert len([word for word in page.split() if any(map(str.isalnum, word))]) <= 1200
    assert not re.findall(r"(?m)^(?![|!]).{122,}$", page)


def test_figures_of_the_page_follow_from_raw_data() -> None:
    """Shares of GRPO's gain, without the script's functions."""
    page = (Path(__file__).parents[2] / "docs/results.md").read_text()
    for file, name in (("h200/main-w1", "K&K, wording 1"), ("cpu/sums-w16", "sums, 16 words")):
        comparison = json.loads((Path(__file__).parent / f"{file}.json").read_text())
        arms = {arm["name"]: arm for arm in comparison["arms"]}
        gain = np.mean([*arms["grpo"]["results"].values()]) - arms["grpo"]["before"]
        (line,) = re.findall(rf"(?m)^\| {re.escape(name)} \|(.*)\|$", page)
        cells = [cell.strip() for cell in line.split("|")]
        assert float(cells[0]) == pytest.approx(100 * gain, abs=0.051)
        for cell, arm in zip(cells[1:], ("grpo(passes=2)", "lopti", "ar", "tr-grpo", "nthr"), strict=True):
            results = arms[arm]["results"]
            share = np.mean([results[seed] - arms["grpo"]["results"][seed] for seed in results]) / gain
            assert float(cell.split(" ")[0].replace("−", "-")) == pytest.approx(100 * share, abs=0.51), (name, arm)
