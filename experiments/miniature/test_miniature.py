"""The miniature's page: its tables are up to date, and ten of their figures follow from raw.json without analyse.py."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text()
REGULATORS = {
    "grpo": "grpo",
    "two passes": "grpo(passes=2)",
    "lopti": "lopti(threshold=0.4)",
    "random": "random-split(like='lopti(threshold=0.4)')",
    "ar": "ar(alpha=0.2)",
    "constant": "constant(like='ar(alpha=0.2)')",
    "both": "ar(alpha=0.3) | lopti(threshold=0.5)",
}

pytestmark = pytest.mark.studies


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("miniature_analyse", HERE / "analyse.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rising(values: list[float]) -> np.ndarray:
    """Isotonic regression by its min-max formula."""
    y = np.array(values)
    means = np.array([[y[i : j + 1].mean() if i <= j else np.nan for j in range(len(y))] for i in range(len(y))])
    return np.array([np.max([np.min(means[i, k:]) for i in range(k + 1)]) for k in range(len(y))])


def curves(arm: str, rate: float = 1.5e-6) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Steps and monotone greedy accuracies, by seed."""
    found = {}
    for run in json.loads((HERE / "raw.json").read_text()).values():
        if (run["regulator"], run["lr"]) == (REGULATORS[arm], rate):
            points = sorted((int(step), value) for step, value in run["greedy"].items())
            found[run["seed"]] = np.array([step for step, _ in points]), rising([value for _, value in points])
    return found


def speeds(arm: str, rate: float = 1.5e-6) -> np.ndarray:
    """The first batch, in hundredths, at which GRPO has the arm's accuracy after 64, over 64; 2 if never."""
    base, factors = curves("grpo"), []
    for seed, (steps, scores) in sorted(curves(arm, rate).items()):
        fine = np.arange(0, 128.005, 0.01)
        above = np.interp(fine, *base[seed]) >= scores[steps == 64][0] - 1e-12
        factors.append(fine[above.argmax()] / 64 if above.any() else 2.0)
    return np.array(factors)


def interval(logs: np.ndarray) -> tuple[float, float]:
    """Every mean that the sign-flip test does not reject at 5 %, on a fine grid."""
    signs = np.array(list(itertools.product([1, -1], repeat=len(logs))))
    grid = np.arange(logs.mean() - 0.3, logs.mean() + 0.3, 0.0005)
    rests = logs[None] - grid[:, None]
    p = (np.abs(rests @ signs.T) >= np.abs(rests.sum(1))[:, None] - 1e-12).mean(1)
    kept = grid[p > 0.05]
    return float(np.exp(kept[0])), float(np.exp(kept[-1]))


def row(name: str) -> list[str]:
    """The cells of a row of the first part, by its first cell."""
    (line,) = re.findall(rf"(?m)^\| {re.escape(name)} \|(.*)\|$", README.split("<!-- end -->")[0])
    return [cell.strip() for cell in line.split("|")]


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", cell)]


def test_the_page_has_the_tables_of_its_data(script: Any, tmp_path: Path) -> None:
    assert script.written(README) == README, "run python experiments/miniature/analyse.py"
    script.picture(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_ten_figures_are_recomputed() -> None:
    at_cut = [scores[steps == 64][0] for steps, scores in curves("grpo").values()]
    assert numbers(row("grpo")[1]) == [pytest.approx(100 * np.mean(at_cut), abs=0.051)]  # 1
    for name, arm in (("lopti", "lopti"), ("ar", "ar"), ("ar + lopti", "both"), ("random split like lopti", "random")):
        logs = np.log(speeds(arm))
        assert len(logs) == int(row(name)[0])
        assert numbers(row(name)[2]) == pytest.approx([np.exp(logs.mean()), *interval(logs)], abs=0.008), name  # 2 to 5
    for name, logs in (("grpo, 2 × rate", np.log(speeds("grpo", 3e-6))), ("two passes", np.log(speeds("two passes")))):
        assert row(name)[2][0] == "≥"
        assert numbers(row(name)[2]) == pytest.approx([np.exp(logs.mean()), interval(logs)[0]], abs=0.008)  # 6 and 7
    pairs = {
        "lopti / random split like lopti": speeds("lopti") / speeds("random"),
        "ar / constant like ar": speeds("ar") / speeds("constant"),
    }
    for name, ratios in pairs.items():  # 8 and 9
        found = [np.exp(np.log(ratios).mean()), *interval(np.log(ratios))]
        assert numbers(row(name)[1]) == pytest.approx(found, abs=0.008), name
    slower = np.log(speeds("both") / speeds("grpo", 3e-6))
    cell = row("ar + lopti / grpo, 2 × rate")[1]
    assert cell[0] == "≤"
    assert numbers(cell) == pytest.approx([np.exp(slower.mean()), interval(slower)[1]], abs=0.008)  # 10


def test_p_values_are_recomputed() -> None:
    """By all 1,024 signs of the logarithms; Holm: the largest p so far of (arms left) × p, from the smallest p on."""
    signs = np.array(list(itertools.product([1, -1], repeat=10)))

    def p_value(factors: np.ndarray) -> float:
        logs = np.log(factors)
        return float((np.abs(signs @ logs) >= abs(logs.sum()) - 1e-12).mean())

    arms = {"ar": "ar", "constant": "constant like ar", "lopti": "lopti", "both": "ar + lopti"}
    plain = {name: p_value(speeds(name)) for name in arms} | {
        name: p_value(speeds("grpo", rate)) for name, rate in (("1.5", 2.25e-6), ("2", 3e-6))
    } | {name: p_value(speeds(name)) for name in ("random", "two passes")}  # fmt: skip
    corrected, largest = {}, 0.0
    for rank, name in enumerate(sorted(plain, key=plain.__getitem__)):
        largest = max(largest, (len(plain) - rank) * plain[name])
        corrected[name] = min(1.0, largest)
    for name, cell in arms.items():
        assert float(row(cell)[3]) == pytest.approx(corrected[name], abs=0.005), name  # batches in hundredths here
    assert float(row("ar / constant like ar")[2]) == pytest.approx(
        p_value(speeds("ar") / speeds("constant")), abs=0.005
    )


def test_a_run_with_other_settings_than_the_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ten runs were not: the recipe that the plan builds on had changed."""
    monkeypatch.syspath_prepend(HERE)
    collect = importlib.import_module("collect")
    plan = collect.planned("plan.yaml")
    config = json.loads(json.dumps(plan["grpo @ 3e-06, seed 9"]))
    assert collect.other_settings(config, plan) == []
    config["optim"] |= {"same_order": True, "average_over": 8}
    assert collect.other_settings(config, plan) == ["optim.same_order", "optim.average_over"]
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=r"optim\.same_order, optim\.average_over: not the plan's"):
        collect.run(tmp_path, plan)
