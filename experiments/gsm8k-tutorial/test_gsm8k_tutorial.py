"""The pages on GSM8K have the tables and figures of the raw data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import gsm8k_tutorial as script
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
README = (HERE / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("docs/tutorials/gsm8k.md", "examples/gsm8k/README.md")}

pytestmark = pytest.mark.studies


def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text())


RUNS = [load(f"poise-{seed}") for seed in range(3)]


def test_the_pages_have_the_tables_of_the_data(tmp_path: Path) -> None:
    assert script.written(README) == README, "run python experiments/gsm8k-tutorial/gsm8k_tutorial.py"
    for name, page in PAGES.items():
        assert script.results() in page, name
    script.picture(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_no_local_path_is_in_the_data() -> None:
    assert not [file.name for file in HERE.glob("*.json") if re.search(r'"(/|~|\w:\\)', file.read_text())]


def test_accuracies_in_the_text() -> None:
    assert len({run["before"]["problems"] for run in RUNS} | {load("trl-eval")["problems"]}) == 1
    (start,) = {(run["before"]["accuracy"], run["before"]["greedy"]) for run in RUNS}
    assert start == (0.178, 0.310)
    for name, first, gains in (("accuracy", 0.178, (0.218, 0.242)), ("greedy", 0.310, (0.090, 0.132))):
        ends = [run["after"][name] for run in RUNS]
        assert (min(ends) - first, max(ends) - first) == pytest.approx(gains)
    before = RUNS[0]["before"]
    assert (before["cut_off"], before["greedy_cut_off"], before["unreadable"], before["n"]) == (23, 18, 3, 500)
    assert before["accuracy"] + 23 / 500 == pytest.approx(0.224)
    assert before["greedy"] + 18 / 500 == pytest.approx(0.346)
    assert [run["after"]["unreadable"] for run in RUNS] == [0, 0, 0]


def test_no_long_answer_of_the_untrained_model_was_right() -> None:
    found = load("untrained-1024")
    for name, long in (("t1", 20), ("t.7", 18)):
        row = found[name]
        assert row["over 512"] * 500 == pytest.approx(long)
        assert row["right within 512"] * (500 - long) == pytest.approx(500 * row["sampled"], abs=0.05)


def test_times_in_the_text() -> None:
    ours, theirs = RUNS[0], load("trl")
    times = [step["time/step"] for step in ours["steps"]]
    assert sum(times) == pytest.approx(119.0, abs=0.05)
    assert sum(step["time/rollout"] for step in ours["steps"]) == pytest.approx(58, abs=0.5)
    assert sum(step["time/update"] for step in ours["steps"]) == pytest.approx(43, abs=0.5)
    assert (times[0], median(times)) == (pytest.approx(10.1, abs=0.05), pytest.approx(1.79, abs=0.005))
    assert ours["process_s"] == pytest.approx(185, abs=0.5)
    assert theirs["process_s"] == pytest.approx(188, abs=0.5)
    assert sum(times[:47]) < theirs["train_s"] < sum(times[:48])
    for run, name, ends in ((ours, "reward/accuracy", (16, 21)), (theirs, "reward", (13, 21))):
        shares = [round(100 * step[name]) for step in run["steps"][:5]]
        assert (min(shares), max(shares)) == ends
